from dataclasses import replace
from pathlib import Path

import pytest

from attncc.frontend import parse
from attncc.ir import Shape
from attncc.planner import choose, costs
from attncc.planner.io import all_tiles
from attncc.planner.operands import Operands, has_key_mask, operands
from attncc.targets import target

SPECS = Path(__file__).resolve().parents[2] / "specs"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("attention a { mask k <= q }", Operands()),
        (
            "attention a(b_: f32[b, h, row, k]) { score s + b_[b, h, row, k] }",
            Operands(pair=4, levels=(4,), widths=(4,)),
        ),
        ("attention a(b_: bf16[row, k]) { score s + b_[row, k] + b_[row, k] * s }", Operands(pair=2, narrow=2)),
        ("attention a(b_: bf16[row, k]) { score s + b_[row, k] + b_[q, k] }", Operands(pair=4, narrow=2)),
        ("attention a(m: bit[row, n]) { mask m[row, k] }", Operands(bits=1, levels=(4,), widths=(4,), flags=4)),
        (
            "attention a(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] }",
            Operands(key=4, row=4, levels=(0,), widths=(0,), keys=4),
        ),
        (
            "attention a(t: f32[row, k], u: i32[row, k]) { mask u[row, k] > 0 score where(s < t[row, k], s, 0) }",
            Operands(pair=8, levels=(8,), widths=(4,), flags=4),
        ),
        ("attention a(len: i32[b], lo: i32[b, row]) { mask lo[b, row] <= k < len[b] }", Operands(row=4)),
        (
            "attention a(i: i32[d], t: f32[n, h]) { score s + t[i[q - k], h] }",
            Operands(chain=8, levels=(4, 4), widths=(4, 4)),
        ),
        ("attention a(m: bool[row, k]) { mask m[row, k] }", Operands(gather=1, narrow=1)),
        ("attention a(m: bool[h, n]) { mask m[h, q - k] }", Operands(gather=1, narrow=1, down=True)),
        ("attention a(m: i8[row, k]) { score s + m[row, k] }", Operands(gather=4, narrow=1)),
        ("attention a(m: i8[b, k], n: f16[k]) { score s + m[b, k] * n[k] }", Operands(key=3, narrow_keys=2)),
        ("attention a(g: f32[h, row, k]) { weight g[h, row, k] }", Operands(pair=4, levels=(4,), widths=(4,))),
        (
            "attention a(i: i16[d], t: f32[n, h]) { score s + t[i[q - k], h] }",
            Operands(chain=8, levels=(4,), widths=(4,), index=2),
        ),
        (
            "attention a(i: i32[d], t: f16[n, h]) { score s + t[i[q - k], h] }",
            Operands(chain=8, narrow=2, index=4),
        ),
        (
            "attention a(i: i32[b, k], t: i64[n, m]) { score s + t[i[b, q], i[b, k]] }",
            Operands(key=4, row=4, chain=12, levels=(8, 0), widths=(8, 0), keys=4),
        ),
        (
            "attention a(i: i32[b, k], t: f32[n]) { mask t[i[b, k]] > 0 }",
            Operands(key=8, chain=8, levels=(0, 0), widths=(0, 0), keys=8, mask_levels=2),
        ),
        (
            "attention a(i: i32[d], t: f32[n, h]) { scale 1 score s + t[i[q - k], h] + 1 }",
            Operands(chain=8, narrow=4, index=4),
        ),
        (
            "attention a(i: i32[d], t: f16[n, h]) { score s + t[i[k - q], h] + t[i[min(q, k)], h] }",
            Operands(chain=16, narrow=2),
        ),
    ],
)
def test_what_a_step_reads(text, found):
    assert replace(operands(parse(text).spec), least=0, along=False) == found


@pytest.mark.parametrize(
    ("index", "along"),
    [("h, row, k", True), ("h, k - q, k - q", True), ("h, q - k, q - k", False), ("h, k, row", False)],
)
def test_what_lies_side_by_side_from_key_to_key(index, along):
    assert operands(parse(f"attention a(t: f32[h, m, n]) {{ score s + t[{index}] }}").spec).along is along


@pytest.mark.parametrize(
    ("params", "least"), [("", 0), ("t: f32[k]", 4), ("t: f16[h]", 2), ("t: bool[row], u: i32[k]", 1)]
)
def test_the_narrowest_of_all_that_is_read(params, least):
    terms = "".join(f" or {p[0]}[{p.split('[')[1][:-1]}] != 0" for p in params.split(", ") if p and "bool" not in p)
    flag = " or t[row]" if "bool" in params else ""
    assert operands(parse(f"attention a({params}) {{ mask k <= q{terms}{flag} }}").spec).least == least


def test_a_unit_that_keeps_its_accumulators_loads_what_is_added_as_any_other():
    spec = parse("attention a(t: f32[row, k]) { scale 1 score t[row, k] + s }").spec
    assert (operands(spec).levels, operands(spec).narrow) == ((), 4)
    assert (operands(spec, apart=True).levels, operands(spec, apart=True).narrow) == ((4,), 0)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("k <= q", False),
        ("k <= q and k < 7", True),
        ("b_[b, k] and k < row", True),
        ("b_[b, q]", False),
        ("true", False),
    ],
)
def test_what_keys_alone_decide(mask, found):
    assert has_key_mask(parse(f"attention a(b_: bool[b, k]) {{ mask {mask} }}").spec) == found


def test_a_dense_bias_is_in_the_traffic_and_in_shared_memory():
    bias = parse("attention a(b_: f32[b, h, row, k]) { score s + b_[b, h, row, k] }").spec
    shape = Shape(batch=2, heads=8, kv_heads=8, head_dim=64, head_dim_v=64)
    choice = choose(bias, shape, target("sm_80"))
    without = choose(parse("attention a { }").spec, shape, target("sm_80"))
    more = choice.predicted.hbm_bytes - without.predicted.hbm_bytes
    assert more == 4 * all_tiles(choice.plan, shape) * choice.plan.tile_q * choice.plan.tile_k
    assert choice.predicted.bound == "memory"
    pair = 4 * choice.plan.tile_q * choice.plan.tile_k
    assert choice.plan.shared_bytes > pair * max(choice.plan.stages - 1, 1)


def test_packed_bits_are_an_eighth_of_a_byte_in_memory():
    spec = parse("attention a(m: bit[row, n]) { mask m[row, k] }").spec
    shape = Shape(head_dim=64, head_dim_v=64)
    plan = choose(spec, shape, target("sm_80")).plan
    bare = costs(choose(parse("attention a { }").spec, shape, target("sm_80")).plan, shape, target("sm_80"))
    assert costs(plan, shape, target("sm_80")).hbm_bytes - bare.hbm_bytes == 16 * 4096 * 4096 // 8
