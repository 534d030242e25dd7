"""What tuning takes and gains: each search from empty caches, and once more, whose winner should be the same.

    python benchmarks/tuning.py [--specs causal,softcap] [--passes forward,backward] [--length 4096] [--head-dim 128]
        [--seconds 50] [--out DIR]

Of each: seconds that a person waits, milliseconds of the planner's choice and of the winner, measured in turns, and how
many times as long as the second search's winner the first's takes, both as the second measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import records
import torch
import tune_all
import turns

import attncc
from attncc.runtime.search import OK, Found

SPECS = Path(__file__).parent.parent / "specs"


def measure(name: str, direction: str, length: int, head_dim: int, seconds: float) -> dict[str, Any]:
    """The row of one spec and pass."""
    attention = attncc.load(SPECS / f"{name}.attn")
    task = tune_all.Task(name, direction, head_dim, (length,))
    (shape,) = task.shapes()
    qkv, params = tune_all.drawn(task, attention.spec, shape, tune_all.VALUES.get(name, {}))
    found, taken = [], []
    with turns.GPU:
        for _ in range(2):
            start = time.monotonic()
            made = attention.tune(*qkv, params, passes=(direction,), budget=seconds)
            taken.append(round(time.monotonic() - start, 1))
            found.append(made.found[direction])
    return {"part": direction, "row": f"{name} D{head_dim} S{length}", "seconds": taken, **compared(*found)}


def compared(first: Found, second: Found) -> dict[str, Any]:
    """What the first search found, and the second beside it."""
    if first.best is None or second.best is None or first.first is None:
        return {"thrown_out": [f"{t.status}: {t.why}" for t in first.thrown_out], "ms": None}
    winner = first.best.candidate
    again = [t.ms for t in second.trials if t.candidate == winner and t.status == OK]
    ratio = again[0] / second.best.ms if again and again[0] and second.best.ms else None
    return {
        "measured": sum(t.ms is not None for t in first.trials), "of": len(first.trials), "stopped": first.stopped,
        "thrown_out": [f"{t.status}: {t.why}" for t in first.thrown_out],
        "planner_ms": first.first.ms, "ms": first.best.ms, "choices": winner.choices,
        "again_same": winner == second.best.candidate, "again_ratio": ratio,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="causal,window,softcap")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=50.0, help="what attncc tune has by default")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    rows = []
    for direction in options.passes.split(","):
        for name in options.specs.split(","):
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= {"ATTNCC_CACHE_DIR": f"{folder}/attncc", "TRITON_CACHE_DIR": f"{folder}/triton"}
                rows.append(measure(name, direction, options.length, options.head_dim, options.seconds))
            print(rows[-1], flush=True)
            records.write(Path(options.out) / "tuning.json", rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
