"""Tiles of the PyTorch program, by pass and by the wider head.

As large as keeps what a pass holds of a head below 16 bytes for each of 65536 rows, lse included: large tiles outweigh
Python and the start of parallel loops. Of as many pairs tall ones are the faster: keys are read, or copied, once for
more rows. The backward pass holds about twice as many tensors of a tile; dropout adds random words, and sparse weights
their rounds.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.analysis.normaliser import normaliser
from attncc.ir import AttentionSpec, KernelPlan

FORWARD = {64: (256, 128), 128: (128, 128), 256: (64, 128), 512: (32, 64)}
BACKWARD = {64: (128, 128), 128: (64, 128), 256: (64, 64), 512: (32, 64)}


def tiles(table: dict[int, tuple[int, int]], spec: AttentionSpec, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """tile_q and tile_k of the first head size that is wide enough, or of the last; half where a pair takes more."""
    wide = [most for most in table if max(head_dim, head_dim_v) <= most]
    tile_q, tile_k = table[wide[0] if wide else max(table)]
    if spec.dropout is None and normaliser(spec).alpha is None:
        return tile_q, tile_k
    return (tile_q, tile_k // 2) if tile_k > tile_q else (tile_q // 2, tile_k)


def backward_of(chosen: KernelPlan, spec: AttentionSpec) -> KernelPlan:
    """The backward pass of a forward plan for the CPU; tiles that the spec's schedule pins are those of both."""
    pins = spec.schedule(chosen.target)
    tile_q, tile_k = tiles(BACKWARD, spec, chosen.head_dim, chosen.head_dim_v)
    return replace(
        chosen, direction="backward", tile_q=pins.tile_q or min(chosen.tile_q, tile_q), tile_k=pins.tile_k or tile_k
    )
