"""The forward pass on this GPU: every row of the forward tables, beside SDPA and FlexAttention in the same run.

    python benchmarks/forward.py [--out DIR] [--rows dense,variants,masks] [--only TEXT,...]
        [--flex tuned|chosen|none] [--warm SECONDS] [--json NAME] [--algorithm NAME]

For each row numbers are checked against float64 on two heads, then all are timed in turns with CUDA events;
the median of the rounds counts. TFLOP/s are over the pairs that the mask keeps: 4 * pairs * heads * head size / time.
FlexAttention is tuned by max-autotune in the run, or takes what that chose on an H200 before, or is left out.
Rows that are not run stay in the record as they were. Several such scripts may run side by side: they time in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import records
import torch
import triton
import turns

import attncc

SPECS = Path(__file__).parent.parent / "specs"
ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One line of a table: a spec, its parameters, the shape, and how FlexAttention says the same."""

    part: str
    spec: str
    batch: int
    heads: int
    length: int
    head_dim: int
    params: dict[str, Any] = field(default_factory=dict)
    mask: Any = None
    score: Any = None
    causal: bool | None = None  # None where SDPA has no such mask
    kv_heads: int = 0  # 0: as many as heads

    @property
    def name(self) -> str:
        group = f"/{self.kv_heads}" if self.kv_heads else ""
        return f"{self.spec} D{self.head_dim} H{self.heads}{group} B{self.batch} S{self.length}"


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def dense_rows() -> list[Row]:
    shapes = ((64, 32, 4, 4096), (128, 16, 16, 1024), (128, 16, 4, 4096), (128, 16, 1, 16384), (256, 8, 4, 4096))
    return [
        Row("dense", spec, b, h, s, d, mask=causal if spec == "causal" else None, causal=spec == "causal")
        for d, h, b, s in shapes
        for spec in ("full", "causal")
    ]


def variant_rows(s: int = 16384) -> list[Row]:
    slopes = torch.exp2(-torch.arange(1, 17, device="cuda") * 8.0 / 16)
    shape = (1, 16, s, 128)
    return [
        Row("variants", "window", *shape, {"window": 1025}, lambda b, h, i, j: (i >= j) & (i - j <= 1024)),
        Row("variants", "alibi", *shape, {"slopes": slopes}, causal, lambda x, b, h, i, j: x + slopes[h] * (j - i)),
        Row("variants", "softcap", *shape, {"cap": 50.0}, causal, lambda x, b, h, i, j: 50.0 * torch.tanh(x / 50.0)),
    ]


