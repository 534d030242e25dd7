"""The one registry of diagnostic codes. docs/diagnostics.md explains each; a test keeps the two the same.

E: the spec is wrong. N: it asks for what is not built yet. W: a warning, the spec is compiled all the same; W2 follow
from a proof about the mask, and have no place in the text.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    # the text
    "E101": "character that the language does not use",
    "E102": "malformed number",
    "E103": "strings are not part of the language",
    "E104": "invisible or control character",
    "E105": "number out of range",
    "E106": "operator of another language",
    "E107": "text too long",
    # the form
    "E201": "no attention block",
    "E202": "more than one attention block",
    "E203": "missing or stray brace",
    "E204": "not a statement",
    "E205": "unexpected word or sign",
    "E206": "unfinished",
    "E207": "text outside any block",
    "E208": "bracket not closed, or closed by another",
    # names
    "E301": "unknown name",
    "E302": "name refused",
    "E303": "name already taken",
    "E304": "let used before it is defined",
    "E305": "name has no meaning here",
    "E306": "not a function",
    "E307": "tensor without indices",
    "E308": "not a tensor",
    "E309": "function without arguments",
    # types
    "E401": "operand of the wrong type",
    "E402": "statement of the wrong type",
    "E403": "wrong number of arguments",
    "E404": "wrong number of indices",
    "E405": "index is not an int",
    "E406": "comparison chain changes direction",
    "E407": "divisor below 1",
    "E408": "floor division or remainder of floats",
    # statements
    "E501": "statement given twice",
    "E502": "unknown alignment",
    "E503": "unknown softmax policy",
    "E504": "wrong arguments of a softmax policy",
    "E505": "constant outside its range",
    # parameters
    "E601": "unknown type",
    "E602": "axes missing or not wanted",
    "E603": "axis refused",
    "E604": "const of a type other than int",
    "E605": "default does not fit",
    "E606": "grad does not fit",
    "E607": "sorted does not fit",
    "E608": "tensor without a packed form",
    # settings
    "E701": "unknown setting",
    "E702": "setting or block given twice",
    "E703": "unknown value of a setting",
    "E704": "setting of the wrong form",
    "E705": "number not allowed in a setting",
    "E706": "unknown target",
    "E707": "target where none is wanted",
    "E708": "algorithm that cannot express the spec",
    "E709": "row output without meaning",
    # limits
    "E801": "nesting too deep",
    "E802": "expression too large",
    "E803": "expression too deep",
    "E804": "too many of one thing",
    "E805": "too many faults",
    # not built yet
    "N103": "layout not built yet",
    "N104": "quantised keys and values not built yet",
    "N105": "input type not built yet",
    "N106": "algorithm not built yet",
    "N108": "precision setting not built yet",
    "N109": "pass not built yet",
    # warnings
    "W101": "unused parameter",
    "W102": "unused let",
    "W103": "read at a query position that may be negative",
    "W104": "axis indexed by another axis",
    "W105": "score without s",
    "W106": "mask that never changes",
    "W107": "constant outside float32",
    "W108": "setting without effect",
    # warnings of analysis.prove
    "W201": "mask that keeps no pair",
    "W202": "mask that keeps every pair",
    "W203": "the future under a causal name",
}
