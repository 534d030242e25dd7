"""Charts of what was measured over lengths, as PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncc.errors import EnvironmentFault

if TYPE_CHECKING:
    from attncc.runtime.bench import Row

INCHES, DOTS = (6.0, 4.5), 150


def ready(path: Path) -> None:
    """EnvironmentFault where `save_times` could not end well: asked before anything is measured."""
    _pyplot()
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no permission" if path.parent.is_dir() else "there is no such folder"
        raise EnvironmentFault(f"{path} cannot be written: {why}")


def save_times(rows: Sequence[Row], path: Path, title: str) -> None:
    """Milliseconds over lengths, both axes logarithmic, one panel a pass. EnvironmentFault without matplotlib or where
    the file cannot be written."""
    pyplot = _pyplot()
    passes = list(dict.fromkeys(row.direction for row in rows))
    names = list(dict.fromkeys(row.who for row in rows if row.ms is not None))
    figure, axes = pyplot.subplots(
        1, len(passes), figsize=(INCHES[0] * len(passes), INCHES[1]), squeeze=False, layout="constrained"
    )
    for axis, direction in zip(axes[0], passes, strict=True):
        for i, name in enumerate(names):
            mine = [r for r in rows if (r.who, r.direction) == (name, direction) and r.ms is not None]
            if mine:
                ms = [r.ms or 0.0 for r in mine]
                away = [
                    [m - (r.least_ms or m) for m, r in zip(ms, mine)],
                    [(r.most_ms or m) - m for m, r in zip(ms, mine)],
                ]
                axis.errorbar([r.length for r in mine], ms, yerr=away, label=name, color=f"C{i}", marker="o", capsize=2)
        axis.set(xscale="log", yscale="log", xlabel="length", ylabel="milliseconds", title=direction)
        axis.grid(True, which="both", alpha=0.25)
        if axis.lines:
            axis.set_xticks(*_ticks(sorted({r.length for r in rows})), minor=False)
            axis.set_xticks([], minor=True)
            axis.legend()
    figure.suptitle(title, fontsize="small")
    _save(figure, path)


def _ticks(lengths: Sequence[int]) -> tuple[list[int], list[str]]:
    return list(lengths), [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise EnvironmentFault("--plot needs matplotlib: pip install 'attncc[plot]'") from None
    return pyplot


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=DOTS, format="png")
    except OSError as fault:
        raise EnvironmentFault(f"{path} cannot be written: {fault.strerror or fault}") from None
    finally:
        _pyplot().close(figure)
