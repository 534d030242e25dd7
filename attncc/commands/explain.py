"""`attncc explain`: what a spec means, which tiles its mask leaves, how it would be computed and what that costs."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

import click

from attncc.commands import costs
from attncc.commands.console import (
    REFERENCES,
    amount,
    count,
    dim,
    heading,
    progress,
    say,
    say_json,
    tell,
)
from attncc.commands.options import (
    FILE,
    algorithm_option,
    json_option,
    layout_option,
    request,
    shape_option,
    targets_of,
    values_of,
)

REJECTED_SHOWN = 3
SCRATCH = {"standard": "scores and weights", "fa1": "the state of every row"}
LABEL = 12  # width of the first column


@click.command("explain", short_help="Say what a spec means and how it would be computed")
@click.argument("spec", type=FILE)
@click.option("--target", metavar="NAME", help="sm_90, gfx942, cpu, ...; left out: this machine's GPU, else cpu.")
@layout_option
@algorithm_option
@shape_option
@click.option(
    "--rejected", "all_rejected", is_flag=True, help="Every plan that was turned down, not the nearest three."
)
@json_option
def command(
    spec: str, target: str | None, layout: str | None, algorithm: str | None, shape: dict[str, int], dtype: str | None,
    assigned: tuple[tuple[str, Any], ...], all_rejected: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print what SPEC means, what is proved of its mask, the plan for a target and shape, and what a call costs.

    Counts are over batch and heads, and exact but for the largest shapes, which says so; those that need contents or
    values not given are left out, and --set gives them.

    \b
        attncc explain causal.attn --target sm_90
        attncc explain causal.attn --target sm_90 --algorithm standard
        attncc explain window.attn --shape q_len=1,k_len=65536 --set window=512
        attncc explain padding.attn --shape batch=2 --set length=100,4096 --json
    """
    from attncc import pipeline
    from attncc.commands.contents import contents
    from attncc.commands.facts import facts

    values = values_of(assigned)
    (goal,) = targets_of((target,) if target else ())
    asked = request(spec, goal, shape, dtype, values, layout, algorithm=algorithm)
    with progress() as shown:
        shown.stage("planning and counting")
        planned = pipeline.plan(asked)
        known = contents(planned.spec, planned.shape, planned.values, values.tensors)
        found = facts(planned, known)
    for warning in pipeline.warnings(planned):
        tell(warning.render(asked.text, asked.filename), fg="yellow")
    if as_json:
        say_json(found)
        return
    for title, rows in (
        ("meaning", _meaning(found)),
        (f"mask for {_call(found['shape'])}", _mask(found["mask"])),
        (_target(found), _plan(found, all_rejected)),
        ("one call", costs.rows(found["io"], found["target"] == "cpu")),
    ):
        say(heading(title))
        for label, text in rows:
            say(_row(label, text))


def _row(label: str, text: str) -> str:
    width = max(60, min(shutil.get_terminal_size((100, 40)).columns, 110)) - LABEL - 4
    lines = [part for line in text.splitlines() for part in (textwrap.wrap(line, width) if label != "spec" else [line])]
    rest = "\n".join(" " * (LABEL + 4) + line for line in lines[1:])
    return f"  {dim(label.ljust(LABEL))}  {lines[0] if lines else ''}" + ("\n" + rest if rest else "")


def _call(shape: dict[str, Any]) -> str:
    heads = f"{shape['heads']} heads" + (f" over {shape['kv_heads']}" if shape["kv_heads"] != shape["heads"] else "")
    return f"batch {shape['batch']}, {heads}, {count(shape['q_len'])} queries, {count(shape['k_len'])} keys"


def _target(found: dict[str, Any]) -> str:
    shape, product = found["shape"], f" ({found['product']})" if found["target"] != "cpu" else ""
    sizes = f"{shape['head_dim']}" + (f" and {shape['head_dim_v']}" if shape["head_dim_v"] != shape["head_dim"] else "")
    return f"plan for {found['target']}{product}, {found['plan']['dtype']}, head size {sizes}"


def _meaning(found: dict[str, Any]) -> list[tuple[str, str]]:
    where = "q = row + k_len - q_len" if found["align"] == "end" else "q = row"
    rows = [("spec", found["spec"].rstrip()), ("align", f"{found['align']}: {where}")]
    return rows + [("" if i else "parameters", _param(p)) for i, p in enumerate(found["params"])]


def _param(param: dict[str, Any]) -> str:
    axes = f"[{', '.join(map(str, param['axes']))}]" if param["axes"] else ""
    words = [w for w in ("const", "sorted", "grad") if param[w]]
    kind = " ".join([param["type"] + axes, *words])
    if param["const"]:
        return f"{param['name']}: {kind}, {param['value']} is compiled in"
    if axes:
        return f"{param['name']}: {kind}" + (", contents given" if param["given_shape"] else "")
    value = "no value given" if param["value"] is None else f"{param['value']} here"
    return f"{param['name']}: {kind}, {value}; another value compiles nothing"


