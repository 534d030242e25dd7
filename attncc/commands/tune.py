"""`attncc tune`: the fastest plan on this machine's GPU, searched once and kept for good."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from attncc.commands.console import REFERENCES, count, duration, say, say_json, table, tell
from attncc.commands.options import FILE, json_option, layout_option, request, shape_option, values_of
from attncc.errors import AttnError, CheckError, EnvironmentFault
from attncc.runtime.keys import plain

if TYPE_CHECKING:
    from attncc.commands.contents import Contents
    from attncc.pipeline import Planned
    from attncc.planner import Candidate
    from attncc.runtime.search import Found
    from attncc.runtime.tune import Tell, Tuning

BOTH = ("forward", "backward")
RANKED_SHOWN = 10
ORDER = (
    "in the order a search measures them: the planner's choice, its variants, then what the model ranks next; "
    "- where the model tells a plan too little apart from one above to time it"
)
DETAILS: dict[str, dict[Any, str]] = {
    "reference": {"running": "running maximum", "two_pass": "maximum found first", "fixed": "fixed reference"},
    "loads": {"pointer": "loads by pointers", "descriptor": "loads by descriptors"},
    "apart": {True: "whole tiles in a loop of their own", False: "one loop for all tiles"},
    "queries": {1: "one buffer of Q", 2: "two buffers of Q"},
    "sums": {"added": "sums of dQ for each head", "turns": "sums of dQ that heads share", "apart": "dQ by itself"},
}
HEAD = ("pass", "plan", "time", "planner's choice", "gain", "measured", "thrown out", "took")


class Seconds(click.FloatRange):
    """A range that nan is not in, as it compares with no end of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


@click.command("tune", short_help="Search for the fastest plan on this GPU, and keep it")
@click.argument("spec", type=FILE)
@layout_option
@shape_option
@click.option("--pass", "passes", type=click.Choice(BOTH), multiple=True, help="Left out: both. Repeatable.")
@click.option("--cold", is_flag=True, help="Empty the GPU's cache before each run.")
@click.option("--seconds", type=Seconds(1, 3600), default=50, show_default=True, help="For all passes.")
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
        _without(planned, known, passes or BOTH, here, target, as_json)
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


def _without(
    planned: Planned, known: Contents, passes: tuple[str, ...], here: str | None, named: str | None, as_json: bool
) -> None:  # fmt: skip
    """No such GPU: what would be measured in its order, the planner's choice first, with the model's times of the call.
    Raises EnvironmentFault."""
    wanted = planned.target.name
    there = f"this machine's GPU is {here}" if here else "there is no GPU here"
    if named is None:
        raise EnvironmentFault(f"{there}: --target sm_90 and others rank plans by the model")
    if not planned.target.is_gpu:
        raise EnvironmentFault("the CPU program has one plan: there is nothing to tune")
    from attncc.runtime.tune import candidates_of

    ranked = {name: candidates_of(planned, name) for name in passes}
    times = {name: _predicted(planned, found, known) for name, found in ranked.items()}
    if as_json:
        rows = [
            {"pass": name, "choices": c.choices, "predicted_ms": ms}
            for name, found in ranked.items()
            for c, ms in zip(found, times[name], strict=True)
        ]
        shape = plain(planned.shape)
        say_json({"name": planned.spec.name, "target": wanted, "shape": shape, "measured": False, "ranking": rows})
    else:
        lines = [
            (name, str(i + 1), plan, "-" if ms is None else duration(ms))
            for name, found in ranked.items()
            for i, plan, ms in zip(range(RANKED_SHOWN), plans_in_words([c.choices for c in found]), times[name])
        ]
        say(table(("pass", "rank", "plan", "predicted"), lines, numbers=(1, 3)))
        say(ORDER)
    raise EnvironmentFault(
        f"{there}: nothing was measured, nothing is kept. These are the first plans that a search for {wanted} would "
        "measure, with the model's times; run the command on a machine that has one"
    )


def _predicted(planned: Planned, found: Sequence[Candidate], known: Contents) -> list[float | None]:
    """The model's times of the call: of plans that it ranked, and of the planner's choice of each algorithm; it tells
    others from these by too little."""
    from attncc.commands.costs import predicted_ms

    chosen = {c.plan.algorithm: c for c in reversed(found)}.values()
    timed = (c.predicted_ms is not None or c in chosen for c in found)
    return [predicted_ms(planned, c.plan, known) if one else None for one, c in zip(timed, found, strict=True)]


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


def plans_in_words(several: Sequence[Any]) -> list[str]:
    """Plans as `_plan` has them, with what tells those apart that would read alike."""
    texts = [_plan(choices) for choices in several]
    made = []
    for choices, text in zip(several, texts, strict=True):
        alike = [other for other, its in zip(several, texts, strict=True) if its == text]
        told = [n for n in DETAILS if len({(c.get(n), (c.get("dkdv") or {}).get(n)) for c in alike}) > 1]
        made.append(_plan(choices, told))
    return made


def _plan(choices: Any, told: Sequence[str] = ()) -> str:
    """`fa2 128x64, 2 stages, 8 warps, 128 registers`, then these of DETAILS, and for a second kernel its own."""
    stages = "1 stage" if choices["stages"] == 1 else f"{choices['stages']} stages"
    parts = [f"{choices.get('algorithm', '')} {choices['tile_q']}x{choices['tile_k']}".strip(), stages,
             f"{choices['warps']} warps"]  # fmt: skip
    if choices.get("max_registers"):
        parts.append(f"{choices['max_registers']} registers")
    if choices.get("reference") in REFERENCES:
        parts.append(f"{REFERENCES[choices['reference']]} maximum")
    parts += [DETAILS[name][choices[name]] for name in told if choices.get(name) in DETAILS[name]]
    second = choices.get("dkdv")
    return ", ".join(parts) + (f"; dK and dV {_plan(second, told)}" if second else "")


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
