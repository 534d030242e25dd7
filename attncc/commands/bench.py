"""`attncc bench`: a spec beside SDPA, FlexAttention and other algorithms, timed and compared in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncc.commands.console import amount, digits, dim, duration, heading, progress, say, say_json, table, tell
from attncc.commands.options import FILE, json_option, request, shape_option, values_of
from attncc.errors import CheckError, EnvironmentFault

if TYPE_CHECKING:
    from attncc.pipeline import Planned
    from attncc.runtime.bench import Row

BOTH = ("forward", "backward")
DEFAULTS = {"cpu": "sdpa,unfused", "cuda": "sdpa,flex,unfused,standard"}
PEERS = ("sdpa", "cudnn", "flash", "efficient", "math", "flex", "unfused", "standard", "fa1", "fa2", "fa3")
HEAD = ("length", "pass", "", "time", "spread", "TFLOP/s", "of ours", "error", "memory")


class Names(click.ParamType):
    """`sdpa,flex`: peers, each once."""

    name = "NAME,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(filter(None, (n.strip() for n in value.split(",")))) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in PEERS:
                self.fail(f"{name!r}: there are {', '.join(PEERS)}", param, ctx)
        return names


class Lengths(click.ParamType):
    """`1024,4096`: whole numbers."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = [p.strip() for p in value.split(",") if p.strip()]
        if (value.strip() and not parts) or not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**31 for p in parts):
            self.fail(f"{value!r}: lengths are whole numbers from 1, such as 1024,4096", param, ctx)
        return tuple(map(int, parts))


@click.command("bench", short_help="Time a spec beside other kernels, and compare numbers")
@click.argument("spec", type=FILE)
@click.option(
    "--against", type=Names(),
    help="sdpa (all its backends: cudnn, flash, efficient, math), flex, unfused (PyTorch's operators), standard, fa1, "
    "fa2, fa3 (the spec's own kernels by that algorithm). Left out: sdpa, flex, unfused and standard; on a CPU "
    "sdpa and unfused.",
)  # fmt: skip
@click.option("--lengths", type=Lengths(), default="", help="A sweep of q_len and k_len; left out: those of --shape.")
@click.option("--pass", "passes", type=click.Choice(BOTH), multiple=True, help="Left out: both. Repeatable.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="Left out: this machine's GPU, else the CPU.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Of timing, in turns.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a PNG of times (needs matplotlib: attncc[plot]).")
@shape_option
@json_option
def command(
    spec: str, against: tuple[str, ...] | None, lengths: tuple[int, ...], passes: tuple[str, ...], device: str | None,
    rounds: int, plot: str | None, shape: dict[str, int], dtype: str | None, assigned: tuple[tuple[str, Any], ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Time SPEC's forward and backward pass in turns with others, and compare every result with float64.

    What another cannot express is said, not left out. A length is that of q and k, or `1 x 4096` where they differ.
    Times are medians of rounds; the spread is the slowest round over the fastest. The error is the sum of absolute
    differences as a part of the sum of absolute values, in the first and last rows of two heads. Tensors that --set
    does not give are drawn at random. Exit 4 where SPEC's own numbers are beyond their bound.

    \b
        attncc bench causal.attn --lengths 1024,4096,16384 --plot causal.png
        attncc bench full.attn --against standard,fa1,fa2 --pass forward
        attncc bench window.attn --set window=256 --device cpu --dtype f32 --shape heads=4
    """
    from attncc import pipeline
    from attncc.commands import chart
    from attncc.commands.contents import contents
    from attncc.runtime.machine import local_target

    if plot:
        chart.ready(Path(plot))
    here = local_target()
    chosen = device or ("cuda" if here else "cpu")
    if chosen == "cuda" and here is None:
        raise EnvironmentFault("there is no GPU here: --device cpu")
    values = values_of(assigned)
    planned = pipeline.plan(request(spec, here or "cpu" if chosen == "cuda" else "cpu", shape, dtype, values))
    if planned.spec.ragged:
        raise pipeline.RequestError(f"{planned.spec.name} is of packed sequences, and bench times dense calls")
    known = contents(planned.spec, planned.shape, planned.values, values.tensors)
    _tell_drawn(planned, dict(known.tensors))
    rows = _run(planned, dict(known.tensors), lengths, passes or BOTH, against, chosen, rounds)
    if as_json:
        say_json({"name": planned.spec.name, **_machine(chosen), "rows": [row.to_json() for row in rows]})
    else:
        _print(planned, rows, chosen)
    if plot:
        chart.save_times(rows, Path(plot), _title(planned, chosen))
        tell(f"wrote {plot}")
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise CheckError(f"{len(wrong)} results of {planned.spec.name} are beyond their bounds")


def _tell_drawn(planned: Planned, tensors: dict[str, Any]) -> None:
    from attncc.runtime.tune_drawn import drawn

    random = drawn(planned.spec, planned.values, tensors)
    if random:
        tell(f"attncc: drawn at random: {', '.join(random)}; --set gives them, and what is fast may depend on them")


def _run(
    planned: Planned, tensors: dict[str, Any], lengths: tuple[int, ...], passes: tuple[str, ...],
    against: tuple[str, ...] | None, device: str, rounds: int,
) -> list[Row]:  # fmt: skip
    from attncc.runtime.bench import sweep
    from attncc.runtime.peers import expanded

    named = expanded(tuple(DEFAULTS[device].split(",")) if against is None else against)
    with progress() as shown:
        return list(sweep(planned, tensors, lengths, passes, named, device, shown.stage, rounds))


def _machine(device: str) -> dict[str, Any]:
    from attncc.runtime.bench import machine

    return machine(device)


def _title(planned: Planned, device: str) -> str:
    s = planned.shape
    where = _machine(device)
    heads = f"{s.heads}" if s.heads == s.kv_heads else f"{s.heads}/{s.kv_heads}"
    sizes = f"batch {s.batch}, heads {heads}, head size {s.head_dim}, {s.dtype}"
    return f"{planned.spec.name}: {sizes}, on {where['device']}, PyTorch {where['torch']}, Triton {where['triton']}"


def _print(planned: Planned, rows: list[Row], device: str) -> None:
    say(heading(_title(planned, device)))
    ours = {(row.length, row.direction): row.ms for row in rows if row.who == "attncc"}
    shown = [row for row in rows if row.refused is None]
    say(table(HEAD, [_line(row, ours[row.length, row.direction]) for row in shown], numbers=(0, 3, 4, 5, 6, 7, 8)))
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.refused is not None:
            refused.setdefault((row.who, row.refused), []).append(f"{row.direction} at {row.lengths}")
    for (who, why), where in refused.items():
        say(dim(f"{who}: {why} ({', '.join(where)})"))


def _line(row: Row, ours: float | None) -> list[str]:
    ms, least, most = row.ms or 0.0, row.least_ms or 0.0, row.most_ms or 0.0
    error = "-" if row.error is None else f"{row.error:.1e}"
    return [
        row.lengths, row.direction, row.who, duration(ms), f"{100 * (most / least - 1):.0f}%" if least else "-",
        "-" if row.tflops is None else digits(row.tflops), f"{ours / ms:.2f}" if ours and ms else "-",
        error if row.right else click.style(error, fg="red"),
        "-" if row.peak_bytes is None else amount(row.peak_bytes, "B"),
    ]  # fmt: skip
