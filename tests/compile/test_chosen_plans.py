"""Every plan that the planner chooses compiles, without spills, in the shared memory that was predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import triton

from attncc.frontend import parse
from attncc.ir import Shape
from attncc.planner import choose
from attncc.runtime.compile import Resources
from attncc.targets import target

PINNED = "3.7.1"  # the version whose predictions are held to 10%; for others they only must not be too low
UNIT = {"sm_80": "mma", "sm_86": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma",
        "gfx942": "mfma", "gfx950": "mfma"}  # fmt: skip
FEW = [
    ("sm_80", 128, 128, "bf16"), ("sm_90", 128, 128, "bf16"), ("sm_100", 128, 128, "bf16"),
    ("gfx942", 128, 128, "bf16"), ("sm_90", 192, 128, "f16"), ("sm_90", 31, 31, "f16"), ("sm_80", 64, 64, "f32"),
    ("gfx942", 96, 96, "f16"),
]  # fmt: skip
SIZES = [(64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (64, 16), (96, 96), (31, 31), (80, 80)]
MANY = [
    (name, d, dv, dtype) for name in UNIT for d, dv in SIZES for dtype in ("f16", "f32")
    if (name, d, dv, dtype) not in FEW
]  # fmt: skip


def check(compiled: Callable[..., Resources], name: str, d: int, dv: int, dtype: str, rows: int = 4096) -> None:
    spec = parse("attention causal { mask k <= q }").spec
    plan = choose(spec, Shape(q_len=rows, head_dim=d, head_dim_v=dv, dtype=dtype), target(name)).plan
    found = compiled("causal", plan)
    assert found.shared_bytes <= found.predicted_shared_bytes == plan.shared_bytes
    if triton.__version__ == PINNED:
        assert found.predicted_shared_bytes <= 1.10 * found.shared_bytes
        assert found.spills == 0
    if dtype != "f32" and plan.tile_q >= 64:
        assert UNIT[name] in found.instructions


@pytest.mark.parametrize(("name", "d", "dv", "dtype"), FEW)
def test_a_chosen_plan_takes_what_was_predicted(compiled, name, d, dv, dtype):
    check(compiled, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "d", "dv", "dtype"), MANY)
def test_every_chosen_plan_takes_what_was_predicted(compiled, name, d, dv, dtype):
    check(compiled, name, d, dv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_short_queries_have_plans_that_fit(compiled, name, rows):
    check(compiled, name, 128, 128, "bf16", rows)


def test_the_general_kernel_takes_no_more_than_the_aligned_one(compiled):
    plan = choose(
        parse("attention causal { mask k <= q }").spec, Shape(head_dim=64, head_dim_v=64), target("sm_90")
    ).plan
    aligned, general = compiled("causal", plan), compiled("causal", plan, False)
    assert general.shared_bytes <= aligned.shared_bytes
    assert "async_copy" in aligned.instructions
