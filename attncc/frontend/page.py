"""How a spec's page is set: one layout for `fmt`, which keeps comments, and for the canonical text, which has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 110
INDENT = "    "


@dataclass
class Item:
    """A parameter, statement or setting. `above` holds comment lines, "" among them for a blank line."""

    text: str = ""
    word: str = ""  # what is aligned: the statement's or setting's word, or `let NAME`
    above: list[str] = field(default_factory=list)
    trailing: str = ""  # a comment on the item's own line

    @property
    def commented(self) -> bool:
        return bool(self.trailing or any(self.above))


@dataclass
class Block:
    """`opening(params) { items }`; `brace` carries the comments around ') {', `close` those around '}'."""

    opening: Item
    items: list[Item]
    params: list[Item] = field(default_factory=list)
    brace: Item = field(default_factory=Item)
    close: Item = field(default_factory=Item)
    settings: bool = False


def set_page(blocks: Sequence[Block], tail: Sequence[str] = ()) -> str:
    """The page, ending in one newline."""
    lines: list[str] = []
    for block in blocks:
        lines += _block(block)
    lines += tail
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(block: Block) -> list[str]:
    above = list(block.opening.above)
    listed = any(p.commented for p in block.params) or any(block.brace.above) or bool(block.opening.trailing)
    if not block.params:
        above += [c for c in block.brace.above if c] + ([block.opening.trailing] if block.opening.trailing else [])
        listed = False
    head = block.opening.text
    if block.params:
        one_line = f"{head}({', '.join(p.text for p in block.params)})"
        listed = listed or len(one_line) + 2 > WIDTH
        if not listed:
            head = one_line
    if not listed and not block.brace.trailing and not any(c for c in block.close.above):
        short = _short(block, head)
        if short is not None:
            return [*above, _with_comment(short, block.close.trailing)]
    lines = above
    if listed:
        lines += [_with_comment(head + "(", block.opening.trailing), *_params(block), ") {"]
    else:
        lines.append(head + " {")
    lines[-1] = _with_comment(lines[-1], block.brace.trailing)
    lines += _body(block.items)
    lines += [INDENT + c for c in block.close.above if c]
    lines.append(_with_comment("}", block.close.trailing))
    return lines


def _short(block: Block, head: str) -> str | None:
    """A block on one line: without items, or with one setting."""
    if not block.items:
        return head + " {}"
    only = block.items[0]
    text = f"{head} {{ {only.word} {only.text} }}"
    return text if block.settings and len(block.items) == 1 and not only.commented and len(text) <= WIDTH else None


def _with_comment(line: str, comment: str) -> str:
    return f"{line}  {comment}" if comment else line


def _params(block: Block) -> list[str]:
    rows = [Item(p.text + ",", "", p.above, p.trailing) for p in block.params]
    rows[0].above = [c for c in rows[0].above if c]
    return [*_rows(rows), *(INDENT + c for c in block.brace.above if c)]


def _body(items: list[Item]) -> list[str]:
    if items:
        while items[0].above and not items[0].above[0]:
            items[0].above.pop(0)
    rows: list[Item] = []
    for run in _runs(items):
        width = max(len(i.word) for i in run)
        for i in run:
            sign = "= " if i.word.startswith("let ") else ""
            lead = f"{i.word.ljust(width)} {sign}"
            rows.append(Item("\n".join(_wrapped(i.text, lead)), "", i.above, i.trailing))
    return _rows(rows)


def _runs(items: Sequence[Item]) -> list[list[Item]]:
    """Neighbours that are aligned with one another: lets, or others, with nothing between."""
    runs: list[list[Item]] = []
    for item in items:
        same = runs and runs[-1][-1].word.startswith("let ") == item.word.startswith("let ")
        if same and not item.above:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _rows(rows: Sequence[Item]) -> list[str]:
    """Lines of items, with the comments of neighbours in one column."""
    lines: list[str] = []
    for i, row in enumerate(rows):
        lines += [INDENT + c if c else "" for c in row.above]
        last = row.text.split("\n")
        lines += [INDENT + part for part in last[:-1]]
        column = max(len(r.text.split("\n")[-1]) for r in _commented_run(rows, i)) if row.trailing else 0
        lines.append(INDENT + (f"{last[-1].ljust(column)}  {row.trailing}" if row.trailing else last[-1]))
    return lines


def _commented_run(rows: Sequence[Item], at: int) -> list[Item]:
    """The neighbours of a row, up and down, that have a comment too and nothing between."""
    first = last = at
    while first > 0 and rows[first - 1].trailing and not rows[first].above:
        first -= 1
    while last + 1 < len(rows) and rows[last + 1].trailing and not rows[last + 1].above:
        last += 1
    return list(rows[first : last + 1])


def _wrapped(text: str, lead: str) -> list[str]:
    """A long expression is broken before its outermost `or`, else `and`; what cannot be broken stays long."""
    if len(INDENT) + len(lead) + len(text) <= WIDTH:
        return [lead + text]
    for word in (" or ", " and "):
        parts = _split(text, word)
        if len(parts) > 1:
            lines = [lead + parts[0]]
            pad = " " * len(lead)
            for part in parts[1:]:
                grown = f"{lines[-1]}{word}{part}"
                if len(INDENT) + len(grown) <= WIDTH:
                    lines[-1] = grown
                else:
                    lines.append(f"{pad}{word[1:]}{part}")
            return lines
    return [lead + text]


def _split(text: str, word: str) -> list[str]:
    """`text` cut at `word` outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and text.startswith(word, i):
            parts.append(text[start:i])
            start = i + len(word)
    return [*parts, text[start:]]
