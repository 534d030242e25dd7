"""Speed where users of other libraries complain (case 40): biases beside none, one query row, a tiny call.

    python benchmarks/complaints.py [--out DIR]

Biases: causal with a table by distance, with a number for each pair, and with neither, in turns, at B4 H16 S4096 in
bf16. One query row: the bytes of K and V in the call's time, beside a copy that moves as many (half read, half
written). Tiny: B1 H2 S64 D16, a call and a CUDA graph's replay of it, beside SDPA. All are compared with PyTorch first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import records
import torch
import torch.nn.functional as F
import turns
from torch import Tensor

import attncc

ROUNDS = 5
NONE = "attention plain { mask k <= q }"
TABLE = "attention by_distance(bias: f32[h, far]) { mask k <= q score s + bias[h, min(q - k, far - 1)] }"
PAIRS = "attention by_pair(bias: bf16[h, row, k]) { mask k <= q score s + bias[h, row, k] }"


def draw(batch: int, heads: int, length: int, head_dim: int) -> Tensor:
    return torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(turns.milliseconds(call))
    return {name: statistics.median(x) for name, x in found.items()}


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def biases(head_dim: int) -> dict[str, Any]:
    q, k, v = (draw(4, 16, 4096, head_dim) for _ in range(3))
    table = torch.randn(16, 128, device="cuda")
    pairs = torch.randn(16, 4096, 4096, device="cuda").bfloat16()
    far = torch.arange(4096, device="cuda")
    far = (far[:, None] - far[None, :]).clamp(max=127)
    hidden = torch.where(far < 0, -torch.inf, 0.0)
    plain, by_distance, by_pair = (attncc.compile(text) for text in (NONE, TABLE, PAIRS))
    added = {"table": table[:, far.clamp(min=0)] + hidden, "pairs": pairs + hidden}
    want = {n: F.scaled_dot_product_attention(q[:1], k[:1], v[:1], x.bfloat16()[None]) for n, x in added.items()}
    near(by_distance(q, k, v, bias=table)[:1], want["table"])
    near(by_pair(q, k, v, bias=pairs)[:1], want["pairs"])
    ms = medians({"none": lambda: plain(q, k, v), "table": lambda: by_distance(q, k, v, bias=table),
                  "pairs": lambda: by_pair(q, k, v, bias=pairs)})  # fmt: skip
    return {"part": "biases", "row": f"D{head_dim} H16 B4 S4096", **{f"{n}_ms": round(x, 4) for n, x in ms.items()},
            "table": round(ms["table"] / ms["none"], 3), "pairs": round(ms["pairs"] / ms["none"], 3)}  # fmt: skip


def one_row(batch: int, heads: int, kv_heads: int, length: int) -> dict[str, Any]:
    q, k, v = draw(batch, heads, 1, 128), draw(batch, kv_heads, length, 128), draw(batch, kv_heads, length, 128)
    plain = attncc.compile(NONE)
    near(plain(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    source, target = torch.stack([k, v]).flatten(), torch.empty(2 * k.numel(), device="cuda", dtype=k.dtype)
    half = source.numel() // 2
    ms = medians({"call": lambda: plain(q, k, v), "copy": lambda: target[:half].copy_(source[:half])})
    rate, copy = (source.nbytes / ms[n] / 1e9 for n in ("call", "copy"))
    return {"part": "one query row", "row": f"D128 H{heads}/{kv_heads} B{batch} S{length}", "ms": round(ms["call"], 4),
            "tb_per_s": round(rate, 3), "copy_tb_per_s": round(copy, 3), "of_copy": round(rate / copy, 3)}  # fmt: skip


def host_us(call: Callable[[], Any], times: int = 200) -> float:
    found = []
    for _ in range(21):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / times * 1e6)
    return round(statistics.median(found), 1)


def tiny() -> dict[str, Any]:
    q, k, v = (draw(1, 2, 64, 16) for _ in range(3))
    plain = attncc.compile(NONE)
    peer = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    near(plain(q, k, v), peer())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plain(q, k, v)
    for x in (q, k, v):
        x.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, plain(q, k, v))
    return {"part": "tiny", "row": "D16 H2 B1 S64", "call_us": host_us(lambda: plain(q, k, v)),
            "sdpa_us": host_us(peer), "replay_us": host_us(graph.replay)}  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    torch.manual_seed(0)
    calls = [
        partial(biases, 128),
        partial(biases, 64),
        partial(one_row, 64, 32, 8, 8192),
        partial(one_row, 64, 32, 32, 4096),
        tiny,
    ]
    rows = []
    for call in calls:
        with turns.GPU:
            rows.append(call())
        print(rows[-1], flush=True)
    records.write(Path(options.out) / "complaints.json", rows)


if __name__ == "__main__":
    main()
