"""Plans of the backward pass: one for every target and size, by the same legality as forward plans."""

from dataclasses import replace

import pytest

from attncc.errors import PlanError
from attncc.frontend import parse
from attncc.ir import Shape
from attncc.planner import choose_backward, violations
from attncc.planner.backward_memory import fa2_backward
from attncc.targets import TARGETS, target

CAUSAL = parse("attention causal { mask k <= q }").spec
BIAS = parse("attention bias(t: f32[b, h, row, k] grad) { score s + t[b, h, row, k] }").spec
GPUS = [name for name in TARGETS if target(name).is_gpu]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("sizes", [(16, 16), (31, 80), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_each_size_has_a_plan_that_fits(name, dtype, sizes):
    if dtype == "bf16" and name == "sm_75":
        pytest.skip("has no bf16")
    shape = Shape(head_dim=sizes[0], head_dim_v=sizes[1], dtype=dtype)
    plan = choose_backward(CAUSAL, shape, target(name))
    assert plan.direction == "backward" and violations(plan, target(name)) == ()
    assert 0 < plan.shared_bytes <= target(name).shared_bytes
    plan = choose_backward(CAUSAL, shape, target(name), algorithm="fa2")
    assert 0 < plan.shared_bytes == fa2_backward(plan, target(name)) <= target(name).shared_bytes


@pytest.mark.parametrize("name", [n for n in GPUS if target(n).caps.has_bf16])
def test_the_widest_heads_have_a_plan(name):
    plan = choose_backward(CAUSAL, Shape(head_dim=512, head_dim_v=512), target(name))
    assert violations(plan, target(name)) == ()


def test_wide_heads_have_dv_by_itself():
    sizes = (Shape(head_dim=d, head_dim_v=d) for d in (128, 256))
    narrow, wide = (choose_backward(CAUSAL, size, target("sm_90"), algorithm="fa2") for size in sizes)
    assert narrow.dv is None and set(narrow.passes) == {"dq", "dkdv"}
    assert wide.dv is not None and set(wide.passes) == {"dq", "dkdv", "dv"}


def test_a_plan_depends_on_head_sizes_and_dtype_alone():
    short, long = (Shape(q_len=n, k_len=n, batch=n % 7 + 1) for n in (33, 70000))
    assert choose_backward(CAUSAL, short, target("sm_90")) == choose_backward(CAUSAL, long, target("sm_90"))


def test_a_bias_for_each_pair_takes_smaller_tiles():
    plain, biased = (choose_backward(s, Shape(), target("sm_90"), algorithm="fa2") for s in (CAUSAL, BIAS))
    assert biased.tile_q * biased.tile_k < plain.tile_q * plain.tile_k
    assert fa2_backward(biased, target("sm_90")) > fa2_backward(replace(biased, levels=()), target("sm_90"))


def test_what_does_not_fit_is_said():
    with pytest.raises(PlanError, match="backward pass of causal fits sm_90"):
        choose_backward(CAUSAL, Shape(head_dim=600, head_dim_v=600), target("sm_90"))
    plan = choose_backward(CAUSAL, Shape(), target("sm_90"))
    (fault,) = violations(replace(plan, direction="sideways"), target("sm_90"))
    assert fault.limit == "direction"
