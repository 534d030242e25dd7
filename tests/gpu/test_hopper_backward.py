"""Gradients of warp-specialised kernels on a GPU against float64: random specs of many shapes, and the library's.

python -m pytest -q -n 14 --dist worksteal tests/gpu/test_hopper_backward.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from attncc import frontend
from attncc.frontend import parse
from attncc.ir import AttentionSpec, KernelPlan, Schedule, Shape
from attncc.planner import hopper_backward
from attncc.planner.tuned import legal
from attncc.runtime import check_gradients as rules
from attncc.runtime.attention import Attention
from attncc.runtime.draw import Draw
from attncc.runtime.gradients import gradients
from attncc.runtime.poison import poisoned
from attncc.runtime.ready import Ready
from attncc.runtime.reference import reference
from attncc.targets import target
from tests.cases.random_calls import random_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="there is no Hopper here"
    ),
]
SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
SHAPES = (
    (2, 4, 2, 300, 300, 128, 128), (1, 6, 2, 129, 517, 64, 64), (2, 2, 2, 512, 512, 128, 128),
    (1, 4, 1, 700, 700, 64, 64), (1, 3, 3, 333, 200, 96, 96), (1, 2, 1, 200, 450, 192, 128),
    (1, 2, 2, 260, 260, 256, 256), (2, 4, 4, 700, 700, 128, 128), (1, 2, 1, 65, 1, 128, 64),
    (3, 2, 2, 66, 700, 128, 128),
)  # fmt: skip
MORE = (
    "attention a(t: f32[h] grad) { mask k <= q softmax sink(t[h]) }",
    "attention a(t: f32[h, row] grad, w: int = 40) {"
    " mask 0 <= q - k < w score s - 0.1 * (q - k) softmax sink(t[h, row]) }",
    "attention a { mask k <= q score 20 * tanh(s / 20) softmax off_by_one }",
    "attention a(x: float = 0.3) { mask k <= q scale x }",
)  # fmt: skip
SHARES = 50  # of the specs, so that several processes compile them
FORMS = ("added", "turns", "apart")  # in which dQ is summed; the last is what `deterministic` asks for


def fits(spec: AttentionSpec, shape: Shape) -> bool:
    return not hopper_backward.unfit(spec, shape, target("sm_90"))


@cache
def drawn(count: int = 200, seed: int = 11) -> tuple[tuple[str, Shape, int], ...]:
    """Random specs of which these kernels can be made, each with a shape and a seed."""
    random, found = Random(seed), list[tuple[str, Shape, int]]()
    while len(found) < count:
        text, own = random_spec(random), random.randrange(2**31)
        shape = replace(Shape(*SHAPES[len(found) % len(SHAPES)]), dtype=Random(own).choice(("bf16", "bf16", "f16")))
        if "score 0.3" in text or "mask false" in text:
            continue  # the reference differentiates nothing that depends on nothing
        if fits(parse(text).spec.bind({}), shape):
            found.append((text, shape, own))
    return tuple(found)


def made(spec: AttentionSpec, form: str, call: tuple[Any, ...], params: dict[str, Any]) -> tuple[Attention, Ready]:
    """An attention whose dQ is summed in a form, and what a call leads to; turns are taken wherever there are two
    heads. Wide heads know one form, whatever is asked."""
    attention, planned = Attention(frontend.parse(frontend.canonical(spec)), {}, None), hopper_backward.plan
    ready = attention.ready(*call, params)

    def plan(base: KernelPlan, deterministic: bool) -> KernelPlan:
        found = planned(base, deterministic)
        return found if found.sums == "apart" else legal(replace(found, sums=form), target("sm_90"))

    with patch.object(hopper_backward, "plan", plan):
        launch = ready.kind.backward(attention._values(ready, params)[1], form == "apart")
    if form == "turns":
        launch.__globals__["in_turns"] = lambda heads, *_: (1, 1, 2) if heads > 1 else (1, 1, 1)
    return attention, ready


def faults(text: str, shape: Shape, seed: int, forms: tuple[str, ...] = FORMS) -> list[str]:
    """What is wrong with the gradients of one call in these forms. Its output is the reference's."""
    spec = replace(parse(text).spec.bind({}), schedules=(Schedule(algorithm="fa3"),))
    draw = Draw(spec, seed % 1000, {})
    q, k, v = draw.inputs(shape, shape.dtype, "contiguous", "cuda")
    params = draw.params(shape, "cuda")
    out, lse = reference(spec, q, k, v, params)
    out, lse = out.to(q.dtype), lse.float()
    g = torch.Generator().manual_seed(seed % 1000)
    d_out, d_lse = (torch.randn(x.shape, generator=g).to(x) for x in (out, lse))
    want = gradients(spec, q, k, v, params, d_out, d_lse)
    unfused = gradients(spec, q, k, v, params, d_out, d_lse, q.dtype)
    wrong = []
    for form in forms:
        attention, ready = made(spec, form, (q, k, v), params)
        whole = (q, k, v, out, lse, d_out, d_lse), params, form == "apart"
        with poisoned():
            *first, more = attention.gradients(ready, *whole)
            *again, _ = attention.gradients(ready, *whole)
        for n, x in {**dict(zip("qkv", first, strict=True)), **more}.items():
            error, summed = rules.difference(x, want.values[n]), want.summed.get(n, 0.0)
            if not error <= (bound := rules.allowed(x, want.values[n], unfused.values[n], summed, q)):
                wrong.append(f"{form}: d_{n} is off by {error:.2e}, {bound:.2e} are allowed")
        equal = [torch.equal(a, b) for a, b in zip(first, again, strict=True)]
        if not all(equal if form == "apart" else equal[1:]):
            wrong.append(f"{form}: equal calls give other bits: {equal}")
    return wrong


