"""Rules on the blocks precision, schedule and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lark import Token, Tree

from attncc.frontend.consts import (
    ALGORITHMS,
    FORMS,
    LOOPS,
    PRECISION,
    QUANTISED,
    QUANTISED_SCALES,
    ROTATE,
    SCALES,
    SETTINGS,
    STAGES,
    TARGETS,
    TILES,
    WARPS,
)  # fmt: skip
from attncc.frontend.reader import Body, Draft
from attncc.frontend.report import quoted, span_of
from attncc.frontend.rules.context import Context
from attncc.frontend.rules.expressions import Node, integer
from attncc.ir import EIGHT_BIT, REPORTS, Layout, Precision, Schedule

Values = dict[str, Any]
Rule = Callable[[str, Sequence[Node], Context], Values]


def read_settings(draft: Draft, context: Context) -> tuple[Precision, tuple[Schedule, ...], Layout]:
    """All blocks of settings; each kind once, a schedule once for each target."""
    found: dict[tuple[str, str | None], Values] = {}
    for block in draft.of(*SETTINGS):
        target = str(block.name) if block.name is not None else None
        values = _block(block, target, context)
        if (block.kind, target) in found:
            what = f"'{block.kind}'" + (f" for {quoted(target)}" if target else "")
            context.report.error(
                "E702", block.opening, f"{what} stands a second time", "put the settings into one block"
            )
        elif _check_target(block, context):
            found[block.kind, target] = values
    schedules = tuple(Schedule(target, **values) for (kind, target), values in found.items() if kind == "schedule")
    return Precision(**found.get(("precision", None), {})), schedules, Layout(**found.get(("layout", None), {}))


def _check_target(block: Body, context: Context) -> bool:
    if block.name is None:
        return True
    name = str(block.name)
    if block.kind != "schedule":
        context.report.error(
            "E707", block.name, f"'{block.kind}' is the same for every target", "only a schedule can be for one target"
        )
    elif name not in TARGETS:
        hint = context.report.suggest(name, TARGETS, "targets are " + ", ".join(TARGETS))
        context.report.error("E706", block.name, f"unknown target {quoted(name)}", hint)
    else:
        return True
    return False


def _block(block: Body, target: str | None, context: Context) -> Values:
    rules = {"precision": _precision, "schedule": _schedule, "layout": _layout}
    values: Values = {}
    seen: set[str] = set()
    for piece in block.pieces:
        if piece.tree is None:
            continue
        key, *nodes = piece.tree.children
        name = str(key)
        prefix = block.kind if target is None else f"{block.kind}.{target}"
        if name not in SETTINGS[block.kind]:
            hint = context.report.suggest(
                name, SETTINGS[block.kind], f"{block.kind} has " + ", ".join(SETTINGS[block.kind])
            )
            context.report.error("E701", key, f"{block.kind} has no setting {quoted(name)}", hint)
        elif name in seen:
            context.report.error("E702", key, f"{quoted(name)} is set a second time")
        else:
            seen.add(name)
            context.spans[f"{prefix}.{name}"] = piece.span
            values |= rules[block.kind](name, nodes, context)
    return values


def _precision(name: str, nodes: Sequence[Node], context: Context) -> Values:
    if name == "inputs" and len(nodes) == 2:
        return _mixed(nodes, context)
    if name in PRECISION:
        return _word(name, nodes, PRECISION[name], context)
    if name == "rotate":
        return _word(name, nodes, ROTATE, context)
    if isinstance(nodes[0], Tree) and nodes[0].data == "form":
        return _scales(name, nodes, nodes[0], context)
    return _word(name, nodes, SCALES[:2], context)


def _mixed(nodes: Sequence[Node], context: Context) -> Values:
    """`inputs FLOAT, EIGHT_BIT`: of q, and of k and v."""
    of_q = _word("inputs", nodes[:1], [word for word in PRECISION["inputs"] if word not in EIGHT_BIT], context)
    kept = _word("inputs", nodes[1:], EIGHT_BIT, context)
    return {**of_q, "kept": kept["inputs"]} if of_q and kept else {}


def _scales(name: str, nodes: Sequence[Node], form: Tree, context: Context) -> Values:
    word, *args = form.children
    size = _positive(args[0], context) if len(args) == 1 else None
    if word != "per_block" or len(nodes) != 1 or size is None:
        context.report.error(
            "E704", form, "scales are per_tensor, per_head or per_block(N)", "write scales per_block(128)"
        )
        return {}
    return {name: f"per_block({size})"}


def _schedule(name: str, nodes: Sequence[Node], context: Context) -> Values:
    if name == "algorithm":
        return _word(name, nodes, ALGORITHMS, context)
    if name == "loop":
        return _word(name, nodes, LOOPS, context)
    if name == "tile":
        return _tile(nodes, context)
    low, high = WARPS if name == "warps" else STAGES
    if len(nodes) != 1 or not isinstance(nodes[0], Token) or nodes[0].type != "INT":
        context.report.error("E704", nodes[0], f"'{name}' takes one int", f"write {name} 4")
        return {}
    number = integer(nodes[0], context.report)
    power = name != "warps" or (number is not None and number > 0 and number & (number - 1) == 0)
    if number is not None and not (low <= number <= high and power):
        kind = "a power of two" if name == "warps" else "an int"
        context.report.error("E705", nodes[0], f"'{name}' is {kind} from {low} to {high}, not {number}")
        return {}
    return {name: number}


def _tile(nodes: Sequence[Node], context: Context) -> Values:
    values: Values = {}
    for node in nodes:
        pair = node.children if isinstance(node, Tree) and node.data == "pair" else None
        axis = str(pair[0]) if pair else ""
        if pair is None or axis not in ("q", "k") or f"tile_{axis}" in values or pair[1].type != "INT":  # type: ignore[union-attr]
            context.report.error("E704", node, "'tile' takes q = SIZE and k = SIZE", "write tile q = 128, k = 64")
            continue
        size = integer(pair[1], context.report)  # type: ignore[arg-type]
        if size is None:
            continue
        if not TILES[0] <= size <= TILES[1] or size & (size - 1):
            context.report.error("E705", pair[1], f"a tile is a power of two from {TILES[0]} to {TILES[1]}, not {size}")
        else:
            values[f"tile_{axis}"] = size
    return values


def _word(name: str, nodes: Sequence[Node], allowed: Sequence[str], context: Context) -> Values:
    """A setting that takes one word of a list."""
    node = nodes[0]
    listed = ", ".join(allowed)
    if len(nodes) > 1 or not isinstance(node, Token):
        context.report.error(
            "E704", nodes[min(1, len(nodes) - 1)], f"'{name}' takes one word", f"it is one of {listed}"
        )
        return {}
    if node not in allowed:
        hint = context.report.suggest(node, allowed, f"it is one of {listed}")
        context.report.error("E703", node, f"'{name}' cannot be {quoted(node)}", hint)
        return {}
    return {name: str(node)}


def _layout(name: str, nodes: Sequence[Node], context: Context) -> Values:
    """`q FORM`, `kv FORM, QUANTISED(scales = …)`, `v shared(columns = N)`, `rows REPORT, …`; kept as one canonical
    text."""
    if name == "rows":
        return _reports(nodes, context)
    if name == "v":
        good = [_form(nodes[0], "shared", "columns", context)] if len(nodes) == 1 else [None]
    else:
        forms = FORMS if name == "kv" else FORMS[:2]
        good = [_memory(nodes[0], forms, context)]
        good += [_quantised(n, context) for n in nodes[1:2]] if name == "kv" else []
        if len(nodes) > len(good):
            context.report.error(
                "E704",
                nodes[len(good)],
                f"'{name}' takes no further value",
                "write kv paged(page = 16), int8(scales = token)",
            )
            return {}
    if any(g is None for g in good):
        if name == "v" and len(nodes) != 1:
            context.report.error("E704", nodes[1], "'v' takes one value", "write v shared(columns = 512)")
        return {}
    return {name: ", ".join(str(g) for g in good)}


def _reports(nodes: Sequence[Node], context: Context) -> Values:
    """What is returned of each row: words of REPORTS, each once, kept in their order."""
    found: list[str] = []
    for node in nodes:
        made = _word("rows", [node], REPORTS, context)
        if made and made["rows"] in found:
            context.report.error("E702", node, f"{quoted(made['rows'])} is named a second time")
        elif made:
            found.append(made["rows"])
    return {"rows": ", ".join(r for r in REPORTS if r in found)}


def _memory(node: Node, forms: Sequence[str], context: Context) -> str | None:
    word = node if isinstance(node, Token) else node.children[0]
    assert isinstance(word, Token)
    if word not in forms:
        hint = context.report.suggest(word, forms, "it is one of " + ", ".join(forms))
        context.report.error("E703", word, f"unknown layout {quoted(word)}", hint)
        return None
    if word == "paged":
        return _form(node, "paged", "page", context)
    if isinstance(node, Tree):
        context.report.error("E704", node, f"'{word}' takes no arguments", f"write {word}")
        return None
    return str(word)


def _form(node: Node, word: str, key: str, context: Context) -> str | None:
    """WORD(KEY = POSITIVE INT)."""
    if isinstance(node, Tree) and node.data == "form" and node.children[0] == word and len(node.children) == 2:
        pair = node.children[1]
        if isinstance(pair, Tree) and pair.data == "pair" and pair.children[0] == key:
            size = _positive(pair.children[1], context)
            if size is not None:
                return f"{word}({key} = {size})"
    context.report.error("E704", node, f"the form is {word}({key} = SIZE)", f"write {word}({key} = 64)")
    return None


def _positive(node: Node, context: Context) -> int | None:
    if not isinstance(node, Token) or node.type != "INT":
        return None
    size = integer(node, context.report)
    return size if size is not None and size >= 1 else None


def _quantised(node: Node, context: Context) -> str | None:
    word = node if isinstance(node, Token) else node.children[0]
    if word not in QUANTISED:
        hint = context.report.suggest(str(word), QUANTISED, "it is one of " + ", ".join(QUANTISED))
        context.report.error("E703", span_of(node), f"unknown element {quoted(str(word))} of keys and values", hint)
        return None
    if isinstance(node, Tree) and len(node.children) == 2:
        pair = node.children[1]
        if (
            isinstance(pair, Tree)
            and pair.data == "pair"
            and pair.children[0] == "scales"
            and pair.children[1] in QUANTISED_SCALES
        ):
            return f"{word}(scales = {pair.children[1]})"
    context.report.error(
        "E704", node, f"the form is {word}(scales = …)", "scales are one of " + ", ".join(QUANTISED_SCALES)
    )
    return None
