"""Run by test_algorithms.py with TRITON_INTERPRET=1: takes names of JOBS, prints a line of JSON for each finding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from attncc import frontend
from attncc.errors import SpecError
from attncc.ir import Schedule, Shape
from attncc.runtime import check
from attncc.runtime.attention import Attention
from attncc.runtime.dropout import survivors

ALGORITHMS = ("standard", "fa1", "fa2")
SPECS = Path(__file__).parents[2] / "specs"
CASES = {  # what a row keeps, each kind of weight, tables, lists, several parts of a head
    "window_alibi_sinks": None,
    "document": None,
    "learned": "attention a(e: f32[h] grad) { mask k <= q softmax sink(e[h]) }",
    "row_sink": "attention a(e: f32[row], w: f32[k]) { mask k <= q softmax sink(e[row]) dropout 0.3 weight w[k] }",
    "sigmoid": "attention a(e: f32[h]) { mask k < k_len - 9 softmax sigmoid(e[h]) dropout 0.1 }",
    "two_pass": "attention a { mask 0 <= q - k < 40 softmax two_pass }",
    "entmax": "attention a { mask k <= q softmax entmax(1.5) dropout 0.2 }",
    "scaled": "attention a { scale 0.5 }",
    "unified": "attention a(c: float = 2.0) { mask k <= q softmax unified(c) }",
}
SHAPE = Shape(1, 4, 2, 41, 75, 24, 16, "f32")


def pinned(text: str, algorithm: str, tile_q: int | None = None, tile_k: int | None = None) -> frontend.Parsed:
    parsed = frontend.parse(text)
    own = Schedule(None, algorithm=algorithm, tile_q=tile_q, tile_k=tile_k)
    return replace(parsed, spec=replace(parsed.spec, schedules=(own,)))


def right(names: list[str]) -> Iterator[dict[str, object]]:
    """Numbers against float64; the gradients of one spec, which come from the lse of each algorithm."""
    for name in names:
        text = CASES[name] or (SPECS / f"{name}.attn").read_text(encoding="utf-8")
        for algorithm in ALGORITHMS:
            if algorithm == "fa1" and name in ("two_pass", "entmax"):
                continue
            spec = pinned(text, algorithm, 32, 32).spec
            run = check.compiled(spec, "interpreter")
            row = check.call(spec, run, "interpreter", SHAPE, "f32", "contiguous", 1, {}, gradients=name == "learned")
            yield {"name": name, "algorithm": algorithm, "faults": row.faults, "gradients": sorted(row.gradients)}


def dropped(_: list[str]) -> Iterator[dict[str, object]]:
    """Values are a unit matrix: what is 0 in the output was dropped."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 40, 16, generator=g), torch.randn(1, 2, 64, 16, generator=g)
    v = torch.eye(64).expand(1, 2, 64, 64).contiguous()
    for algorithm in ALGORITHMS:
        for tiles in ((32, 64), (16, 16)):
            attn = Attention(pinned("attention a { dropout 0.4 }", algorithm, *tiles), {}, "interpreter")
            kept = attn(q, k, v, seed=11) != 0
            want = survivors(11, 0.4, *axes(1, 2, 40, 64))
            yield {"algorithm": algorithm, "tiles": tiles, "same": torch.equal(kept, want), "kept": int(kept.sum())}


def axes(b: int, h: int, q: int, k: int) -> list[torch.Tensor]:
    return [torch.arange(n)[(..., *[None] * i)] for n, i in ((b, 3), (h, 2), (q, 1), (k, 0))]


def large(_: list[str]) -> Iterator[dict[str, object]]:
    """Scores that no machine holds are refused before anything is allocated."""
    q = torch.zeros(1, 1, 1, 16).expand(1, 1, 2**20, 16)
    attn = Attention(pinned("attention a { }", "standard", 32, 32), {}, "interpreter")
    try:
        attn(q, q, q)
    except torch.OutOfMemoryError as why:
        yield {"why": str(why)}


def packed(_: list[str]) -> Iterator[dict[str, object]]:
    q = torch.zeros(8, 1, 16)
    for algorithm in ("standard", "fa1"):
        attn = Attention(pinned("attention a { }", algorithm), {}, "interpreter")
        try:
            attn.varlen(q, q, q, torch.tensor([0, 3, 8], dtype=torch.int32))
        except SpecError as why:
            yield {"why": str(why)}


JOBS = {"right": right, "dropped": dropped, "large": large, "packed": packed}

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        job, _, listed = argument.partition(":")
        for found in JOBS[job](listed.split(",")):
            print(json.dumps(found))
