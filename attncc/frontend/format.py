"""`attncc fmt`: the author's tokens and comments, set by the rules of the page."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from attncc.frontend.lexer import Lexed, lex
from attncc.frontend.page import Block, Item, set_page
from attncc.frontend.parse import parse
from attncc.frontend.reader import Body, read
from attncc.frontend.report import Report

_OPERATOR_BEFORE = frozenset(
    ("PLUS", "MINUS", "MUL", "CMP", "AND", "OR", "NOT", "LPAR", "LSQB", "COMMA", "EQUAL", "COLON")
)


def format_text(text: str, filename: str = "<spec>") -> str:
    """The spec set nicely: same meaning, comments kept, formatting twice changes nothing. Raises SpecError."""
    parse(text, filename)
    report = Report()
    lexed = lex(text, report)
    draft = read(lexed, report)
    setter = _Setter(lexed)
    blocks = [setter.block(b) for b in draft.blocks]
    return set_page(blocks, setter.finish())


def tokens_text(tokens: Sequence[Token]) -> str:
    """Tokens with one kind of spacing: around binary operators, after commas, inside no bracket."""
    text = ""
    before: Token | None = None
    unary = False
    for token in tokens:
        if before is not None and not unary and _spaced(before, token):
            text += " "
        unary = token.type == "MINUS" and (before is None or before.type in _OPERATOR_BEFORE)
        text += token
        before = token
    return text


def _spaced(before: Token, token: Token) -> bool:
    if before.type in ("LPAR", "LSQB") or token.type in ("RPAR", "RSQB", "COMMA", "COLON", "RBRACE"):
        return False
    return not (before.type == "NAME" and token.type in ("LPAR", "LSQB"))


class _Setter:
    """Gives each comment to the item that it belongs to: the one on its line, else the one that follows."""

    def __init__(self, lexed: Lexed) -> None:
        self.stream = sorted((*lexed.tokens, *lexed.comments), key=lambda t: t.start_pos or 0)
        self.at = 0
        self.line = 0  # of what was read last
        self.pending: list[str] = []

    def block(self, body: Body) -> Block:
        opening = Item()
        head = self.take(opening, 1 + (body.name is not None))
        opening.text = tokens_text(head)
        params = []
        if self.next_type() == "LPAR":
            self.take(opening, 1)
            for piece in body.params:
                item = Item(tokens_text(piece.tokens))
                comma = self.take(item, len(piece.tokens)) and self.next_type() == "COMMA"
                self.take(item, 1 if comma else 0)
                params.append(item)
        brace = Item()
        self.take(brace, 2 if self.next_type() == "RPAR" else 1)
        items = []
        for piece in body.pieces:
            item = self.item(piece.tokens)
            self.take(item, len(piece.tokens))
            items.append(item)
        close = Item()
        self.take(close, 1)
        return Block(opening, items, params, brace, close, body.kind != "attention")

    def item(self, tokens: Sequence[Token]) -> Item:
        if tokens[0].type == "LET":
            return Item(tokens_text(tokens[3:]), f"let {tokens[1]}")
        return Item(tokens_text(tokens[1:]), str(tokens[0]))

    def next_type(self) -> str:
        return next(t.type for t in self.stream[self.at :] if t.type != "COMMENT")

    def take(self, item: Item, count: int) -> list[Token]:
        """Step over `count` tokens of an item and over the comments before, among and right after them."""
        taken: list[Token] = []
        while len(taken) < count:
            token = self.stream[self.at]
            if token.type == "COMMENT":
                self.comment(token, item if taken else None)
            else:
                if not taken:
                    self.gap(token)
                    item.above = self.pending + item.above
                    self.pending = []
                taken.append(token)
                self.line = token.line or 0
            self.at += 1
        if count and self.at < len(self.stream):
            after = self.stream[self.at]
            if after.type == "COMMENT" and after.line == self.line and not item.trailing:
                item.trailing = _comment_text(after)
                self.at += 1
        return taken

    def comment(self, token: Token, inside: Item | None) -> None:
        """A comment among an item's tokens goes above it; one before it waits for it."""
        if inside is not None:
            inside.above.append(_comment_text(token))
        else:
            self.gap(token)
            self.pending.append(_comment_text(token))
        self.line = token.line or 0

    def gap(self, token: Token) -> None:
        if self.line and (token.line or 0) > self.line + 1 and self.pending[-1:] != [""]:
            self.pending.append("")

    def finish(self) -> list[str]:
        """Comments after the last block."""
        for token in self.stream[self.at :]:
            self.comment(token, None)
        return self.pending


def _comment_text(token: Token) -> str:
    """`# words`: one blank after the sign, none at the end; signs and shebangs stay as they are."""
    body = token[1:].rstrip()
    return "#" + (body if not body or body[0] in " #!" else " " + body)
