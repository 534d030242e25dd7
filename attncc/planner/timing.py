"""The time of a call whose tiles are counted: what its kernels take in the steady state, what starting a program costs,
and how evenly programs fall on the GPU.

A program of n keys takes (n + START) times what a key takes: on one H200 the times of D 128 at S 1024, 4096 and 16384
lie on such a line within 2%, for each kind of kernel. Which rate it has then is planner/efficiency.py's.
"""

from __future__ import annotations

import math

from attncc.ir import AttentionSpec, Expr, KernelPlan, Op, names, walk
from attncc.planner.efficiency import UNMEASURED_AT, backward_efficiency, efficiency, lengths, resident_blocks
from attncc.planner.traffic import Kernel, Sizes
from attncc.targets import Target

START = {"fa2": 320, "fa3": 216, "backward": 122}  # keys
LAUNCH_MS = 0.003  # between kernels of one stream
LONE = 0.7  # of an SM's rate, with one block of two
STATE_BYTES_CLOCK = 16  # that an SM with a program of fa1 reads and writes of rows, between products: measured
CACHE_BYTES_CLOCK = 32  # that one SM gets of the L2 in a clock, half of what its port takes
SPECIAL = {"exp": 1, "exp2": 1, "log": 1, "log2": 1, "tanh": 2, "sigmoid": 2, "sqrt": 1, "/": 1}  # of the special unit
OWN = {"sigmoid": 1, "relu": -1, "none": -1}  # beyond one exponential for each pair, by softmax policy
HIDDEN = 0.5  # of the special functions of a score, under the products of another tile, in warp-specialised kernels


def special_functions(spec: AttentionSpec) -> int:
    """Special functions for each pair beside the exponential: those of scores that s or both positions go into. What
    all pairs are divided by is inverted once."""
    every = (*spec.scores, *((spec.weight,) if spec.weight is not None else ()))
    found = {
        node
        for e in every
        for node in walk(e)
        if isinstance(node, Op) and node.op in SPECIAL and _of_pair(node.args[-1])
    }
    return sum(SPECIAL[node.op] for node in found) + OWN.get(spec.softmax.policy, 0)


def _of_pair(e: Expr) -> bool:
    read = names(e)
    return "s" in read or ("k" in read and bool(read & {"q", "row"}))


def programs(plan: KernelPlan, sizes: Sizes) -> int:
    """Of a forward kernel: one for each tile of rows, in fa1 for each head."""
    return int(sizes.batch * sizes.heads * (1 if plan.algorithm == "fa1" else -(-sizes.q_len // sizes.tile_q)))


def forward_ms(
    times: dict[str, float], kernel: Kernel, sizes: Sizes, plan: KernelPlan, target: Target, spread: str, special: int
) -> float:  # fmt: skip
    """Milliseconds of a forward kernel; `times` are those of its kinds of work were each alone (io.kernel_times)."""
    many = programs(plan, sizes)
    work = max(times["tensor"], times["exp"])
    if spread == "scattered":  # measured over visited pairs, starts and all
        work /= efficiency(plan, target, spread)
    else:
        started = START.get(plan.algorithm, START["fa2"]) * many / max(1.0, float(sizes.tiles * sizes.tile_k))
        work *= (1 + started) / steady(plan, target)
    hidden = HIDDEN if plan.algorithm == "fa3" else 1.0
    work += hidden * special * float(sizes.pairs) / (target.exp_gps * 1e6)
    cached = float(kernel.streamed) / (target.units * target.clock_ghz * CACHE_BYTES_CLOCK * 1e6)
    blocks = resident_blocks(plan, target)
    if plan.algorithm == "fa1":  # one program a head, all alike, which waits for what it reads and writes
        work += cached * CACHE_BYTES_CLOCK / STATE_BYTES_CLOCK
        cached, spread = 0.0, "all"
    work = max(0.0, work) * unevenness(many / target.units, blocks, spread)
    return LAUNCH_MS + max(times["memory"], cached, work)


def backward_ms(
    times: dict[str, float], kernel: Kernel, sizes: Sizes, plan: KernelPlan, target: Target, spread: str,
    special: int = 0,
) -> float:  # fmt: skip
    """The same of a backward kernel."""
    rows = -(-sizes.q_len // sizes.tile_q) * sizes.heads
    keys = -(-sizes.k_len // sizes.tile_k) * sizes.kv_heads
    by_keys = kernel.name in ("dkdv", "dv", "dqkv")
    programs = float(sizes.batch * (keys if by_keys else rows))
    walked = float(sizes.tiles * (sizes.tile_q if by_keys else sizes.tile_k))
    started = 1 + START["backward"] * programs / max(1.0, walked)
    rate = backward_efficiency(plan, target) * (1 + START["backward"] / UNMEASURED_AT)
    blocks = max(1, round(float(sizes.side) / target.units))
    work = times["tensor"] / rate * started + special * float(kernel.exponentials) / (target.exp_gps * 1e6)
    work = max(0.0, work) * unevenness(programs / target.units, blocks, spread)
    return LAUNCH_MS + max(times["memory"], work if kernel.streams else 0.0)


def steady(plan: KernelPlan, target: Target) -> float:
    """Part of the reachable rate between a program's start and its end: of what was measured, without the starts."""
    start = START.get(plan.algorithm, START["fa2"])
    measured_at = lengths(plan, target)
    return efficiency(plan, target) / (sum(n / (n + start) for n in measured_at) / len(measured_at))


def unevenness(share: float, blocks: int, spread: str) -> float:
    """How many times its even share the busiest SM takes, with `share` programs for each SM, of which `blocks` run at
    once. Under a mask that grows along the rows the longest programs come first, and are twice the mean."""
    if spread == "dense":
        longest = 2.0 if blocks == 1 else 2.0 / LONE
        return max(1.0, longest / share)
    rounds = math.ceil(share)
    alone = rounds % blocks if blocks > 1 else 0
    return (rounds - alone + alone / LONE) / share if rounds < 8 else 1.0
