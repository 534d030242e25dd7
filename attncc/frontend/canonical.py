"""AttentionSpec to text: one text for one meaning, which reads back as an equal spec."""

from __future__ import annotations

from dataclasses import replace

from attncc.frontend.expression_text import LetNames, expression_text
from attncc.frontend.page import Block, Item, set_page
from attncc.frontend.scaled import as_written
from attncc.ir import AttentionSpec, Expr, Layout, Param, Precision, Schedule, Softmax


def canonical(spec: AttentionSpec) -> str:
    """The spec as text, without comments; `let` names stand where their expressions do, defaults are left out."""
    spec = as_written(spec)
    blocks = [Block(Item(f"attention {spec.name}"), _statements(spec), [Item(_param(p)) for p in spec.params])]
    for opening, items in (("precision", _precision(spec.precision)), ("layout", _layout(spec.layout))):
        if items:
            blocks.append(Block(Item(opening), items, settings=True))
    for schedule in spec.schedules:
        opening = "schedule" if schedule.target is None else f"schedule {schedule.target}"
        blocks.append(Block(Item(opening), _schedule(schedule), settings=True))
    return set_page(blocks)


def _statements(spec: AttentionSpec) -> list[Item]:
    items: list[Item] = []
    names = LetNames()
    for name, e in spec.lets:
        items.append(Item(expression_text(e, names), f"let {name}"))
        names.add(e, name)

    def add(word: str, e: Expr | None) -> None:
        if e is not None:
            items.append(Item(expression_text(e, names), word))

    add("scale", spec.scale)
    for mask in spec.masks:
        add("mask", mask)
    for score in spec.scores:
        add("score", score)
    if spec.softmax != Softmax():
        items.append(Item(_softmax(spec.softmax, names), "softmax"))
    add("weight", spec.weight)
    add("dropout", spec.dropout)
    if spec.align != "end":
        items.append(Item(spec.align, "align"))
    return items


def _softmax(softmax: Softmax, names: LetNames) -> str:
    args = [expression_text(a, names) for a in softmax.args]
    args += [f"{name} = {expression_text(e, names)}" for name, e in softmax.named]
    return softmax.policy + (f"({', '.join(args)})" if args else "")


def _param(p: Param) -> str:
    axes = f"[{', '.join(map(str, p.axes))}]" if p.is_tensor else ""
    text = f"{p.name}: {'const ' if p.const else ''}{p.element or p.type}{axes}"
    text += " sorted" * p.sorted + " grad" * p.grad
    return text if p.default is None else f"{text} = {p.default!r}"


def _precision(precision: Precision) -> list[Item]:
    plain = Precision()
    if precision.kept is not None:
        precision = replace(precision, inputs=f"{precision.inputs}, {precision.kept}")
    names = ("inputs", "products", "accumulate", "scales", "rotate")
    return [Item(str(getattr(precision, n)), n) for n in names if getattr(precision, n) != getattr(plain, n)]


def _layout(layout: Layout) -> list[Item]:
    plain = Layout()
    return [Item(getattr(layout, n), n) for n in ("q", "kv", "v", "rows") if getattr(layout, n) != getattr(plain, n)]


def _schedule(schedule: Schedule) -> list[Item]:
    tile = [f"{axis} = {size}" for axis, size in (("q", schedule.tile_q), ("k", schedule.tile_k)) if size is not None]
    values = (
        ("algorithm", schedule.algorithm), ("loop", schedule.loop), ("tile", ", ".join(tile) or None),
        ("stages", schedule.stages), ("warps", schedule.warps),
    )  # fmt: skip
    return [Item(str(value), name) for name, value in values if value is not None]
