"""Dropout: the seed of a call, the probability that it asks for, and the float64 reference of what is kept.

Whether the weight of a pair is kept depends on (seed, b, h, row, k) alone: Philox-4x32-7 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3", whose fewest rounds that pass BigCrush are 7) with the seed as key and
(k // 64 * 8 + k // 2 % 4 * 2 + k // 32 % 2, row, h, b) as counter gives four words: the one number k // 8 % 4 has 16
bits for each of two neighbours, the even one's lowest. It is kept where their lower 15 are at least p * 32768, rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attncc import analysis
from attncc.ir import MOST_DROPPED, AttentionSpec, Const, Var, names
from attncc.runtime.arguments import kind_of, scalar

WORD = 2**32 - 1
SEEDS = 2**63
ROUNDS = 7


def seed_of(given: Mapping[str, Any]) -> int:
    """The seed that a call gives; left out, the next one from torch's generator. TypeError, ValueError."""
    seed = given.get("seed")
    if seed is None:
        return int(torch.randint(SEEDS - 1, (), dtype=torch.int64, device="cpu"))
    if isinstance(seed, Tensor):
        if seed.dim() or seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool:
            raise TypeError(f"seed must be an int, or a 0-d tensor of one, and is {list(seed.shape)} of {seed.dtype}")
        seed = seed.item()
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an int, and is {kind_of(seed)}")
    if not -SEEDS <= int(seed) < SEEDS:
        raise ValueError(f"seed must be a 64-bit int, and is {seed}")
    return int(seed)


def check_probability(spec: AttentionSpec, q: Tensor, k: Tensor, given: Mapping[str, Any]) -> None:
    """ValueError where the probability that the scalars and lengths of a call lead to is not in [0, MOST_DROPPED)."""
    assert spec.dropout is not None
    if isinstance(spec.dropout, Const):  # checked where the text is read
        return
    wanted = names(spec.dropout)
    values: dict[str, Any] = {"h_len": q.shape[1]}
    if spec.ragged:
        values["b_len"] = given["cu_seqlens_q"].shape[0] - 1
        if lengths := sorted(wanted & {"q_len", "k_len"}):
            raise ValueError(f"the probability of dropout reads {lengths[0]}, and packed sequences have one each")
    else:
        values |= {"b_len": q.shape[0], "q_len": q.shape[2], "k_len": k.shape[2]}
    for p in spec.scalars:
        if p.name in wanted:
            values[p.name] = scalar(p, given.get(p.name, p.default), False)
    e = spec.dropout  # a name alone is worth half of a call's time on the host
    found = values[e.name] if isinstance(e, Var) else float(analysis.evaluate(e, analysis.Env(values)))
    if not 0.0 <= found < MOST_DROPPED:
        raise ValueError(f"the probability of dropout must lie in [0, {MOST_DROPPED}), and is {found}")


def survivors(seed: int, p: float, b: Tensor, h: Tensor, row: Tensor, k: Tensor) -> Tensor:
    """Which weights are kept, a bool for each pair: pair by pair, by the definition."""
    counter = k // 64 * 8 + k // 2 % 4 * 2 + k // 32 % 2
    words = torch.stack(torch.broadcast_tensors(*philox(seed, counter, row, h, b)), -1)
    word = words.gather(-1, (k // 8 % 4).expand(words.shape[:-1])[..., None])[..., 0]
    return (word >> (k % 2 * 16)) % 32768 >= int(torch.tensor(p, dtype=torch.float32, device="cpu") * 32768.0 + 0.5)


def philox(
    seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds of Philox-4x32 on unsigned 32-bit numbers in int64 tensors; products wrap, and keep their bits."""
    for i in range(rounds):
        key_a = ((seed & WORD) + i * 0x9E3779B9) & WORD
        key_b = ((seed >> 32 & WORD) + i * 0xBB67AE85) & WORD
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & WORD) ^ c1 ^ key_a, b & WORD, ((a >> 32) & WORD) ^ c3 ^ key_b, a & WORD
    return c0, c1, c2, c3
