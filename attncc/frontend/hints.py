"""Words for syntax errors: the parser's own list of expected signs helps nobody, so causes are told apart by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lark import Token

from attncc.frontend.consts import RESERVED, STATEMENTS
from attncc.frontend.report import Report, quoted

_CLOSING = {"LPAR": "RPAR", "LSQB": "RSQB"}
_SHAPES = {
    "let": "let NAME = EXPRESSION", "mask": "mask CONDITION", "score": "score EXPRESSION", "scale": "scale EXPRESSION",
    "weight": "weight EXPRESSION", "dropout": "dropout PROBABILITY", "align": "align end, or align start",
    "softmax": "softmax POLICY, or softmax POLICY(ARGUMENT)",
    "param": "NAME: TYPE, like window: int = 128, slope: float grad = 1.0 or table: f32[h] grad",
    "setting": "NAME VALUE, VALUE…, like tile q = 128, k = 64", "head": "attention NAME(PARAMETERS) { STATEMENTS }",
    "opening": "precision { … }, schedule { … }, schedule TARGET { … } or layout { … }",
}  # fmt: skip


_PYTHON = {
    "if": "write where(condition, x, y)", "else": "write where(condition, x, y)", "is": "write '=='",
    "in": "write k == a or k == b, or look it up in a tensor of bool", "xor": "write '!=' between bools",
    "mod": "write '%'", "div": "write '//'",
}  # fmt: skip


def is_reserved(token: Token) -> bool:
    return token.value in RESERVED


def unbalanced(tokens: Sequence[Token]) -> tuple[Token, str] | None:
    """The first bracket that is never closed, or closes nothing or another kind; and what is wrong with it."""
    stack: list[Token] = []
    for token in tokens:
        if token.type in _CLOSING:
            stack.append(token)
        elif token.type in ("RPAR", "RSQB"):
            if not stack:
                return token, f"'{token}' closes nothing"
            opened = stack.pop()
            if _CLOSING[opened.type] != token.type:
                return token, f"'{token}' cannot close the '{opened}' of line {opened.line}, column {opened.column}"
    return (stack[0], f"'{stack[0]}' is never closed") if stack else None


def report_syntax(kind: str, tokens: Sequence[Token], at: Token | None, report: Report) -> None:
    """One diagnostic for a piece that does not parse; `at` is the token the parser stumbled on, None at its end."""
    shape = _SHAPES[kind]
    bracket = unbalanced(tokens)
    if bracket:
        report.error("E208", bracket[0], bracket[1], f"the form is {shape}")
    elif at is None:
        report.error("E206", tokens[-1], f"{quoted(tokens[-1])} cannot be the end here", f"the form is {shape}")
    else:
        before = next((a for a, b in itertools.pairwise(tokens) if b is at), None)
        message, hint = _unexpected(kind, at, before, report)
        report.error("E205", at, message, hint or f"the form is {shape}")


def _unexpected(kind: str, at: Token, before: Token | None, report: Report) -> tuple[str, str]:
    expression = kind in STATEMENTS
    opening = before is not None and before.type == kind.upper()
    if opening and kind in ("let", "softmax", "align"):
        return f"{quoted(at)} stands where the name should", ""
    if at.type == "EQUAL" and expression:
        return "'=' compares nothing", "write '==' to compare, 'let NAME = …' to name"
    if is_reserved(at):
        return f"{quoted(at)} is a reserved word and cannot stand here", ""
    if at.type == "COLON":
        return (
            "':' has no meaning here",
            "types belong to the parameters, after the attention's name" if expression else "",
        )
    if at.type == "COMMA" and expression:
        return "',' has no meaning here", "one statement takes one expression; write 'and' or another statement"
    if before is not None and before.type in ("NAME", "INT", "FLOAT", "RPAR", "RSQB", "BOOL") and expression:
        if at.type in ("NAME", "INT", "FLOAT"):
            word = _PYTHON.get(at.value) or report.suggest(at.value, ("and", "or", "not"), "")
            return f"{quoted(at)} follows {quoted(before)} without an operator", word
        if before.type in ("INT", "FLOAT", "RPAR", "RSQB") and at.type in ("LPAR", "LSQB"):
            return f"'{at}' follows {quoted(before)} without an operator", "write '*' to multiply"
    if before is not None and at.type in ("CMP", "MUL", "PLUS", "AND", "OR", "NOT"):
        hint = "put 'not' around a whole comparison: not (a < b)" if at.type == "NOT" else ""
        return f"{quoted(at)} cannot follow {quoted(before)}", hint
    return f"{quoted(at)} is not expected here", ""
