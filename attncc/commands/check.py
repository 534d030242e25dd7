"""`attncc check`: a spec's numbers against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from attncc.commands.console import progress, say, say_json, table
from attncc.commands.options import (
    FILE,
    Assignment,
    algorithm_option,
    json_option,
    layout_option,
    read_spec,
    shown,
    values_of,
)
from attncc.errors import CheckError, EnvironmentFault
from attncc.pipeline import RequestError, laid_out, refuse

if TYPE_CHECKING:
    from attncc.ir import AttentionSpec
    from attncc.runtime.check import Report, Row


@click.command("check", short_help="Compare a spec's numbers with float64")
@click.argument("spec", type=FILE)
@click.option(
    "--device", type=click.Choice(("cpu", "interpreter", "cuda")),
    help="The CPU program, the Triton kernel in Triton's interpreter, or the Triton kernel on this machine's GPU. "
    "Left out: the CPU program, or where standard or fa1 is asked for, which it has not, the interpreter.",
)  # fmt: skip
@algorithm_option
@click.option(
    "--seeds", type=click.IntRange(1, 1000), help="How many streams of random calls; left out: the usual few."
)
@layout_option
@click.option("--differences", is_flag=True, help="Compare gradients with finite differences too.")
@click.option("--set", "assigned", type=Assignment(), multiple=True, help="Pin a scalar parameter. Repeatable.")
@json_option
def command(
    spec: str, device: str | None, algorithm: str | None, seeds: int | None, layout: str | None, differences: bool,
    assigned: tuple[tuple[str, Any], ...], as_json: bool,
) -> None:  # fmt: skip
    """Call SPEC's program with random inputs of many shapes, types and strides, and compare with float64.

    Output, lse, every gradient and tangent; exit 4 where a call is off by more than its bound. With --layout ragged
    the calls are of packed sequences, which lie between others of other lengths.

    Of 8-bit inputs, errors of out on kinds of inputs that are hard for them: from the answer for the inputs and from
    that for the dequantised ones, which has a bound, beside bfloat16's.

    \b
        attncc check causal.attn
        attncc check window.attn --set window=5 --device interpreter
        attncc check causal.attn --algorithm fa1
    """
    from attncc import frontend

    text, values = read_spec(spec), values_of(assigned)
    parsed = frontend.parse(text, shown(spec))
    parsed = parsed if algorithm is None else frontend.pinned(parsed, algorithm)
    refuse(parsed)
    device = _device(parsed.spec, device, algorithm)
    if values.tensors:
        raise RequestError(
            f"{next(iter(values.tensors))}: tensors are drawn at random here, only scalars can be pinned"
        )
    _check_values(parsed, values.scalars)
    with progress() as line:
        line.stage(f"checking {parsed.spec.name} on {device}")
        if parsed.spec.precision.is_eight_bit:
            if differences:
                raise RequestError("--differences compares gradients, which check does not look at with 8-bit inputs")
            refuse(laid_out(parsed, layout))
            _eight_bit(parsed.spec, device, seeds, values.scalars, as_json)
            return
        from attncc.runtime.check import SEEDS, check

        streams = SEEDS if seeds is None else tuple(range(seeds))
        report = check(_spec(parsed, layout), device, seeds=streams, values=values.scalars, differences=differences)
    if as_json:
        say_json(report.to_json())
    else:
        _print(report)
    if not report.passed:
        failed = sum(not row.passed for row in report.rows)
        raise CheckError(f"{failed} of {len(report.rows)} calls of {report.name} on {device} are wrong")


def _eight_bit(spec: AttentionSpec, device: str, seeds: int | None, values: dict[str, Any], as_json: bool) -> None:
    """The check of 8-bit inputs."""
    from attncc.runtime.check_eight import SEEDS, check

    if device == "interpreter":
        raise RequestError("Triton's interpreter knows no Gluon, in which kernels of 8-bit inputs are: --device cuda")
    report = check(spec, device, seeds=SEEDS if seeds is None else tuple(range(seeds)), values=values)
    if as_json:
        say_json(report.to_json())
    else:
        head = (
            "inputs",
            "call",
            "RMSE",
            "largest",
            "of dequantised",
            "largest",
            "of its bound",
            "bf16's RMSE",
            "lse",
            "",
        )
        lines = [
            [r.inputs, r.shape, *(f"{x:.1e}" for x in (r.rmse, r.largest, r.rmse_dequantised, r.largest_dequantised)),
             f"{r.of_bound:.2f}", f"{r.rmse_bf16:.1e}", f"{r.lse:.1e}",
             click.style("ok", fg="green") if r.passed else click.style("out is beyond its bound", fg="red")]
            for r in report.rows
        ]  # fmt: skip
        say(table(head, lines, numbers=tuple(range(2, 9))))
        say("errors of out from float64: for the inputs, then for the dequantised inputs, with its share of the bound")
    if not report.passed:
        raise CheckError(f"{sum(not r.passed for r in report.rows)} of {len(report.rows)} calls are wrong")


def _spec(parsed: Any, layout: str | None) -> Any:
    """The spec with the layout asked for; its tensors stay as they are written, for the reference."""
    return replace(parsed.spec, layout=laid_out(parsed, layout).spec.layout)


def _check_values(parsed: Any, given: dict[str, Any]) -> None:
    """Names and types, as for every command; constants that are left out are the check's own choice."""
    from attncc.pipeline import split_values

    filled = {p.name: 1 for p in parsed.spec.consts if p.default is None}
    split_values(parsed.spec, {**filled, **given})


