"""Shared memory of the backward pass's kernels, in bytes a block: no less than Triton 3.6 to 3.9 allocate.

Each kernel keeps two tiles of its outer side, rows for dQ and keys for dK and dV, and streams two of the inner one;
that of dV alone keeps one. A step makes the scores with the first of these and dp with the second, takes what scores
and masks read, and multiplies by p and by ds: what lies in shared memory together is followed through these moments.
They were read off Triton's own allocation; tests/compile/test_backward.py compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncc.ir import KernelPlan, PassPlan, pieces
from attncc.planner.shared_memory import (
    ALIGNMENT,
    BARRIERS,
    ELEMENT_BYTES,
    FLAG,
    MMA_ROWS,
    SWIZZLED,
    TESTED,
    WORD,
    ahead_bytes,
    alignment,
    passed_pair,
    split,
)
from attncc.planner.units import matrix_unit
from attncc.targets import Target

STATISTICS = 8  # bytes of a row: its lse and delta
GROUPS = ("wgmma", "tcgen05")  # products of warp groups read what they multiply where it lies


@dataclass(frozen=True)
class _Step:
    """A step of one kernel, in bytes. `first` makes the scores and `second` dp: keys and values, or queries and d_out,
    of which these are the pieces that do not run ahead."""

    base: int  # what is there all the time: what the program keeps, and what runs ahead
    first: tuple[int, ...]
    second: tuple[int, ...]
    replaced: tuple[int, int]  # keys that ran ahead and go back, some of them replaced; such values
    passed: int  # what is read on its way to the layout of the scores, or ds on its way out of it
    weights: int  # p, or ds; 0 where they stay in registers


def fa2_backward(plan: KernelPlan, target: Target) -> int:
    """Of the kernel that takes most; 0 on a CPU."""
    return max(fa2_pass(plan, which, target) for which in plan.passes)


def fa2_pass(plan: KernelPlan, which: str, target: Target) -> int:
    """Of one kernel, by its name among `plan.passes`; with that of dQ, of those that have its tiles too."""
    if not target.is_gpu:
        return 0
    own, unit = plan.passes[which], pass_unit(plan, which, target)
    steps = [_step(plan, which, own, target)]
    if which == "dq" and "table" in plan.grads:  # in its step is a loop over entries, so that nothing runs ahead of it,
        # unless there is a loop of its own for tiles that hit one entry
        alike = [replace(steps[0], passed=_summed(own, unit))] if "alike" in plan.grads else []
        steps = [*alike, _step(plan, which, replace(own, stages=1), target)]
    found = [n for step in steps for n in _moments(step, which, unit)]
    if unit == "mfma":  # what is kept goes through shared memory to its registers, before the loop
        found += _kept(plan, which, own)
    if which == "dq" and "shared" in plan.grads:
        found.append(_cells(plan, own, unit))
    return max(found)


def _moments(step: _Step, which: str, unit: str) -> Iterator[int]:
    """What lies there together, as the step goes."""
    turned = 2 if unit == "mma" else 1  # what is multiplied both ways round passes to another layout for one of them
    held = which != "dq"  # the second is multiplied by p, too
    there = step.base
    if unit == "mfma":  # which has in registers all that it multiplies, piece by piece
        yield there + max((*step.first, *step.second), default=0)
        yield there + step.passed
        yield there + step.weights + max((*step.first[:-1], *step.second[:-1]), default=0)
        return
    for piece in step.first:
        yield there + turned * piece
        there += piece
    there += step.replaced[0]
    if which == "dv":
        there -= sum(step.first)
    scores = there
    yield there + step.replaced[1]
    for piece in step.second:
        yield there + (turned if held else 1) * piece
        there += piece if held or unit != "mma" else 0
    there = there if held else scores
    yield there + step.passed
    yield there + step.weights * (2 if unit == "fma" and which == "dkdv" else 1)


def _step(plan: KernelPlan, which: str, own: PassPlan, target: Target) -> _Step:
    unit, size = pass_unit(plan, which, target), ELEMENT_BYTES[plan.dtype]
    outer, inner = sides(own, which)
    column, pairs, ahead = inner * size, outer * inner, own.stages - 1
    alone = replace(plan, tile_q=outer, tile_k=inner, stages=own.stages, warps=own.warps, loads=own.loads)
    # where scores stand keys by rows, what lies side by side from key to key runs down
    alone = replace(alone, reads_down=plan.reads_down and which == "dq", reads_along=plan.reads_along and which != "dq")
    (first, first_late), (second, second_late) = (split(alone, n, target) for n in (plan.head_dim, plan.head_dim_v))
    streamed = column * (sum(first) + sum(second)) * (own.stages if unit in GROUPS else ahead)
    beside = ahead * inner * STATISTICS if which != "dq" else 0
    if unit == "wgmma":  # before tiles that are aligned, or behind them
        barriers = BARRIERS if own.loads == "descriptor" else 0
        beside = -(-(beside + barriers) // alignment(plan)) * alignment(plan) + barriers if ahead else barriers
    elif unit == "tcgen05":  # before a tile that is aligned; of wide ones there is always one that they come behind
        narrow = [size * n for n in pieces(plan.head_dim) + pieces(plan.head_dim_v) if size * n < SWIZZLED]
        beside += ALIGNMENT * max(narrow) // SWIZZLED if narrow else BARRIERS
    reads = plan.key_bytes * (2 if plan.key_mask else 1)  # for the scores, and turned round for the keys themselves
    beside += ahead * inner * (reads if which == "dq" else plan.row_bytes)
    kept = sum(_kept(plan, which, own)) if unit != "mfma" else 0
    passed = int(pairs * passed_pair(alone, target))
    if which == "dq":
        passed = max(passed, pairs * (WORD if "own" in plan.grads else FLAG if "table" in plan.grads else 0))
    weights = pairs * size if _weights_pass(plan, which, own, unit) else 0
    if unit == "tcgen05" and ("row" if which == "dq" else "key") in plan.grads:
        # sums of a line take p and ds in another layout than the products do, some registers at a time
        weights = min(pairs * size, TESTED * own.warps * target.warp_size)
    replaced = which == "dq" and plan.key_mask and unit == "mma" and first
    return _Step(
        base=kept + streamed + beside + pairs * ahead_bytes(alone),
        first=tuple(column * n for n in first_late),
        second=tuple(column * n for n in second_late),
        replaced=(column * sum(first), column * sum(second)) if replaced else (0, 0),
        passed=passed,
        weights=weights,
    )


def _kept(plan: KernelPlan, which: str, own: PassPlan) -> tuple[int, ...]:
    """Bytes of the pieces that a program keeps."""
    sizes = (*pieces(plan.head_dim), *(pieces(plan.head_dim_v) if which != "dv" else ()))
    return tuple(sides(own, which)[0] * n * ELEMENT_BYTES[plan.dtype] for n in sizes)


def _weights_pass(plan: KernelPlan, which: str, own: PassPlan, unit: str) -> bool:
    """Whether p or ds goes through shared memory to its product: of mma where warps share out the columns of one of
    the two products and not of the other, as they do where the output is wider than the tile."""
    if unit != "mma":
        return unit in ("fma", "mfma")
    columns = pieces(plan.head_dim_v if which == "dv" else plan.head_dim)[-1]
    outer = sides(own, which)[0]
    return outer < columns and outer < MMA_ROWS * own.warps


def _summed(own: PassPlan, unit: str) -> int:
    """What ds passes through to be summed up as a whole: all of it where several warps hold the same, else a word of
    each."""
    rows = (2 * MMA_ROWS if unit == "mfma" and min(own.tile_q, own.tile_k) >= 2 * MMA_ROWS else MMA_ROWS) * own.warps
    return WORD * (own.tile_q * own.tile_k if own.tile_q < rows and unit != "tcgen05" else own.warps)


def _cells(plan: KernelPlan, own: PassPlan, unit: str) -> int:
    """Of the kernel of cells that batch entries or heads share: both sides stream by, by pointers; without a pipeline
    only the pieces of one product are there together."""
    size, rows = ELEMENT_BYTES[plan.dtype], own.tile_q + own.tile_k
    columns = (*pieces(plan.head_dim), *pieces(plan.head_dim_v))
    passed = WORD * own.tile_q * own.tile_k
    if unit == "mfma":
        return max(max(own.tile_q, own.tile_k) * max(columns) * size, passed)
    if own.stages == 1:
        return max(rows * max(columns) * size, passed) + BARRIERS
    return rows * sum(columns) * size * (own.stages if unit in GROUPS else own.stages - 1)


def sides(own: PassPlan, which: str) -> tuple[int, int]:
    """The tile that a program keeps, and the one that streams by."""
    return (own.tile_q, own.tile_k) if which == "dq" else (own.tile_k, own.tile_q)


def pass_unit(plan: KernelPlan, which: str, target: Target) -> str:
    """What multiplies in one kernel."""
    own = plan.passes[which]
    return matrix_unit(replace(plan, tile_q=sides(own, which)[0], warps=own.warps), target)
