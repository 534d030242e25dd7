"""Train a small language model twice, on attncc and on PyTorch's own operators: python examples/train_language_model.py

The text is Python's own help, which comes with Python; a token is a byte. Attention is specs/window_alibi_sinks.attn: a
sliding window, ALiBi, and a learned sink for each head. The other model writes the same out, every score and a mask in
memory. Both start from the same weights and see the same batches: the losses lie on each other. Each trains in a
process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attncc

SPEC = Path(__file__).parent.parent / "specs" / "window_alibi_sinks.attn"
LAYERS, HEADS, WIDTH, WINDOW = 2, 4, 128, 128


@dataclass(frozen=True)
class Run:
    """Losses by step, seconds a step, and the most memory held beyond that of the start, in MB."""

    losses: list[float]
    seconds: float
    megabytes: float


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int, slopes: Tensor, sinks: Tensor) -> Tensor:
    """specs/window_alibi_sinks.attn by hand: [B, H, S, D] each, slopes and sinks [H]."""
    row = torch.arange(q.shape[2], device=q.device)
    distance = row[:, None] - row
    score = q @ k.mT / q.shape[3] ** 0.5 - slopes[:, None, None] * distance
    score = score.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    sink = sinks[:, None, None].expand(*score.shape[:3], 1)
    return torch.cat([score, sink], -1).softmax(-1)[..., :-1] @ v


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and beside the residual stream [B, S, WIDTH]."""

    def __init__(self, attention) -> None:
        super().__init__()
        self.attention = attention
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.register_buffer("slopes", 2.0 ** -(8 / HEADS * torch.arange(1, HEADS + 1)))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v, window=WINDOW, slopes=self.slopes, sinks=self.sinks)
        x = x + self.join(out.transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


def model_of(kind: str) -> nn.Module:
    attention = attncc.load(SPEC) if kind == "attncc" else written_out
    blocks = [Block(attention) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def peak() -> float:
    """The most memory held so far: of the GPU where there is one, else of the process; in MB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def train(kind: str, steps: int, length: int, batch: int) -> Run:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = model_of(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)
    losses, start, begun = [], peak(), 0.0
    for step in range(steps):
        if step == 1:  # the first one makes the kernels
            begun = time.perf_counter()
        at = torch.randint(len(text) - length, (batch,), generator=batches)
        window = torch.stack([text[i : i + length + 1] for i in at]).to(device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, (time.perf_counter() - begun) / max(steps - 1, 1), peak() - start)


def alone(kind: str, *sizes: int) -> Run:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(train, (kind, *sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    asked = parser.parse_args()
    runs = {kind: alone(kind, asked.steps, asked.length, asked.batch) for kind in ("attncc", "PyTorch")}
    print("step     " + "".join(f"{kind:>10}" for kind in runs))
    for step in sorted({*range(0, asked.steps, max(asked.steps // 8, 1)), asked.steps - 1}):
        print(f"{step:4}     " + "".join(f"{run.losses[step]:10.4f}" for run in runs.values()))
    print("ms a step" + "".join(f"{1e3 * run.seconds:10.1f}" for run in runs.values()))
    print("peak MB  " + "".join(f"{run.megabytes:10.1f}" for run in runs.values()))
    ours, theirs = runs.values()
    apart = max(abs(x - y) for x, y in zip(ours.losses, theirs.losses, strict=True))
    print(f"the losses are apart by at most {apart:.1e}")
    assert apart < 1e-2, "the curves do not lie on each other"
    assert asked.steps < 20 or ours.losses[-1] < ours.losses[0] - 1, "nothing was learned"


if __name__ == "__main__":
    main()
