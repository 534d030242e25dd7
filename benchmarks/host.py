"""Host time of a call beyond Triton's own launch, in microseconds.

    python benchmarks/host.py [--out DIR]

The kernel is tiny, so that the GPU keeps up: fa2 at 64 rows, fa3 at 256 where the planner takes it. Triton's own launch
is `kernel[grid](...)` with the arguments that the call passes to it, TMA descriptors made for each launch, as Triton
asks; beside it the same with descriptors that are there already. They take turns, without waiting for the device; all
are medians over rounds, what a call takes beyond a launch that of the rounds' differences.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import attncc

SPECS = Path(__file__).parent.parent / "specs"


class Recorder:
    """Stands where a kernel stands, and keeps what it is launched with."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.grid, self.args, self.options = grid, args, options

        return launch


def microseconds(calls: Sequence[Callable[[], Any]], rounds: int = 61, times: int = 50) -> list[list[float]]:
    """The host time of one call of each, in turns, round by round: a machine that slows down does so for all."""
    found = []
    for _ in range(rounds):
        row = []
        for call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                call()
            row.append((time.perf_counter() - start) / times * 1e6)
        found.append(row)
    return found


def described(a: Any) -> Any:
    """The same descriptor, made anew."""
    return type(a)(a.base, a.shape, a.strides, a.block_shape, *([a.layout] if hasattr(a, "layout") else []))


def measure(name: str, length: int, params: dict[str, Any]) -> dict[str, Any]:
    q, k, v = (torch.randn(1, length, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    attn = attncc.load(SPECS / f"{name}.attn")
    attn(q, k, v, **params)
    (launch,) = attn.launchers()
    spelled, recorder = f"{attn.name}_forward", Recorder()
    kernel = launch.__globals__[spelled]
    launch.__globals__[spelled] = recorder
    attn(q, k, v, **params)
    launch.__globals__[spelled] = kernel
    grid, args, options = recorder.grid, recorder.args, recorder.options
    known = vars(kernel).pop("run")  # what is left is Triton's own launch, as of a kernel that nobody prepared

    def whole() -> None:
        kernel.run = known
        attn(q, k, v, **params)
        del kernel.run

    def bare() -> None:
        kernel[grid](*[described(a) if hasattr(a, "block_shape") else a for a in args], **options)

    with torch.no_grad():
        found = microseconds([whole, bare, lambda: kernel[grid](*args, **options)])
    names = ("call_us", "launch_us", "launch_ready_us")
    medians = {n: round(statistics.median(x), 1) for n, x in zip(names, zip(*found, strict=True), strict=True)}
    beyond = statistics.median(row[0] - row[1] for row in found)
    return {"spec": name, "length": length, **medians, "beyond_us": round(beyond, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    sinks = {name: torch.rand(4, device="cuda") for name in ("slopes", "sinks")}
    rows = []
    for name, length, params in (("causal", 64, {}), ("window_alibi_sinks", 64, sinks), ("causal", 256, {})):
        rows.append(measure(name, length, params))
        print(rows[-1], flush=True)
    record = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, "date": datetime.date.today().isoformat(), "rows": rows,
    }  # fmt: skip
    Path(options.out).mkdir(parents=True, exist_ok=True)
    (Path(options.out) / "host.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
