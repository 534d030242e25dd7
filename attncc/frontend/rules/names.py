"""Rules on names: which may be given, and what each means where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lark import Token

from attncc.errors import Span
from attncc.frontend.consts import (
    BUILTIN_NAMES,
    CALL_ARGUMENTS,
    FUNCTION_NAMES,
    MAX_NAME,
    PYTHON_KEYWORDS,
    TYPES,
)  # fmt: skip
from attncc.frontend.report import Report, quoted
from attncc.frontend.rules.context import Context, Typed

_ELSEWHERE = {  # what other tools call things
    "query": "q", "key": "k", "q_idx": "q", "kv_idx": "k", "i": "q", "j": "k", "batch": "b", "head": "h",
    "heads": "h_len", "score": "s", "seq_len": "k_len", "kv_len": "k_len", "n": "k_len",
    "num_heads": "h_len", "n_heads": "h_len", "batch_size": "b_len", "kv_head": "h_kv",
}  # fmt: skip
_ROW = frozenset(("k", "s", "q"))
_CALL = frozenset(("b", "h", "h_kv", "q", "k", "row", "s"))


@dataclass(frozen=True)
class Place:
    """A statement as a place for names: the built-ins that mean nothing there, and whether tensors may be read."""

    words: str
    refused: frozenset[str] = frozenset()
    tensors: bool = True


PLACES = {
    "let": Place("a let"),
    "mask": Place("a mask", frozenset("s")),
    "score": Place("a score"),
    "weight": Place("a weight", frozenset("s")),
    "scale": Place("a scale, which is one number for a call", _CALL, tensors=False),
    "dropout": Place("a dropout, which is one number for a call", _CALL, tensors=False),
    "softmax": Place("a softmax policy, whose argument is one number for a row", _ROW),
    "custom": Place("a custom weight"),
}
_VARIES = "a factor that varies belongs into score or weight"
_WHY = {
    "s": "the score 's' is read by 'score' only",
    "q": "use 'row', the row's own number",
    "k": "a key position differs within a row",
}


def check_shape(token: Token, report: Report) -> bool:
    """ASCII letters, digits and '_', not opening with '_', of a sane length, not a Python keyword."""
    name = str(token)
    if not name.isascii():
        report.error("E302", token, f"the name {quoted(name)} is not plain ASCII", "use a to z, A to Z, 0 to 9 and '_'")
    elif name.startswith("_"):
        report.error("E302", token, f"the name {quoted(name)} opens with '_'", "such names are kept for generated code")
    elif len(name) > MAX_NAME:
        report.error("E302", token, f"the name {quoted(name)} has more than {MAX_NAME} characters")
    elif name in PYTHON_KEYWORDS:
        report.error(
            "E302", token, f"{quoted(name)} is a Python keyword", "no Python call could name it: choose another"
        )
    else:
        return True
    return False


def check_new(token: Token, what: str, context: Context) -> bool:
    """A parameter's, let's or free axis' own name; also refused where it would shadow or clash with the call."""
    name, report = str(token), context.report
    if not check_shape(token, report):
        return False
    if name in CALL_ARGUMENTS or name.startswith("return_"):
        also = " and a position of the language" if name in BUILTIN_NAMES else ""
        report.error("E302", token, f"{quoted(name)} is an argument of every call{also}", "choose another name")
    elif name in BUILTIN_NAMES or name in FUNCTION_NAMES:
        report.error("E302", token, f"{quoted(name)} is built in and cannot name {what}", "choose another name")
    elif name in TYPES:
        report.error("E302", token, f"{quoted(name)} is a type and cannot name {what}", "choose another name")
    else:
        return check_free(token, what, context)
    return False


def check_free(token: Token, what: str, context: Context) -> bool:
    """No name is defined twice; nothing shadows."""
    name = str(token)
    owners = (("parameter", context.params), ("free axis", context.axes), ("let", context.lets))
    for owner, names in owners:
        if name in names:
            hint = "nothing shadows: choose another name"
            if {owner, what} == {"parameter", "a free axis"} or (owner, what) == ("free axis", "a parameter"):
                hint = "a free axis is an int by itself: leave the parameter out, or rename one of the two"
            context.report.error("E303", token, f"{quoted(name)} is already the name of a {owner}", hint)
            return False
    return True


def spoil(token: Token, names: dict[str, Any], context: Context) -> None:
    """Note a name whose definition has a fault, so that its uses are not faults as well."""
    name = str(token)
    known = name in BUILTIN_NAMES or name in FUNCTION_NAMES or name in context.visible()
    if token.type == "NAME" and not known:
        names[name] = None


def unknown(token: Token, context: Context) -> None:
    """Report a name that nothing defines."""
    name = str(token)
    if name in context.later:
        context.report.error(
            "E304", token, f"{quoted(name)} is not defined yet at this place", "a let may use only lets above it"
        )
        return
    if not name.isascii():
        context.report.error(
            "E301", token, f"unknown name {quoted(name)}", "it is not plain ASCII, whatever it looks like"
        )
        return
    other = _ELSEWHERE.get(name)
    hint = (
        f"here it is called {other!r}"
        if other
        else context.report.suggest(name, context.visible(), "a parameter or a let must define it")
    )
    context.report.error("E301", token, f"unknown name {quoted(name)}", hint)


def check_place(value: Typed, span: Span | Token, name: str, place: Place, report: Report) -> bool:
    """A built-in, or a let that reads one, must have a meaning in the statement."""
    wrong = value.builtins & place.refused
    if wrong:
        culprit = next(b for b in BUILTIN_NAMES if b in wrong)
        through = "" if culprit == name else f" (through {quoted(name)})"
        report.error("E305", span, f"'{culprit}'{through} has no meaning in {place.words}", _WHY.get(culprit, _VARIES))
        return False
    if value.tensors and not place.tensors:
        tensor = min(value.tensors)
        hint = _VARIES if "scale" in place.words else "pass a float parameter"
        report.error("E305", span, f"the tensor {quoted(tensor)} cannot be read in {place.words}", hint)
        return False
    return True