def _mask(mask: dict[str, Any]) -> list[tuple[str, str]]:
    unknown = "depend on contents or values that are not given: --set gives them"
    pairs, tiles, work = mask["pairs"], mask["tiles"], mask["balance"]
    some_rows, some_tiles = _estimated(mask["drawn"]["rows"], "rows"), _estimated(mask["drawn"]["tiles"], "query tiles")
    rows = [
        (
            "pairs kept",
            unknown
            if pairs is None
            else f"{count(pairs)} of {count(mask['total'])}, {100 * pairs / mask['total']:.4g}%{some_rows}",
        )
    ]
    shown = ", ".join(f"{count(n)} {name}" for name, n in tiles.items() if n is not None) + some_tiles
    rows.append(("tiles", unknown if work is None else shown))
    if work is not None:
        rows.append(("balance", f"{work['least']} to {work['most']} tiles a program, {work['mean']:.4g} in the mean"))
    rows.append(("empty rows", _empty(mask)))
    proofs = [f"no row sees beyond {mask['causal']}"] if mask["causal"] else []
    proofs += ["it keeps every pair"] if mask["always"] else ["it keeps no pair"] if mask["never"] else []
    rows += [("proved", "; ".join(proofs))] if proofs else []
    return [*rows, *_visits(mask)]


def _estimated(number: int | None, what: str) -> str:
    return "" if number is None else f", estimated from {count(number)} {what}"


def _empty(mask: dict[str, Any]) -> str:
    """Rows that see nothing: their number here, and what is proved of every call."""
    if mask["empty_rows_proved"] in ("never", "always"):
        return (
            "none, proved for every call"
            if mask["empty_rows_proved"] == "never"
            else "all, since the mask keeps nothing"
        )
    about = "" if mask["drawn"]["rows"] is None else "about "
    here = "" if mask["empty_rows"] is None else f"{about}{count(mask['empty_rows'])} here; "
    if mask["no_empty_row"] is None:
        return here + "other calls may have some"
    return f"{here}none {'exactly ' if mask['empty_rows_proved'] == 'when' else ''}where {mask['no_empty_row']}"


def _visits(mask: dict[str, Any]) -> list[tuple[str, str]]:
    parts = [f"{_ranges(n)} of {name} tiles" for name, n in mask["segments"].items() if n]
    text = " and ".join(parts) or "nothing"
    if mask["listed"]:
        text = "the tiles on a list, which is made from the contents in the same call: a place for each pair of tiles"
    elif mask["class_tests"]:
        text += ", and a test of each tile when it comes up"
    else:
        text += ", in closed form"
    rows = [("visits", text)]
    if mask["tables"]:
        size = sum(table["bytes"] for table in mask["tables"])
        rows.append(
            ("tables", f"{len(mask['tables'])} of {amount(size, 'B')} in all, made from the contents in the same call")
        )
    return rows + [("" if i else "opaque", why) for i, why in enumerate(mask["opaque"])]


def _ranges(number: int) -> str:
    return "one range" if number == 1 else f"{number} ranges"


def _plan(found: dict[str, Any], all_rejected: bool) -> list[tuple[str, str]]:
    plan = found["plan"]
    shared = f", {count(plan['shared_bytes'])} bytes of shared memory" if plan["shared_bytes"] else ""
    rows = [("chosen", _plan_text(plan) + shared)]
    if found["scratch_bytes"]:
        what = SCRATCH[plan["algorithm"]]
        rows.append(("in HBM", f"{what}, {amount(found['scratch_bytes'], 'B')} beside the output"))
    if found["pinned"]:
        rows.append(("pinned", f"{', '.join(found['pinned'])}: {_pinned(plan)}"))
    if found["backward"] is not None:
        rows.append(("backward", _backward(found["backward"])))
        rows += [("", f"not {r['algorithm']}: {r['reason']}") for r in found["backward"].get("rejected", [])]
    rejected = found["rejected"] if all_rejected else found["rejected"][:REJECTED_SHOWN]
    rows += [("" if i else "rejected", f"{_plan_text(r['plan'])}: {r['reason']}") for i, r in enumerate(rejected)]
    left = len(found["rejected"]) - len(rejected)
    return [*rows, ("", f"and {left} more, shown by --rejected")] if left else rows


def _pinned(plan: dict[str, Any]) -> str:
    if plan["target"] == "cpu":
        return "tiles hold for the CPU's program, which is one for all algorithms"
    recomputed = ", from the lse" if plan["algorithm"] in SCRATCH else ""
    return f"of the forward pass; the backward pass has its own plan{recomputed}"


def _backward(found: dict[str, Any]) -> str:
    """`fa2, dQ in tiles of 64 x 64, 2 stages, 4 warps; ...`; or why there is no such pass."""
    if "reason" in found:
        return str(found["reason"])
    kernels = (
        f"{name} in tiles of {own['tile_q']} x {own['tile_k']}, {_some(own['stages'], 'stage')}, "
        f"{_some(own['warps'], 'warp')}" for name, own in found["kernels"].items()
    )  # fmt: skip
    return f"{found['algorithm']}, {'; '.join(kernels)}"


def _plan_text(plan: dict[str, Any]) -> str:
    """`fa2, tile 128 x 64, 3 stages, 8 warps`; a CPU has neither stages nor warps."""
    tile = f"{plan['algorithm']}, tile {plan['tile_q']} x {plan['tile_k']}"
    if plan["target"] == "cpu":
        return tile
    capped = f", at most {plan['max_registers']} registers" if plan["max_registers"] else ""
    loads = ", K and V by descriptor" if plan["loads"] == "descriptor" else ""
    kept = f", {REFERENCES[plan['reference']]} maximum" if plan["reference"] in REFERENCES else ""
    return f"{tile}, {_some(plan['stages'], 'stage')}, {_some(plan['warps'], 'warp')}{loads}{capped}{kept}"


def _some(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")
