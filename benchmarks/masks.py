"""What a call costs where the mask is new each time: another length, other documents, another grid. On this GPU.

    python benchmarks/masks.py [--out DIR] [--only TEXT] [--calls N] [--no-recompile]

Every call gets tensors of a length that no call before had, and a mask that was not seen before; the time is that of
the whole call, from Python to the end of the last kernel, the making of tables or block masks included. Medians of the
calls after the first WARM. FlexAttention in three forms: compiled for any length (dynamic=True) with an eager
create_block_mask, the same with a compiled one, and compiled for each length anew (dynamic=False). Numbers in its masks
are tensors, as its authors advise: a new one compiles nothing there either.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attncc

SPECS = Path(__file__).parent.parent / "specs"
HEADS, HEAD_DIM, LONGEST, SIDE, RADIUS = 16, 128, 16384, 128, 8
WARM = 3  # calls that may compile: at the second length dynamo makes sizes symbolic
RECOMPILED = 2  # calls of the form that compiles each time
DEVICE, RESERVED = "cuda", 16 * 2**30
Mask = Callable[[Any, Any, Any, Any], Any]
Making = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One call: its length, the parameters of the spec, and the mask as FlexAttention has it."""

    length: int
    params: dict[str, Any]
    mask: Mask


def streaming(n: int) -> Call:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j <= 1024) | (j < 4))

    return Call(n, {"first": 4, "window": 1025}, mask)


def documents(n: int) -> Call:
    """Documents of 256 to 4096 positions in one row."""
    ends = torch.randint(256, 4096, (n // 256 + 1,)).cumsum(0)
    doc = torch.searchsorted(ends, torch.arange(n), right=True).to(torch.int32).to(DEVICE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (doc[i] == doc[j]) & (i >= j)

    return Call(n, {"doc": doc[None]}, mask)


def prefix(n: int) -> Call:
    end = torch.tensor(n // 4, device=DEVICE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) | (j < end)

    return Call(n, {"prefix": n // 4}, mask)


def neighbourhood(n: int) -> Call:
    height = n // SIDE
    lowest = torch.tensor(height - 1 - RADIUS, device=DEVICE)  # row that a whole neighbourhood is centred on

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        y = torch.minimum((i // SIDE).clamp(RADIUS), lowest)
        x = (i % SIDE).clamp(RADIUS, SIDE - 1 - RADIUS)
        return ((j // SIDE - y).abs() <= RADIUS) & ((j % SIDE - x).abs() <= RADIUS)

    return Call(height * SIDE, {"height": height, "width": SIDE, "radius": RADIUS}, mask)


ROWS = {"streaming": streaming, "document": documents, "prefix": prefix, "neighborhood_2d": neighbourhood}


def lengths(count: int) -> Iterator[int]:
    """All different, none a power of two, down from LONGEST."""
    return (LONGEST - SIDE * (2 * i + 1) for i in range(count))


def tensors(length: int) -> tuple[torch.Tensor, ...]:
    shape = (1, length, HEADS, HEAD_DIM)
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))


def flex(attention: Any, making: Making, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    blocks = making(call.mask, None, None, q.shape[2], k.shape[2], device=q.device)
    return attention(q, k, v, block_mask=blocks)


def forms(spec: str, recompile: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of q, k, v and the call, by name."""
    attn = attncc.load(SPECS / f"{spec}.attn")
    any_length = torch.compile(flex_attention, dynamic=True)
    made: dict[str, Callable[..., torch.Tensor]] = {
        "attncc": lambda q, k, v, call: attn(q, k, v, **call.params),
        "flex, eager mask": partial(flex, any_length, create_block_mask),
        "flex, compiled mask": partial(flex, any_length, torch.compile(create_block_mask, dynamic=True)),
    }
    if recompile:
        each = torch.compile(flex_attention, dynamic=False)
        made["flex, compiled anew"] = partial(flex, each, create_block_mask)
    return made


def timed(call: Callable[[], torch.Tensor]) -> tuple[float, float, torch.Tensor]:
    """Milliseconds from Python to the end on the GPU, MiB allocated on the way beyond what was there, the result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    took = (time.perf_counter() - start) * 1e3
    return took, (torch.cuda.max_memory_allocated() - before) / 2**20, out


def reserve() -> None:
    """One piece of memory for the allocator to share out: a new length is not to wait for the driver."""
    torch.empty(RESERVED, dtype=torch.uint8, device=DEVICE)


def measure(spec: str, count: int, recompile: bool) -> dict[str, Any]:
    reserve()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    calls = forms(spec, recompile)
    ms: dict[str, list[float]] = {name: [] for name in calls}
    mib = dict.fromkeys(calls, 0.0)
    worst = 0.0
    for turn, length in enumerate(lengths(WARM + count)):
        call = ROWS[spec](length)
        q, k, v = tensors(call.length)
        want = None
        for name, run in calls.items():
            if name == "flex, compiled anew" and not WARM <= turn < WARM + RECOMPILED:
                continue
            took, peak, out = timed(partial(run, q, k, v, call))
            want = out if want is None else want
            worst = max(worst, ((out - want).float().norm() / want.float().norm()).item())
            if turn >= WARM:
                ms[name].append(took)
                mib[name] = max(mib[name], peak)
    return {
        "row": spec, "calls": count, "difference": worst,
        "ms": {n: round(statistics.median(t), 3) for n, t in ms.items()},
        "mib": {n: round(m, 1) for n, m in mib.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--no-recompile", action="store_true", help="leave out the form that compiles at each length")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    results = []
    for spec in (name for name in ROWS if options.only in name):
        result = measure(spec, options.calls, not options.no_recompile)
        results.append(result)
        ours = result["ms"]["attncc"]
        shown = "  ".join(f"{n} {t:.3f} ms ({t / ours:.1f}x)" for n, t in result["ms"].items() if n != "attncc")
        extra = "  ".join(f"{n} {m:.0f}" for n, m in result["mib"].items())
        print(f"{spec:16s} attncc {ours:.3f} ms  {shown}   MiB: {extra}   apart {result['difference']:.1e}", flush=True)
        record = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "attncc": attncc.__version__, "date": datetime.date.today().isoformat(), "rows": results,
        }  # fmt: skip
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / "masks.json").write_text(json.dumps(record, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
