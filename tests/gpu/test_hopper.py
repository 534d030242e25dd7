"""Warp-specialised kernels on a GPU against float64: random specs, and rows that leave the safe range in every spec.

python -m pytest -q -n 14 --dist worksteal tests/gpu/test_hopper.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

from attncc.frontend import parse
from attncc.ir import Schedule, Shape
from attncc.planner import hopper
from attncc.runtime import check
from attncc.runtime.draw import Draw
from attncc.runtime.reference import reference
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
    (1, 2, 2, 260, 260, 256, 256), (2, 4, 4, 1000, 1000, 128, 128), (1, 2, 1, 65, 1, 128, 64),
    (3, 2, 2, 66, 700, 128, 128),
)  # fmt: skip
SHARES = 50  # of the specs, so that several processes compile them


def pinned(text: str):
    spec = parse(text).spec.bind({})
    return replace(spec, schedules=(Schedule(algorithm="fa3"),)) if hopper.unfit(spec) is None else spec


def sizes(i: int) -> tuple[Shape, Shape]:
    """Of the calls of a spec: of one kernel, and other lengths in the second."""
    shape, other = (Shape(*SHAPES[n % len(SHAPES)]) for n in (i, i + 3))
    return shape, replace(shape, q_len=other.q_len, k_len=other.k_len)


@pytest.mark.parametrize("share", range(SHARES))
def test_two_hundred_random_specs(share):
    random = Random(7)
    drawn = [(random_spec(random), random.randrange(2**31)) for _ in range(200)]
    for i, (text, seed) in islice(enumerate(drawn), share, None, SHARES):
        spec, dtype = pinned(text), Random(seed).choice(("bf16", "bf16", "f16"))
        run = check.compiled(spec, "cuda")
        for shape, layout in zip(sizes(i), ("contiguous", "transposed"), strict=True):
            row = check.call(spec, run, "cuda", shape, dtype, layout, seed % 1000, {})
            assert not row.faults, (text, i, shape, dtype, row)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_rows_that_grow_late_are_as_exact(path: Path):
    """Some keys outweigh all before them by more than the reference of a row's first tiles allows for."""
    spec = pinned(path.read_text(encoding="utf-8"))
    if hopper.unfit(spec) is not None:
        pytest.skip("no warp-specialised kernel is made of it")
    draw, shape = Draw(spec, 3, {}), Shape(1, 2, 1, 600, 600, 128, 128)
    q, k, v = draw.inputs(shape, "bf16", "contiguous", "cuda")
    params = draw.params(shape, "cuda")
    k[:, :, 400:420] *= 60
    k[:, :, 7] *= -60
    out, lse = check.compiled(spec, "cuda")(q, k, v, **params)
    want, want_lse = reference(spec, q, k, v, params)
    assert check.out_error(out, want) <= check.out_bound(spec, q, k, v, params, want, "bf16")
    found, bound = check.lse_error(lse, want_lse, "bf16")
    assert found <= bound
