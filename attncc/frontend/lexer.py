"""Text to tokens. Whatever no rule could use is reported here and marked, so that the reader steps over it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import lark
from lark import Lark, Token

from attncc import pycache
from attncc.errors import Span
from attncc.frontend.consts import MAX_TEXT
from attncc.frontend.report import Report, quoted, span_of

BAD = frozenset(("BADNUMBER", "BADOP", "STRING", "UNKNOWN"))
STARTS = ["start", "head", "param", "stmt", "opening", "setting", "trivia"]

# Not printable, or able to make a line look different from what it is; a lone CR would hide a line in a comment.
_HIDDEN = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_MARK = "\x1a"  # stands for a character that was reported already
_HIDDEN_HINTS = {
    "\ufeff": "this is a byte order mark: save the file as UTF-8 without it",
    "\r": "a lone carriage return: end lines with a line feed",
    "\0": "this is a NUL: is it a text file?",
}
_OPERATOR_HINTS = {
    "&&": "write 'and'", "||": "write 'or'", "**": "write x * x, or exp2(n * log2(x))", "<>": "write '!='",
    "=<": "write '<='", "=>": "write '>='", "->": "there are no functions to define", ":=": "write 'let NAME = …'",
    "<<": "write * with a power of two", ">>": "write // with a power of two", "++": "nothing is assigned twice",
}  # fmt: skip
_SIGN_HINTS = {
    "!": "write 'not'", "&": "write 'and' (there are no bit operators)", "|": "write 'or' (there are no bit operators)",
    "^": "write x * x; there are no powers and no bit operators", "~": "write 'not'",
    ";": "statements need no separator",
    "≤": "write '<='", "≥": "write '>='", "≠": "write '!='", "−": "write '-', the plain minus",
    "–": "write '-', the plain minus",
    "×": "write '*'", "·": "write '*'", "÷": "write '/'", "∧": "write 'and'", "∨": "write 'or'", "¬": "write 'not'",
    "∞": "an excluded pair is what `mask` says; there is no infinity", "?": "write 'where(condition, x, y)'",
}  # fmt: skip


@cache
def language() -> Lark:
    """The compiled grammar, kept beside Python's compiled modules: building it takes about 50 ms, loading it 4."""
    source = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    options: dict[str, Any] = {
        "parser": "lalr", "lexer": "basic", "propagate_positions": True, "start": STARTS, "maybe_placeholders": False,
    }  # fmt: skip
    key = f"{lark.__version__} {options} {source}"
    kept = pycache.load("grammar", key)
    if kept is not None:
        return Lark.load(BytesIO(kept))
    made, content = Lark(source, **options), BytesIO()
    made.save(content)
    pycache.keep("grammar", key, content.getvalue())
    return made


@dataclass(frozen=True)
class Lexed:
    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]
    end: Span  # just past the text's last sign


def lex(text: str, report: Report) -> Lexed:
    """All tokens, those of BAD among them after they were reported."""
    if len(text) > MAX_TEXT:
        report.error("E107", None, f"the text has {len(text)} characters; at most {MAX_TEXT} are read")
        text = ""
    clean = _without_hidden(text, report)
    tokens: list[Token] = []
    comments: list[Token] = []
    previous: Token | None = None
    for token in language().lex(clean):
        if token.type == "COMMENT":
            comments.append(token)
        elif token.type != "WS":
            _report_bad(token, previous, report)
            tokens.append(token)
        previous = token
    return Lexed(tuple(tokens), tuple(comments), _end(tokens))


def _end(tokens: list[Token]) -> Span:
    if not tokens:
        return Span(1, 1, 0, 0)
    last = span_of(tokens[-1])
    width = last.end - last.start
    return Span(last.line, last.column + width - 1, last.end - 1, last.end)


def _without_hidden(text: str, report: Report) -> str:
    """The text with each hidden character reported and replaced by _MARK, so that places stay as they are."""
    for match in _HIDDEN.finditer(text):
        at, found = match.start(), match.group()
        line_start = text.rfind("\n", 0, at) + 1
        span = Span(text.count("\n", 0, at) + 1, at - line_start + 1, at, at + 1)
        hint = _HIDDEN_HINTS.get(found, "remove it")
        report.error("E104", span, f"invisible or control character U+{ord(found):04X}", hint)
        if report.full:
            break
    return _HIDDEN.sub(_MARK, text)


def _report_bad(token: Token, previous: Token | None, report: Report) -> None:
    if token.type == "BADNUMBER":
        report.error("E102", token, f"{quoted(token)} is not a number", _number_hint(token))
    elif token.type == "BADOP":
        hint = _OPERATOR_HINTS.get(token, "nothing is assigned twice: write the operator alone")
        report.error("E106", token, f"the language has no operator {quoted(token)}", hint)
    elif token.type == "STRING":
        report.error("E103", token, "there are no strings in the language", "names and numbers are written bare")
    elif token.type == "UNKNOWN" and token != _MARK and not (previous is not None and previous.type == "UNKNOWN"):
        hint = _SIGN_HINTS.get(token, "")
        report.error("E101", token, f"the language has no use for {quoted(token)}", hint)


def _number_hint(text: str) -> str:
    if text.startswith("."):
        return f"write 0{text[:20]}" if re.fullmatch(r"\.[0-9]+", text) else ""
    if re.fullmatch(r"[0-9]+\.", text):
        return f"write {text[:20]}0"
    if "_" in text:
        return "write the digits without '_'"
    if re.fullmatch(r"0[xXbBoO]\w*", text):
        return "write it in decimal"
    return "numbers are like 3, 0.5 or 1e-6, and end before a letter"
