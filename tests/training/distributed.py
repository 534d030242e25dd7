"""Two processes over gloo train one model, split by DDP, then by FSDP2.

`python -m tests.training.distributed RANK FILE` for each of them.
Each compares the gradients of all parameters with those of the whole batch on the plain model.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attncc
from tests.training.model import Block, data

RANKS = 2


def split(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main(rank: int, file: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    attn = attncc.load("specs/window_alibi_sinks.attn")
    x, target = data()
    plain = Block(attn)
    (plain(x) - target).square().mean().backward()
    mine = slice(rank * len(x) // RANKS, (rank + 1) * len(x) // RANKS)
    for kind in ("ddp", "fsdp2"):
        model = split(kind, Block(attn))
        (model(x[mine]) - target[mine]).square().mean().backward()
        for (name, p), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            error = (whole(p.grad) - want.grad).abs().max()
            assert error < 1e-6, f"{kind}: the gradient of {name} is off by {error}"
    dist.barrier()  # who is done first takes its end of the connections with it
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