@pytest.mark.parametrize("share", range(SHARES))
def test_two_hundred_random_specs(share):
    """Each as dQ is added up at once, half of them in turns too, and a quarter apart."""
    for i, (text, shape, seed) in islice(enumerate(drawn()), share, None, SHARES):
        forms = ("added", *(("turns",), ("apart",), ("turns",), ())[i // SHARES % 4])
        other = SHAPES[(i + 3) % len(SHAPES)]
        for sizes in (shape, replace(shape, q_len=other[3], k_len=other[4])):
            assert not (found := faults(text, sizes, seed, forms)), (text, sizes, i, found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", [*(p.read_text(encoding="utf-8") for p in SPECS), *MORE])
def test_every_spec_of_the_library(text, form):
    spec = parse(text).spec.bind({})
    for sizes in (SHAPES[0], SHAPES[4], SHAPES[6]):
        if fits(spec, Shape(*sizes, "bf16")):
            assert not (found := faults(text, Shape(*sizes, "bf16"), 3, (form,))), found


@pytest.mark.parametrize("form", ["added", "turns"])
def test_sums_of_many_heads(form):
    """More heads than sums of dQ are there for at a time in turns: theirs begin where earlier ones' were converted."""
    for heads, kv_heads, length, d in ((96, 96, 1000, 128), (64, 16, 1100, 64), (80, 40, 2048, 128)):
        spec = replace(parse("attention a { mask k <= q }").spec, schedules=(Schedule(algorithm="fa3"),))
        g = torch.Generator("cuda").manual_seed(1)
        q, k, v, d_out = (
            torch.randn(2, h, length, d, generator=g, device="cuda", dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        attention, ready = made(spec, form, (q, k, v), {})
        out, lse = attention.both(q, k, v, {})
        call = (q, k, v, out, lse, d_out, None)
        with poisoned():
            summed, *others, _ = attention.gradients(ready, call, {}, False)
            apart, *same, _ = attention.gradients(ready, call, {}, True)
        if d == 128:  # narrower ones begin their products from zero where dQ is made apart
            assert all(map(torch.equal, others, same))
        for found, other in zip((summed, *others), (apart, *same), strict=True):
            for x, want in zip(found.flatten(0, 1), other.flatten(0, 1), strict=True):
                assert (x.float() - want.float()).norm() <= 5e-3 * want.float().norm()
