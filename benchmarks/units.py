"""Which unit of the GPU binds the kernels of the library's specs: its counters, for one call of each.

    python benchmarks/units.py [--specs causal,window] [--out DIR] [--length 16384] [--seconds 120]

Calls are those of rates.py, of specs that fall behind plain causal there, and causal and full beside them. Kernels are
compiled side by side first; then a process runs each call once under `ncu` of Nsight Compute, behind one that is not
looked at. Of a call the kernel counts that takes longest. Shares are of a unit's peak while SMs are active, those of
the L2 and of memory while the kernel runs; `active` is the average SM's time of the kernel's: what is missing is a
tail, or work that is not even. Stalls are the reasons for which warps, those that multiply and those that load
together, wait most, in warps at a time for each instruction that is issued.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import counters
import rates
import records
import torch
import turns

import attncc

SPECS = (
    "full", "causal", "document", "gpt_oss", "row_bounds", "streaming", "softcap", "gemma2", "window_alibi_sinks",
    "sigmoid", "causal_dropout", "global_tokens", "retnet", "block_sparse", "dense_bias", "relative_bias", "entmax15",
    "sparsemax", "neighborhood_2d", "dilated", "tree",
)  # fmt: skip
ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
UNITS = {
    f"sm__pipe_tensor_cycles_active.{ACTIVE}": "tensor", f"sm__inst_executed_pipe_xu.{ACTIVE}": "xu",
    f"sm__pipe_fma_cycles_active.{ACTIVE}": "fma", f"sm__pipe_alu_cycles_active.{ACTIVE}": "alu",
    f"smsp__issue_active.{ACTIVE}": "issue", f"l1tex__data_pipe_lsu_wavefronts.{ACTIVE}": "shared",
    f"lts__t_sectors.{ELAPSED}": "l2", f"dram__throughput.{ELAPSED}": "memory",
}  # fmt: skip
TIMES = {
    "gpu__time_duration.sum": "ns", "sm__cycles_active.avg": "active_cycles", "sm__cycles_elapsed.max": "cycles",
}  # fmt: skip
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "wait",
)  # fmt: skip
STALLS = {f"smsp__average_warps_issue_stalled_{r}_per_issue_active.ratio": f"stall_{r}" for r in REASONS}
METRICS = {**UNITS, **TIMES, **STALLS}
BUSY = 80.0  # percent from which a unit binds


def row_of(name: str, length: int, kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the longest kernel; its units by how busy they are, and the stalls that are most."""
    main = max(kernels, key=lambda k: k["ns"])
    units = {unit: round(main[unit], 1) for unit in UNITS.values()}
    stalls = sorted(((main[n], n.removeprefix("stall_")) for n in STALLS.values()), reverse=True)
    busiest = max(units, key=units.__getitem__)
    return {
        "part": "units", "row": f"{name} D{rates.HEAD_DIM} H{rates.HEADS} S{length}", "kernel": main["kernel"],
        "ms": round(main["ns"] / 1e6, 4), "other_ms": round((sum(k["ns"] for k in kernels) - main["ns"]) / 1e6, 4),
        "active": round(100 * main["active_cycles"] / main["cycles"], 1), **units,
        "stalls": {reason: round(n, 2) for n, reason in stalls[:3]},
        "binds": busiest if units[busiest] >= BUSY else None,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    shares = " ".join(f"{row[unit]:6.1f}" for unit in UNITS.values())
    stalls = ", ".join(f"{reason} {n:.2f}" for reason, n in row["stalls"].items())
    return (
        f"{row['row'].split()[0]:20s} {row['ms']:8.3f} {row['active']:6.1f} {shares}  {row['binds'] or '-':8s} {stalls}"
    )


@torch.no_grad()
def count(wanted: list[int], until: float, names: list[str], length: int) -> None:
    """The process that ncu looks at: each call once, behind one that is not looked at. None begins after `until`."""
    shape = (1, rates.HEADS, length, rates.HEAD_DIM)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for i in wanted:
        if time.time() > until:
            print(f"{names[i]} and what follows were not counted", flush=True)
            break
        attn, given = attncc.load(rates.SPECS / f"{names[i]}.attn"), rates.call_of(names[i], length)
        attn(*qkv, **given)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(10)  # counters.MARK
        attn(*qkv, **given)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del given
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default=",".join(SPECS))
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--seconds", type=float, default=120.0, help="that counting may take")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, length = options.specs.split(","), options.length
    if options.count:
        count(*json.loads(options.count), names, length)
        return
    rates.warm(names, length)
    told_of = ["--specs", options.specs, "--length", str(length)]
    with turns.GPU:
        found = counters.counted(__file__, list(range(len(names))), options.seconds, METRICS, told_of)
    rows = [row_of(names[i], length, kernels) for i, kernels in found.items()]
    print(
        f"{'percent of peak':20s} {'ms':>8s} active " + " ".join(f"{unit:>6s}" for unit in UNITS.values()), flush=True
    )
    for row in rows:
        print(told(row), flush=True)
    records.write(Path(options.out) / "units.json", rows)


if __name__ == "__main__":
    main()
