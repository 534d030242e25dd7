"""`attncc tune`: the fastest plan on this machine's GPU, searched once and kept for good."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from attncc.commands.console import REFERENCES, count, duration, say, say_json, table, tell
from attncc.commands.options import FILE, json_option, layout_option, request, shape_option, values_of
from attncc.errors import AttnError, CheckError, EnvironmentFault

if TYPE_CHECKING:
    from attncc.commands.contents import Contents
    from attncc.pipeline import Planned
    from attncc.runtime.search import Found
    from attncc.runtime.tune import Tell, Tuning

BOTH = ("forward", "backward")
RANKED_SHOWN = 10
SUMS = {"added": "dQ added up", "turns": "dQ added up in turns", "apart": "dQ apart"}
HEAD = ("pass", "plan", "time", "planner's choice", "gain", "measured", "thrown out", "took")


@click.command("tune", short_help="Search for the fastest plan on this GPU, and keep it")
@click.argument("spec", type=FILE)
@layout_option
@shape_option
@click.option("--pass", "passes", type=click.Choice(BOTH), multiple=True, help="Left out: both. Repeatable.")
@click.option("--cold", is_flag=True, help="Empty the GPU's cache before each run.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=50, show_default=True, help="For all passes.")
@click.option("--target", metavar="NAME", help="The GPU that this machine must have; without it the model's ranking.")
@json_option
def command(
    spec: str, layout: str | None, shape: dict[str, int], dtype: str | None, assigned: tuple[tuple[str, Any], ...],
    passes: tuple[str, ...], cold: bool, seconds: float, target: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure plans of SPEC for a shape on this machine's GPU, and keep the fastest: calls of that bucket take it.

    Candidates come in the order of the planner's model, are compiled side by side, compared with float64, and timed one
    after the other. Ctrl-C keeps what was found. Tensors that --set does not give are drawn at random.

    \b
        attncc tune causal.attn --shape batch=4,heads=16,q_len=4096,k_len=4096
        attncc tune window.attn --set window=1024 --shape head_dim=64 --pass forward
    """
    from attncc import pipeline
    from attncc.commands.contents import contents
    from attncc.runtime.machine import local_target

    values, here = values_of(assigned), local_target()
    asked = request(spec, target or here or "sm_90", shape, dtype, values, layout)
    planned = pipeline.plan(asked)
    known = contents(planned.spec, planned.shape, planned.values, values.tensors)
    if here is None or here != planned.target.name:
        _without(planned, known, here, target, as_json)
    if planned.spec.ragged:
        raise AttnError("calls of packed sequences are not tuned yet: they take the planner's plan")
    from attncc.runtime.tune_drawn import drawn, tune_drawn

    random = drawn(planned.spec, planned.values, known.tensors)
    if random:
        tell(f"attncc: drawn at random: {', '.join(random)}; --set gives them, and what is fast may depend on them")
    with _bar() as hear:
        made = tune_drawn(planned, dict(known.tensors), passes or BOTH, cold, seconds, hear)
    if as_json:
        say_json(made.to_json())
    else:
        _print(made)
    if not any(f.best for f in made.found.values()):
        raise CheckError(f"no plan of {made.name} was measured with right numbers: nothing is kept")


def _without(planned: Planned, known: Contents, here: str | None, named: str | None, as_json: bool) -> None:
    """No such GPU: the model's ranking, and what that cannot tell. Raises EnvironmentFault."""
    from attncc import planner
    from attncc.commands.costs import forward_costs
    from attncc.commands.facts import mask_facts, visited

    wanted = planned.target.name
    there = f"this machine's GPU is {here}" if here else "there is no GPU here"
    if named is None:
        raise EnvironmentFault(f"{there}: --target sm_90 and others rank plans by the model")
    if not planned.target.is_gpu:
        raise EnvironmentFault("the CPU program has one plan: there is nothing to tune")
    ranked = planner.candidates(planned.spec, planned.shape, planned.target, planned.visits)
    first = ranked[0].predicted_ms or 1.0  # plans are ranked by a usual call: what that says is how they compare
    own = forward_costs(planned, visited(mask_facts(planned, known))).predicted_ms
    times = [None if c.predicted_ms is None else own * c.predicted_ms / first for c in ranked]  # not all are timed
    if as_json:
        rows = [{"choices": c.choices, "predicted_ms": ms} for c, ms in zip(ranked, times, strict=True)]
        say_json({"name": planned.spec.name, "target": wanted, "measured": False, "ranking": rows})
    else:
        told = ["-" if ms is None else duration(ms) for ms in times]
        lines = [(str(i + 1), _plan(c.choices), ms) for i, (c, ms) in enumerate(zip(ranked, told, strict=True))]
        say(table(("rank", "plan", "predicted"), lines[:RANKED_SHOWN], numbers=(0, 2)))
    raise EnvironmentFault(
        f"{there}: nothing was measured, nothing is kept. This is the model's ranking of the forward pass for "
        f"{wanted}; run the command on a machine that has one"
    )


def _print(made: Tuning) -> None:
    say(table(HEAD, [_row(name, found) for name, found in made.found.items()], numbers=(2, 3, 4, 5, 6, 7)))
    for name, found in made.found.items():
        for trial in found.thrown_out:
            tell(f"{name}: {_plan(trial.candidate.choices)}: {trial.status}{f' ({trial.why})' if trial.why else ''}")
        if found.stopped:
            tell(f"{name}: stopped: {found.stopped}")
    say(f"kept for {made.device}; calls take it from now on")


def _row(name: str, found: Found) -> tuple[str, ...]:
    best, first = found.best, found.first
    measured = sum(t.ms is not None for t in found.trials)
    if best is None or best.ms is None:
        return (name, "none was right", "-", "-", "-", count(measured), count(len(found.thrown_out)), _took(found))
    own = first.ms if first else None
    return (
        name, _plan(best.candidate.choices), duration(best.ms), duration(own) if own else "-",
        f"{own / best.ms:.2f}" if own else "-", count(measured), count(len(found.thrown_out)), _took(found),
    )  # fmt: skip


def _took(found: Found) -> str:
    return duration(found.seconds * 1e3)


def _plan(choices: Any) -> str:
    """`fa2 128x64, 2 stages, 8 warps, 128 registers`, and for a second kernel its own."""
    stages = "1 stage" if choices["stages"] == 1 else f"{choices['stages']} stages"
    parts = [f"{choices.get('algorithm', '')} {choices['tile_q']}x{choices['tile_k']}".strip(), stages,
             f"{choices['warps']} warps"]  # fmt: skip
    if choices.get("max_registers"):
        parts.append(f"{choices['max_registers']} registers")
    if choices.get("reference") in REFERENCES:
        parts.append(f"{REFERENCES[choices['reference']]} maximum")
    if choices.get("apart"):
        parts.append("loops apart")
    if choices.get("sums"):
        parts.append(SUMS[choices["sums"]])
    second = choices.get("dkdv")
    return ", ".join(parts) + (f"; dK and dV {_plan(second)}" if second else "")


@contextlib.contextmanager
def _bar() -> Iterator[Tell | None]:
    """A progress bar with the fastest so far, on a terminal; elsewhere nothing moves."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def hear(name: str, done: int, whole: int, found: Found) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=whole, best="")
            best = found.best
            text = f"{duration(best.ms)}, {_plan(best.candidate.choices)}" if best and best.ms else ""
            shown.update(tasks[name], completed=done, best=text)

        yield hear
