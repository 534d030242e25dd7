"""Lines of a generated file that are too long, broken where a reader would: at a bracket's own level, operators first.

A comment goes above its line. A call that does not fit has its arguments on a line of their own, or one to a line; a
chain of operators fills lines that begin with one. Nothing else of the text changes, so neither does its meaning.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Sequence
from functools import lru_cache

WIDTH = 120  # characters
INDENT = "    "
OPEN, CLOSE = "([{", ")]}"
# From the weakest on; all of one kind are broken at together. `if` and `else` are those of an expression.
KINDS = (("if", "else"), ("or",), ("and",), ("<", "<=", ">", ">=", "==", "!="), ("|",), ("&",), (">>", "<<"),
         ("+", "-"), ("*", "/", "//", "%"))  # fmt: skip
PREFIXES = ("return ", "if ", "elif ", "while ", "assert ", "yield ")

Piece = tuple[int, int, str]  # of a line: where a token begins and ends, and its text


def broken(text: str, width: int = WIDTH) -> str:
    """`text` without lines of more than `width` characters, but where nothing can be broken, and those of a statement
    or a string that has several already."""
    lines = text.split("\n")
    if all(len(line) <= width for line in lines):
        return text
    whole = _statements(text)
    return "\n".join(
        part
        for i, line in enumerate(lines)
        for part in (_broken(line, width) if len(line) > width and i in whole else [line])
    )


def _statements(text: str) -> set[int]:
    """Numbers, from 0, of the lines that are a statement or a comment each."""
    found: set[int] = set()
    start = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0] - 1
        depth += (token.string in OPEN) - (token.string in CLOSE) if token.type == tokenize.OP else 0
        alone = token.type == tokenize.COMMENT and depth == 0 and token.line.lstrip().startswith("#")
        if alone or (token.type == tokenize.NEWLINE and start == row):
            found.add(row)
        if token.type in (tokenize.NEWLINE, tokenize.NL) and depth == 0:
            start = row + 1
    return found


def provenance(made: str, checked: str, width: int = WIDTH) -> tuple[str, ...]:
    """The last lines of a file's comment: the command that makes it, and the one that checks it."""
    one = f"# made by: {made}     checked by: {checked}"
    return (one,) if len(one) <= width else (f"# made by: {made}", f"# checked by: {checked}")


def _broken(line: str, width: int) -> list[str]:
    code = line.lstrip(" ")
    indent = line[: len(line) - len(code)]
    tokens = _tokens(code)
    if not tokens or (not indent and code.startswith("#")):  # the head of the file
        return [line]
    if tokens[-1][2].startswith("#"):
        start = tokens[-1][0]
        above = _comment(code[start:], indent, width)
        rest = code[:start].rstrip()
        return [*above, *_fitted(indent + rest, width)] if rest else above
    return _Breaker(width).statement(code, indent)


def _fitted(line: str, width: int) -> list[str]:
    return [line] if len(line) <= width else _broken(line, width)


def _comment(text: str, indent: str, width: int) -> list[str]:
    lines = [f"{indent}#"]
    for word in text.removeprefix("#").split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(f"{indent}#")
        lines[-1] += f" {word}"
    return lines


@lru_cache(maxsize=256)  # a long statement is looked at for every way to break it
def _tokens(code: str) -> tuple[Piece, ...]:
    found = tokenize.generate_tokens(io.StringIO(code).readline)
    return tuple((t.start[1], t.end[1], t.string) for t in found if t.string.strip() and t.start[0] == 1)


