"""`attncc build`: kernel files from specs, compiled for their targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from attncc.commands.console import Progress, count, progress, say, say_json, table, tell, warn
from attncc.commands.options import (
    FILE,
    algorithm_option,
    json_option,
    layout_option,
    request,
    shape_option,
    target_option,
    targets_of,
    values_of,
)
from attncc.errors import AttnError, EnvironmentFault, SpecError
from attncc.pipeline import Built, Kernel, Request, build

HEAD = ("file", "target", "pass", "registers", "spills", "shared", "(predicted)")
UNITS = "registers and spills of a thread, shared memory of a block; spills and shared memory in bytes"
MANY_SPILLS = 256  # bytes: a quarter of the registers that a thread can have


@click.command("build", short_help="Write kernel files, compiled for their targets")
@click.argument("specs", nargs=-1, required=True, type=FILE, metavar="SPEC...")
@target_option
@layout_option
@algorithm_option
@shape_option
@click.option(
    "--pass", "passes", type=click.Choice(("forward", "backward", "tangent")), multiple=True, default=("forward",),
    show_default=True, help="What the files are for; tangent is forward-mode differentiation. Repeatable.",
)  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False), help="Folder for the files; left out: ./NAME/ for each spec.")
@json_option
def command(
    specs: tuple[str, ...], targets: tuple[str, ...], layout: str | None, algorithm: str | None,
    shape: dict[str, int], dtype: str | None, assigned: tuple[tuple[str, Any], ...], passes: tuple[str, ...],
    out: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write NAME_PASS_TARGET.py for each SPEC and target, with the registers, spills and shared memory that it takes.

    Kernels are compiled for GPUs that need not be there. Beside the kernel for strides and addresses that are multiples
    of 16 bytes there is one for any strides: in the same file, or in one of its own, NAME_PASS_TARGET_any_stride.py.
    What was built before comes from the cache.

    \b
        attncc build causal.attn --target sm_90
        attncc build causal.attn --target sm_90 --layout ragged
        attncc build causal.attn --target sm_80 --algorithm fa1
        attncc build causal.attn --target sm_90 --pass forward --pass backward
        attncc build specs/*.attn --target sm_90 --target gfx942 --out kernels
        attncc build chunked.attn --set chunk=4096 --shape heads=32,kv_heads=8,head_dim=64 --json
    """
    values, wanted = values_of(assigned), targets_of(targets)
    ask = partial(request, shape=shape, dtype=dtype, values=values, layout=layout, passes=passes, algorithm=algorithm)
    made = _build_all([partial(ask, path, goal) for path in specs for goal in wanted])
    files = _destinations(made, out)
    _write(files)
    for text in dict.fromkeys(w.render(asked.text, asked.filename) for built, asked in made for w in built.warnings):
        tell(text, fg="yellow")  # once for all targets
    lines = [(path, kernel) for path, kernel in files.items()]
    if as_json:
        say_json({"kernels": [_facts(path, kernel) for path, kernel in lines]})
    else:
        say(table(HEAD, [row for path, kernel in lines for row in _rows(path, kernel)], numbers=(3, 4, 5, 6)))
        if any(kernel.aligned for _, kernel in lines):
            say(UNITS)
    for text in (said for path, kernel in lines for said in _spilling(path, kernel)):
        warn(text)


def _build_all(wanted: list[Callable[[], Request]]) -> list[tuple[Built, Request]]:
    """Build each; the faults of all are shown before the last of them ends the command, and nothing is written."""
    from attncc.runtime.cache import Cache
    from attncc.runtime.keys import toolchain

    made: list[tuple[Built, Request]] = []
    faults: dict[str, AttnError] = {}
    with progress() as shown:
        cache, tools = Cache(warn=warn, note=shown.note), toolchain()
        for ask in wanted:
            try:
                asked = ask()
                made.append((build(asked, cache, _told(shown, asked), tools), asked))
            except EnvironmentFault:
                raise
            except AttnError as fault:
                faults.setdefault(str(fault), fault)
    if faults:
        *others, last = faults.values()
        for other in others:
            tell(str(other) if isinstance(other, SpecError) else f"attncc: error: {other}")
        raise last
    return made


def _told(shown: Progress, asked: Request) -> Any:
    return lambda text: shown.stage(f"{asked.filename}, {asked.target}: {text}")


def _destinations(made: list[tuple[Built, Request]], out: str | None) -> dict[Path, Kernel]:
    """Where each kernel goes. Raises click.UsageError where two specs of one name would share a file."""
    files: dict[Path, Kernel] = {}
    for built, _ in made:
        folder = Path(out) if out is not None else Path(built.name)
        for kernel in built.kernels:
            path = folder / kernel.file
            if path in files and files[path].source != kernel.source:
                raise click.UsageError(f"two specs are called {built.name} and would share {path}: build them apart")
            files[path] = kernel
    return files


def _write(files: dict[Path, Kernel]) -> None:
    from attncc.runtime.publish import replace_file

    for path, kernel in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, kernel.source)
        except OSError as fault:
            raise EnvironmentFault(f"{path} cannot be written: {fault.strerror}") from None


def _facts(path: Path, kernel: Kernel) -> dict[str, Any]:
    return {
        "file": str(path),
        "target": kernel.target,
        "pass": kernel.direction,
        **_resources(kernel.aligned),
        "predicted_shared_bytes": kernel.predicted_shared_bytes,
        "general": _resources(kernel.general) if kernel.general else None,
        "parts": [{"kernel": part["kernel"], **_resources(part)} for part in _parts(kernel.aligned)],
        "cached": kernel.cached,
    }


def _resources(facts: Any) -> dict[str, Any]:
    return {name: facts.get(name) if facts else None for name in ("registers", "spills", "shared_bytes")}


def _parts(facts: Any) -> list[Any]:
    """Each kernel of a file that has several."""
    return list(facts.get("parts", ())) if facts else []


def _variants(path: Path, kernel: Kernel) -> list[tuple[str, Any, int | None]]:
    """What was compiled of a file, by the names that the table gives it, and the shared memory that was predicted."""
    variants = [(str(path), kernel.aligned, kernel.predicted_shared_bytes)]
    variants += [(f"  {part['kernel']}", part, None) for part in _parts(kernel.aligned)]
    return [*variants, ("  any strides", kernel.general, None)] if kernel.general else variants


def _spilling(path: Path, kernel: Kernel) -> list[str]:
    """A warning for each kernel that keeps much of its registers in memory; of a file of several, for its parts."""
    whole = str(path) if _parts(kernel.aligned) else None
    return [
        f"{path}{'' if name == str(path) else f', {name.strip()}'}: a thread keeps {count(facts['spills'])} bytes of "
        f"registers in memory; more than {MANY_SPILLS} cost time"
        for name, facts, _ in _variants(path, kernel)
        if facts and name != whole and (facts["spills"] or 0) > MANY_SPILLS
    ]


def _rows(path: Path, kernel: Kernel) -> list[list[str]]:
    return [
        [name, kernel.target, kernel.direction, *map(count, _resources(facts).values()), count(predicted)]
        for name, facts, predicted in _variants(path, kernel)
    ]