def _device(spec: AttentionSpec, device: str | None, algorithm: str | None) -> str:
    """What runs: the device asked for, else one that has the algorithm."""
    from attncc.runtime.device import INTERPRETED_AS
    from attncc.runtime.machine import local_target

    older = spec.schedule(INTERPRETED_AS).asked in ("standard", "fa1")
    chosen = device or ("interpreter" if older or algorithm == "fa2" else "cuda" if algorithm == "fa3" else "cpu")
    if chosen == "cpu" and algorithm is not None:
        raise RequestError(f"--algorithm {algorithm} is of the Triton kernels: a CPU has one program")
    if chosen == "interpreter" and algorithm == "fa3":
        raise RequestError("Triton's interpreter knows no Gluon, in which fa3 is written: --device cuda")
    if chosen == "interpreter" and spec.precision.inputs == "bf16":
        raise RequestError("Triton's interpreter multiplies no bfloat16: --device cpu or cuda, or other inputs")
    if chosen == "cuda" and local_target() is None:
        raise EnvironmentFault("there is no GPU here: --device cpu, or --device interpreter for the Triton kernel")
    return chosen


def _print(report: Report) -> None:
    head = (
        "call",
        "type",
        "strides",
        "seed",
        "out error",
        "bound",
        "lse error",
        "bound",
        "worst derivative",
        "of bound",
        "",
    )
    say(table(head, [_line(row) for row in report.rows], numbers=(3, 4, 5, 6, 7, 9)))
    good = sum(row.passed for row in report.rows)
    say("errors and their bounds: absolute differences from float64, summed over the tensor")
    say(f"{report.name} on {report.device}: {good} of {len(report.rows)} calls within their bounds")


def _line(row: Row) -> list[str]:
    errors = [f"{e:.1e}" for e in (row.out_error, row.out_bound, row.lse_error, row.lse_bound)]
    verdict = click.style("ok", fg="green") if row.passed else click.style("; ".join(row.faults), fg="red")
    return [row.shape, row.dtype, row.layout, str(row.seed), *errors, *_worst(row), verdict]


def _worst(row: Row) -> tuple[str, str]:
    """The gradient that comes nearest to its bound, and how near."""
    parts = {name: error / bound if bound else math.inf if error else 0.0
             for name, (error, bound) in row.gradients.items()}  # fmt: skip
    name = max(parts, key=lambda n: parts[n], default="")
    return (name, f"{parts[name]:.2f}") if name else ("", "")
