"""Tokens to parse trees, piece by piece: a fault in one statement, parameter or setting leaves the others readable.

The token stream is cut at braces, reserved words and commas; lark parses each piece from its own start symbol.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from lark import Token, Tree
from lark.exceptions import UnexpectedToken

from attncc.errors import Span
from attncc.frontend.consts import MAX_NESTING, SECTIONS, SETTINGS, STATEMENTS
from attncc.frontend.hints import is_reserved, report_syntax
from attncc.frontend.lexer import BAD, Lexed, language
from attncc.frontend.report import Report, cover, quoted, span_of

_STATEMENT_TYPES = frozenset(word.upper() for word in STATEMENTS)
_VALUE_END = frozenset(("NAME", "INT", "FLOAT", "BOOL", "RPAR", "RSQB"))


@dataclass(frozen=True)
class Piece:
    """A parameter, statement or setting. `tree` is None where it did not parse (its fault is reported already)."""

    kind: str  # param, setting, or the statement's word
    tokens: tuple[Token, ...]
    tree: Tree | None

    @property
    def span(self) -> Span:
        return cover(span_of(self.tokens[0]), span_of(self.tokens[-1]))


@dataclass
class Body:
    """An attention block (kind `attention`) or a block of settings (kind `precision`, `schedule`, `layout`)."""

    kind: str
    opening: Token
    name: Token | None = None  # the attention's name, or a schedule's target
    params: list[Piece] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Draft:
    blocks: list[Body]

    def of(self, *kinds: str) -> list[Body]:
        return [b for b in self.blocks if b.kind in kinds]


def read(lexed: Lexed, report: Report) -> Draft:
    """Every block that can be made out."""
    reader = _Reader(lexed, report)
    blocks = []
    while reader.at < len(lexed.tokens) and not report.full:
        block = reader.block()
        if block:
            blocks.append(block)
    return Draft(blocks)


def parse_piece(start: str, kind: str, tokens: Sequence[Token], report: Report) -> Tree | None:
    """One piece through the LALR parser; None after a report."""
    if any(t.type in BAD for t in tokens) or _too_deep(tokens, report):
        return None
    parser = language().parse_interactive(start=start)
    at: Token | None = None
    try:
        for at in tokens:
            parser.feed_token(at)
        at = None
        tree = parser.feed_eof(tokens[-1])
        assert isinstance(tree, Tree)  # every start symbol that is used here makes one
        return tree
    except UnexpectedToken:
        report_syntax(kind, tokens, at, report)
        return None


def _too_deep(tokens: Sequence[Token], report: Report) -> bool:
    """Whether brackets and unary operators nest beyond the limit; counted before anything recursive runs."""
    weights: list[int] = []
    depth = run = 0
    for token in tokens:
        if token.type in ("MINUS", "NOT"):
            run += 1
        elif token.type in ("LPAR", "LSQB"):
            weights.append(run + 1)
            depth += run + 1
            run = 0
        else:
            run = 0
            if token.type in ("RPAR", "RSQB") and weights:
                depth -= weights.pop()
        if depth + run > MAX_NESTING:
            report.error(
                "E801", token, f"more than {MAX_NESTING} brackets and signs inside one another", "name parts with 'let'"
            )
            return True
    return False


@dataclass
class _Reader:
    lexed: Lexed
    report: Report
    at: int = 0

    def peek(self, offset: int = 0) -> Token | None:
        index = self.at + offset
        return self.lexed.tokens[index] if 0 <= index < len(self.lexed.tokens) else None

    def block(self) -> Body | None:
        first = self.peek()
        assert first is not None
        if first.type == "ATTENTION":
            return self.attention(first)
        if first.type == "SECTION":
            return self.section(first)
        self.skip_outside(first)
        return None

    def skip_outside(self, first: Token) -> None:
        while (token := self.peek()) is not None and token.type not in ("ATTENTION", "SECTION"):
            self.at += 1
        if first.type in BAD:
            return
        if first.type == "RBRACE":
            self.report.error("E203", first, "'}' closes nothing")
            return
        hint = self.report.suggest(first.value, ("attention", *SECTIONS), "a spec is attention NAME { … }")
        if first.type in _STATEMENT_TYPES:
            hint = "statements belong inside attention NAME { … }"
        self.report.error("E207", first, f"{quoted(first)} stands outside any block", hint)

    def attention(self, opening: Token) -> Body:
        body = Body("attention", opening)
        header = self.until_brace()
        if header is None:
            header = []
        name, rest = header[:1], header[1:]
        if not name:
            self.report.error("E206", opening, "the attention has no name", "write attention NAME { … }")
        elif is_reserved(name[0]):
            self.report.error("E302", name[0], f"{quoted(name[0])} is a reserved word", "choose another name")
        elif parse_piece("head", "head", [opening, *name], self.report):
            body.name = name[0]
        if rest:
            body.params = self.params(rest)
        body.pieces = [self.statement(p) for p in self.cut_statements(self.inside())]
        return body

    def section(self, opening: Token) -> Body:
        body = Body(opening.value, opening)
        header = self.until_brace() or []
        if parse_piece("opening", "opening", [opening, *header], self.report) and header:
            body.name = header[0]
        for tokens in self.cut_settings(self.inside(), SETTINGS[body.kind]):
            body.pieces.append(Piece("setting", tuple(tokens), parse_piece("setting", "setting", tokens, self.report)))
        return body

    def until_brace(self) -> list[Token] | None:
        """What stands between a block's first word and its '{', which is stepped over."""
        self.at += 1
        header: list[Token] = []
        while (token := self.peek()) is not None:
            following = self.peek(1)
            parameter = following is not None and following.type == "COLON"  # a reserved word as a parameter's name
            if token.type == "LBRACE":
                self.at += 1
                return header
            if token.type == "RBRACE" or (
                token.type in _STATEMENT_TYPES | {"ATTENTION", "SECTION"} and header and not parameter
            ):
                break
            header.append(token)
            self.at += 1
        where = token if token is not None else self.lexed.end
        self.report.error("E203", where, "'{' is missing before this", "a block is NAME { … }")
        return header

    def inside(self) -> list[Token]:
        """The tokens up to the block's '}', which is stepped over."""
        tokens: list[Token] = []
        nested = 0  # braces that should not be there, left out with their partners
        while (token := self.peek()) is not None and token.type not in ("ATTENTION", "SECTION"):
            self.at += 1
            if token.type == "RBRACE":
                if not nested:
                    return tokens
                nested -= 1
            elif token.type != "LBRACE":
                tokens.append(token)
            else:
                if not nested:
                    self.report.error("E203", token, "'{' opens nothing here", "blocks do not nest")
                nested += 1
        where = token if token is not None else self.lexed.end
        self.report.error("E203", where, "'}' is missing before this" if token else "'}' is missing at the end")
        return tokens

    def params(self, tokens: list[Token]) -> list[Piece]:
        if tokens[0].type != "LPAR" or tokens[-1].type != "RPAR":
            wrong = tokens[0] if tokens[0].type != "LPAR" else tokens[-1]
            if wrong.type not in BAD:
                self.report.error(
                    "E208", wrong, "parameters stand in one pair of ( )", "attention NAME(window: int) { … }"
                )
            return [Piece("param", tuple(tokens), None)]
        pieces = []
        inner = tokens[1:-1]
        cuts = [-1, *_commas(inner), len(inner)]
        for a, b in itertools.pairwise(cuts):
            part = inner[a + 1 : b]
            if part:
                pieces.append(self.param(part))
            elif b < len(inner):
                self.report.error(
                    "E205", inner[b], "',' follows nothing", "parameters are NAME: TYPE, one comma between two"
                )
        return pieces

    def param(self, tokens: list[Token]) -> Piece:
        if is_reserved(tokens[0]) and len(tokens) > 1 and tokens[1].type == "COLON":
            self.report.error("E302", tokens[0], f"{quoted(tokens[0])} is a reserved word", "choose another name")
            return Piece("param", tuple(tokens), None)
        return Piece("param", tuple(tokens), parse_piece("param", "param", tokens, self.report))

    def cut_statements(self, tokens: list[Token]) -> list[list[Token]]:
        """Cut before each statement's word, and before a name that starts a line where no name can go on."""
        parts: list[list[Token]] = []
        for i, token in enumerate(tokens):
            before = tokens[i - 1] if i else None
            after = tokens[i + 1] if i + 1 < len(tokens) else None
            if i == 0 or self.opens(before, token, after):
                parts.append([token])
            else:
                parts[-1].append(token)
        return parts

    def opens(self, before: Token | None, token: Token, after: Token | None) -> bool:
        if token.type in _STATEMENT_TYPES:
            named = after is not None and after.type == "EQUAL"
            if named and (token.type == "WEIGHT" or (before is not None and before.type == "LET")):
                return False  # custom(weight = …), or a let with a reserved name, told below
            used = before is not None and before.type in (
                "CMP",
                "PLUS",
                "MINUS",
                "MUL",
                "AND",
                "OR",
                "NOT",
                "LPAR",
                "COMMA",
            )
            return not (used and before is not None and before.line == token.line)
        return before is not None and token.type == "NAME" and before.type in _VALUE_END and before.line != token.line

    def statement(self, tokens: list[Token]) -> Piece:
        first = tokens[0]
        kind = first.value
        if first.type not in _STATEMENT_TYPES:
            if first.type not in BAD:
                hint = self.report.suggest(first.value, STATEMENTS, "statements are " + ", ".join(STATEMENTS))
                self.report.error("E204", first, f"{quoted(first)} does not begin a statement", hint)
            return Piece("unknown", tuple(tokens), None)
        reserved = next((t for t in tokens[1:] if t.type in _STATEMENT_TYPES and not _policy_word(tokens, t)), None)
        if reserved is not None:
            self.report.error("E302", reserved, f"{quoted(reserved)} is a reserved word", "choose another name")
            return Piece(kind, tuple(tokens), None)
        return Piece(kind, tuple(tokens), parse_piece("stmt", kind, tokens, self.report))

    def cut_settings(self, tokens: list[Token], known: Sequence[str]) -> list[list[Token]]:
        """Cut before each known setting, and before a name that starts a line."""
        parts: list[list[Token]] = []
        depth = 0
        for i, token in enumerate(tokens):
            before = tokens[i - 1] if i else None
            free = depth == 0 and before is not None and before.type not in ("COMMA", "EQUAL") and len(parts[-1]) > 1
            names = token.type == "NAME" or is_reserved(token)
            if i == 0 or (free and names and (token in known or token.line != before.line)):  # type: ignore[union-attr]
                parts.append([token])
            else:
                parts[-1].append(token)
            depth = max(0, depth + (token.type == "LPAR") - (token.type == "RPAR"))
        return parts


def _policy_word(tokens: Sequence[Token], token: Token) -> bool:
    return tokens[0].type == "SOFTMAX" and token.type == "WEIGHT"


def _commas(tokens: Sequence[Token]) -> list[int]:
    """Places of the commas outside any bracket."""
    depth, found = 0, []
    for i, token in enumerate(tokens):
        depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
        if token.type == "COMMA" and depth <= 0:
            found.append(i)
    return found