def mask_rows(s: int = 16384) -> list[Row]:
    doc = (torch.arange(s, device="cuda") // 2048).to(torch.int32)
    shape = (1, 16, s, 128)
    side = 128

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        y = (i // side).clamp(8, side - 9)
        x = (i % side).clamp(8, side - 9)
        return ((j // side - y).abs() <= 8) & ((j % side - x).abs() <= 8)

    return [
        Row("masks", "document", *shape, {"doc": doc[None]}, lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)),
        Row("masks", "prefix", *shape, {"prefix": 4096}, lambda b, h, i, j: (i >= j) | (j < 4096)),
        Row("masks", "streaming", *shape, {"first": 4, "window": 1025},
            lambda b, h, i, j: (i >= j) & ((i - j <= 1024) | (j < 4))),
        Row("masks", "neighborhood_2d", *shape, {"height": side, "width": side, "radius": 8}, near),
    ]  # fmt: skip


MADE = {"dense": dense_rows, "variants": variant_rows, "masks": mask_rows}


def kept_pairs(row: Row) -> int:
    """Pairs that the mask keeps, counted in slices of rows."""
    s = row.length
    if row.mask is None:
        return s * s
    j = torch.arange(s, device="cuda")[None]
    return sum(int(row.mask(0, 0, i[:, None], j).sum()) for i in torch.arange(s, device="cuda").split(512))


def error(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """Relative error of two heads' first and last 256 rows against float64."""
    worst, group = 0.0, row.heads // k.shape[1]
    for h in (0, row.heads - 1):
        for rows in (slice(0, 256), slice(row.length - 256, row.length)):
            i, j = torch.arange(row.length, device="cuda")[rows, None], torch.arange(row.length, device="cuda")[None]
            s = q[0, h, rows].double() @ k[0, h // group].double().T * row.head_dim**-0.5
            if row.score is not None:
                s = row.score(s, 0, torch.tensor(h, device="cuda"), i, j)
            if row.mask is not None:
                s = s.masked_fill(~row.mask(0, 0, i, j), -torch.inf)
            want = s.softmax(-1) @ v[0, h // group].double()
            worst = max(worst, ((out[0, h, rows] - want).norm() / want.norm()).item())
    return worst


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, in turns, so that the card's state is the same for all."""
    for call in calls.values():
        triton.testing.do_bench(call, warmup=20, rep=20)
    rounds = {name: [triton.testing.do_bench(c, warmup=5, rep=40, return_mode="median")] for name, c in calls.items()}
    for _ in range(ROUNDS - 1):
        for name, call in calls.items():
            rounds[name].append(triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median"))
    return {name: statistics.median(times) for name, times in rounds.items()}


def tensors(row: Row) -> list[torch.Tensor]:
    """q [B, H, S, D], k and v [B, H_kv, S, D] in bfloat16, laid out [B, S, H, D]."""
    shapes = ((row.batch, row.length, heads or row.heads, row.head_dim) for heads in (0, row.kv_heads, row.kv_heads))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]


def compile_flex(part: str, index: int) -> None:
    """FlexAttention for one row, tuned; what it compiles stays in Triton's cache."""
    row = MADE[part]()[index]
    peers.flex(*tensors(row), row.mask, row.score)()


def compiled(spec: str, algorithm: str | None) -> attncc.Attention:
    """A spec of the library, with the algorithm that the planner chooses or with this one."""
    text = (SPECS / f"{spec}.attn").read_text(encoding="utf-8")
    pinned = f"\nschedule {{ algorithm {algorithm} }}\n" if algorithm else ""
    return attncc.compile(text + pinned, spec)


def measure(row: Row, flex: str, algorithm: str | None = None) -> dict[str, Any]:
    q, k, v = tensors(row)
    start = time.perf_counter()
    attn = compiled(row.spec, algorithm)
    out = attn(q, k, v, **row.params)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    calls: dict[str, Callable[[], Any]] = {"attncc": lambda: attn(q, k, v, **row.params)}
    if row.causal is not None:
        calls |= {"cudnn": peers.cudnn(q, k, v, row.causal), "flash": peers.flash(q, k, v, row.causal)}
    if flex != "none":
        chosen = peers.CHOSEN if flex == "chosen" else None
        calls["flex"] = peers.flex(q, k, v, row.mask, row.score, chosen=chosen)
    with turns.GPU:
        off = error(row, q, k, v, out)
        flops = 4 * kept_pairs(row) * row.batch * row.heads * row.head_dim
    with turns.GPU:
        ms = timed(calls)
    return {
        "row": row.name, "part": row.part, "error": off, "flex": flex,
        "first_call_s": round(first, 2), "tflop": flops / 1e12,
        "ms": {n: round(t, 4) for n, t in ms.items()},
        "tflops": {n: round(flops / t / 1e9, 1) for n, t in ms.items()},
    }  # fmt: skip


def wanted(made: dict[str, Callable[[], list[Row]]], parts: str, only: str) -> list[tuple[str, int, Row]]:
    """Part, place in it and row, of the rows in these parts whose name holds one of these texts."""
    rows = ((part, i, row) for part in parts.split(",") for i, row in enumerate(made[part]()))
    return [(part, i, row) for part, i, row in rows if any(text in row.name for text in only.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--rows", default="dense,variants,masks")
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--json", default="forward.json")
    parser.add_argument("--flex", default="tuned", choices=("tuned", "chosen", "none"))
    parser.add_argument(
        "--warm", type=float, default=0, metavar="SECONDS", help="compile for FlexAttention side by side first"
    )
    parser.add_argument("--algorithm", help="pinned in every spec; the planner's choice where it is left out")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = wanted(MADE, options.rows, options.only)
    order = [row.name for _, _, row in wanted(MADE, ",".join(MADE), "")]
    if options.warm and options.flex == "tuned":
        peers.warm("forward", [(part, i) for part, i, _ in rows], options.warm)
    results = []
    for _, _, row in rows:
        result = measure(row, options.flex, options.algorithm)
        results.append(result)
        shown = "  ".join(f"{n} {t:6.1f}" for n, t in result["tflops"].items())
        print(
            f"{result['row']:44s} {shown}   error {result['error']:.1e}  first {result['first_call_s']} s", flush=True
        )
        torch.cuda.empty_cache()
        records.write(Path(options.out) / options.json, results, order, rounds=ROUNDS, algorithm=options.algorithm)


if __name__ == "__main__":
    main()