class _Breaker:
    def __init__(self, width: int) -> None:
        self.width = width

    def statement(self, code: str, indent: str) -> list[str]:
        """What comes before the expression stays with its first line, a colon behind it with its last."""
        tokens = _tokens(code)
        start, suffix = 0, ""
        for (_, end, text), depth in zip(tokens, _depths(tokens), strict=True):
            if depth == 0 and text.endswith("=") and text not in ("==", "<=", ">=", "!="):
                start = end + 1
        if start == 0:
            start = next((len(p) for p in PREFIXES if code.startswith(p)), 0)
            if code.endswith(":"):
                code, suffix = code[:-1], ":"
        return self.expression(code[:start], code[start:], suffix, indent, bare=True)

    def expression(self, prefix: str, code: str, suffix: str, indent: str, bare: bool) -> list[str]:
        """`bare`: no bracket is around it that would let a line end."""
        one = f"{indent}{prefix}{code}{suffix}"
        if len(one) <= self.width:
            return [one]
        deeper = indent + INDENT
        opened = _call(code)
        if opened is not None:
            head, inner = code[: opened + 1], code[opened + 1 : -1]
            if not inner:
                return [one]
            return [f"{indent}{prefix}{head}", *self.inside(inner, deeper), f"{indent}{code[-1]}{suffix}"]
        arguments, parts = _arguments(code), _chain(code)
        if len(arguments) > 1:
            return [f"{indent}{prefix}(", *self.inside(code, deeper), f"{indent}){suffix}"]
        if len(parts) < 2:
            return [one]
        if not bare:
            return self.fill(parts, indent, suffix)
        return [f"{indent}{prefix}(", *self.fill(parts, deeper), f"{indent}){suffix}"]

    def inside(self, code: str, indent: str) -> list[str]:
        """What a pair of brackets holds: in a line if it fits, else an argument to a line."""
        if len(indent + code) <= self.width:
            return [indent + code]
        arguments = _arguments(code)
        if len(arguments) == 1:
            return self.expression("", code, "", indent, bare=False)
        lines: list[str] = []
        for argument in arguments:
            name, equals, value = _keyword(argument)
            lines += self.expression(name + equals, value, ",", indent, bare=bool(equals))
        return lines

    def fill(self, parts: list[str], indent: str, suffix: str = "") -> list[str]:
        """Operands, each but the first with its operator before it, as many to a line as it takes."""
        lines: list[str] = []
        for i, part in enumerate(parts):
            end = suffix if i == len(parts) - 1 else ""
            if (
                lines
                and not lines[-1].lstrip().startswith(tuple(CLOSE))
                and len(lines[-1]) + 1 + len(part + end) <= self.width
            ):
                lines[-1] += f" {part}{end}"
            elif len(indent + part + end) <= self.width:
                lines.append(f"{indent}{part}{end}")
            else:
                operator, _, operand = part.rpartition(" ") if i == 0 else part.partition(" ")
                lead = f"{operator} " if i else ""
                lines += self.expression(lead, operand if i else part, end, indent, bare=bool(i))
        return lines


def _depths(tokens: Sequence[Piece]) -> Iterator[int]:
    """How many brackets are around each token; a bracket itself is outside."""
    depth = 0
    for *_, text in tokens:
        depth -= text in CLOSE
        yield depth
        depth += text in OPEN


def _call(code: str) -> int | None:
    """Where the bracket opens that the whole of `code` ends with, what is before it being a name or another call."""
    tokens = _tokens(code)
    depths = list(_depths(tokens))
    if not tokens or tokens[-1][2] not in CLOSE or _chain(code)[1:]:
        return None
    if any(text in ("not", "lambda", "~", "-") for (*_, text), depth in zip(tokens, depths, strict=True) if not depth):
        return None
    return next(
        start for (start, _, text), d in reversed([*zip(tokens, depths, strict=True)]) if text in OPEN and not d
    )


def _split(code: str, at: tuple[str, ...]) -> list[str]:
    """Parts of `code`, each but the first beginning with one of `at`, which have to stand between two operands."""
    tokens = _tokens(code)
    cuts, before = [0], ""
    for (start, _, text), depth in zip(tokens, _depths(tokens), strict=True):
        binary = before not in ("", "(", "[", ",", "=") and code[start - 1 : start] == " " and code[start:] != text
        if depth == 0 and text in at and binary and code[start + len(text) : start + len(text) + 1] == " ":
            cuts.append(start)
        before = text
    return [code[i:j].strip() for i, j in zip(cuts, [*cuts[1:], len(code)], strict=True)]


def _chain(code: str) -> list[str]:
    """Operands of the operators that bind the least, each but the first with its operator before it."""
    for kind in KINDS:
        parts = _split(code, kind)
        if len(parts) > 1:
            return parts
    return [code]


def _arguments(code: str) -> list[str]:
    tokens = _tokens(code)
    commas = [start for (start, _, text), d in zip(tokens, _depths(tokens), strict=True) if text == "," and d == 0]
    parts = [code[i:j].strip() for i, j in zip([0, *(c + 1 for c in commas)], [*commas, len(code)], strict=True)]
    return [p for p in parts if p]


def _keyword(argument: str) -> tuple[str, str, str]:
    """`name=value` in parts; the first two are empty for an argument without a name."""
    name, equals, value = argument.partition("=")
    return (name, equals, value) if equals and name.isidentifier() and value[:1] != "=" else ("", "", argument)
