"""A small model with a learned sink, the same in every process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HEADS, WIDTH, ROWS = 2, 32, 20


class Layer(nn.Module):
    def __init__(self, attn) -> None:
        super().__init__()
        self.attn = attn
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.inputs(x).chunk(3, -1))
        made = self.attn(q, k, v, window=9, slopes=self.slopes, sinks=self.sinks)
        return x + self.output(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attn, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(attn) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def data() -> tuple[Tensor, Tensor]:
    """x and what it should become, [B, S, W]"""
    g = torch.Generator().manual_seed(1)
    x, target = (torch.randn(4, ROWS, WIDTH, generator=g) for _ in range(2))
    return x, target
