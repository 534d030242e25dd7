import ast
import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from attncc import frontend
from attncc.analysis import kernel_visits
from attncc.codegen.backward import render_backward
from attncc.errors import PlanError
from attncc.ir import AttentionSpec, KernelPlan, Shape
from attncc.planner import backward_costs, backward_forms, choose, choose_backward, closed_forms, costs, sizes_of
from attncc.planner.backward import side_by_side
from attncc.planner.efficiency import MEASURED, efficiency, measured_rate
from attncc.planner.io import all_tiles, backward_kernels
from attncc.planner.legality import BUILT
from attncc.planner.traffic import Stream
from attncc.targets import TARGETS, target

PLAN = KernelPlan("sm_90", "fa2", "q_outer", 128, 64, 2, 8, 128, 128, "bf16", shared_bytes=98304)


def test_one_head_by_hand():
    shape = Shape(batch=1, heads=1, kv_heads=1, q_len=1024, k_len=2048)
    c = costs(PLAN, shape, target("sm_90"))
    assert c.hbm_bytes == 2 * 1024 * 128 * 2 + 1024 * 4 + 2 * 2048 * 128 * 2  # Q and Out, lse, K and V
    assert c.streamed_bytes == 2 * 1024 * 128 * 2 + 1024 * 4 + 8 * 2 * 2048 * 128 * 2  # K and V for each of 8 tiles
    assert c.flops == 4 * 1024 * 2048 * 128
    assert c.exponentials == 1024 * 2048
    pairs = 1024 * 2048  # scores in float32, written once and read twice; weights written and read once
    assert c.standard_hbm_bytes == 1024 * (2 * 128 * 2 + 4) + 2 * 2048 * 128 * 2 + pairs * (3 * 4 + 2 * 2)
    assert c.shared_bytes == 98304


def test_grouped_heads_share_keys_and_values():
    many, few = (costs(PLAN, Shape(heads=16, kv_heads=n), target("sm_90")) for n in (16, 2))
    assert many.hbm_bytes - few.hbm_bytes == 14 * 2 * 4096 * 128 * 2
    assert many.flops == few.flops


def test_tiles_left_out_cost_nothing():
    shape = Shape(q_len=8192, k_len=8192)
    whole, half = costs(PLAN, shape, target("sm_90")), costs(PLAN, shape, target("sm_90"), all_tiles(PLAN, shape) // 2)
    assert half.flops * 2 == whole.flops
    assert half.predicted_ms < 0.6 * whole.predicted_ms
    assert half.standard_hbm_bytes < 0.51 * whole.standard_hbm_bytes  # which leaves out the same tiles


def test_what_binds():
    assert costs(PLAN, Shape(), target("sm_90")).bound == "tensor"
    assert costs(replace(PLAN, tile_q=16), Shape(batch=64, q_len=1, k_len=8192), target("sm_90")).bound == "memory"
    narrow = replace(PLAN, target="sm_100", head_dim=32, head_dim_v=32)
    assert costs(narrow, Shape(head_dim=32, head_dim_v=32), target("sm_100")).bound == "exp"


def test_no_kernel_is_predicted_faster_than_the_roofline():
    for name in TARGETS:
        for d in (64, 128, 256):
            found = choose(AttentionSpec("full"), Shape(head_dim=d, head_dim_v=d), target(name)).predicted
            assert found.predicted_ms >= found.roofline_ms > 0


def test_the_model_meets_the_measured_kernel():
    shape = Shape(batch=4, heads=16, kv_heads=16, q_len=4096, k_len=4096)
    for record in (r for r in MEASURED["sm_90"] if r.full):
        names = ("tile_q", "tile_k", "stages", "warps", "loads", "max_registers", "reference", "head_dim", "algorithm")
        plan = replace(PLAN, head_dim_v=record.head_dim, **{n: getattr(record, n) for n in names})
        found = costs(plan, replace(shape, head_dim=record.head_dim, head_dim_v=record.head_dim), target("sm_90"))
        assert found.flops / found.predicted_ms / 1e9 == pytest.approx(record.full)


def test_a_schedule_that_was_measured_on_documents_alone_is_a_guess_elsewhere():
    (record,) = (r for r in MEASURED["sm_90"] if not (r.full or r.causal))
    names = ("tile_q", "tile_k", "stages", "warps", "loads", "max_registers", "reference", "head_dim", "algorithm")
    plan = replace(PLAN, head_dim_v=record.head_dim, classed=True, **{n: getattr(record, n) for n in names})
    assert measured_rate(plan, target("sm_90"), "local") == record.documents > 0
    assert measured_rate(plan, target("sm_90"), "all") == 0 < efficiency(plan, target("sm_90"), "all")
    assert measured_rate(replace(plan, key_bytes=8), target("sm_90"), "local") == 0  # one block less fits an SM


def test_closed_forms_are_the_numbers():
    rnd = random.Random(7)
    for _ in range(12):
        plan = replace(PLAN, tile_q=rnd.choice((64, 128)), tile_k=rnd.choice((32, 64)), head_dim=rnd.choice((64, 128)))
        plan = replace(choose(AttentionSpec("full"), Shape(), target("sm_90")).plan, **{
            n: getattr(plan, n) for n in ("tile_q", "tile_k", "head_dim")
        })  # fmt: skip
        shape = Shape(batch=rnd.randint(1, 9), heads=12, kv_heads=rnd.choice((1, 4, 12)), q_len=rnd.randint(1, 9999),
                      k_len=rnd.randint(1, 9999), head_dim=plan.head_dim)  # fmt: skip
        tiles = rnd.randint(1, 10**6)
        numbers = costs(plan, shape, target("sm_90"), tiles)
        sizes = sizes_of(plan, shape, target("sm_90"), tiles)
        values = {
            "B": shape.batch, "H": 12, "H_kv": shape.kv_heads, "N_q": shape.q_len, "N_k": shape.k_len,
            "d": plan.head_dim, "d_v": 128, "T_q": plan.tile_q, "T_k": plan.tile_k, "tiles": tiles, "e": 2,
            "R": sizes.side, "G": sizes.together,
        }  # fmt: skip
        for name, form in closed_forms(plan, target("sm_90"), sizes).items():
            value = form.subs({s: values[s.name] for s in form.free_symbols})
            if name == "shared_bytes":
                assert value == BUILT[plan.algorithm](plan, target("sm_90"))
            else:
                assert int(value) == getattr(numbers, name)


@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2", "fa3"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    "body", ["", "mask k <= q", "mask k <= q score s + t[b, h, row, k]", "mask d[k] == d[q] dropout 0.1"]
)
def test_the_formula_of_shared_memory_is_the_number(algorithm, dtype, body):
    text = f"attention a(t: f32[b, h, row, k], d: i32[k]) {{ {body} }} schedule {{ algorithm {algorithm} }}"
    spec, seen = frontend.parse(text).spec, 0
    for name in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for d in (64, 128):
            try:
                shape = Shape(head_dim=d, head_dim_v=d, dtype=dtype)
                plan = choose(spec, shape, target(name)).plan
            except PlanError:
                continue
            values = {"d": d, "d_v": d, "T_q": plan.tile_q, "T_k": plan.tile_k, "e": {"bf16": 2, "f32": 4}[dtype]}
            form = closed_forms(plan, target(name), sizes_of(plan, shape, target(name)))["shared_bytes"]
            assert form.subs({s: values[s.name] for s in form.free_symbols}) == plan.shared_bytes > 0
            seen += 1
    assert seen or (algorithm, dtype) == ("fa3", "f32")


def test_numbers_need_no_sympy():
    import subprocess
    import sys

    code = (
        "import sys; from attncc.ir import *; from attncc.planner import *; from attncc.targets import target;"
        "choose(AttentionSpec('full'), Shape(), target('sm_90')); assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SM_90 = target("sm_90")
LONG = Shape(heads=16, kv_heads=16, q_len=32768, k_len=32768)


def test_what_the_l2_does_not_hold_comes_once_for_each_round_of_programs():
    small, large = (
        costs(replace(PLAN, max_registers=128), replace(LONG, q_len=n, k_len=n), SM_90) for n in (2048, 32768)
    )
    assert small.held and not large.held
    once = 16 * 32768 * (2 * 128 * 2 + 4)
    plan = replace(PLAN, max_registers=128)  # two blocks on an SM
    sizes = sizes_of(plan, LONG, SM_90)
    assert sizes.side == 132 * 2 and sizes.together == 8
    keys = 16 * 32768 * 2 * 128 * 2
    assert large.hbm_bytes == once + keys + (large.streamed_bytes - once - keys) * 8 // (132 * 2)
    wide = replace(SM_90, l2_bytes=2**30)
    assert costs(PLAN, LONG, wide).hbm_bytes == once + keys


def test_keys_that_no_tile_holds_are_not_read():
    """One query in a window, of many keys: what it loads is less than all of K and V."""
    shape, t = Shape(heads=16, kv_heads=16, q_len=1, k_len=65536), target("sm_90")
    tiles = 16 * 4
    loaded = tiles * PLAN.tile_k * (128 + 128) * 2
    found = costs(PLAN, shape, t, tiles)
    assert found.hbm_bytes == found.streamed_bytes == 16 * (256 * 2 + 4) + loaded and found.held
    assert found.standard_hbm_bytes == found.hbm_bytes + tiles * PLAN.tile_q * PLAN.tile_k * (2 * 2 + 3 * 4)
    forms = closed_forms(PLAN, t, sizes_of(PLAN, shape, t, tiles))
    assert not {"N_k", "H_kv"} & {s.name for s in forms["hbm_bytes"].free_symbols}


def test_the_theorem_of_flash_attention_falls_out():
    """Streamed bytes are N^2 d / T of the outer tile, and T is M / d: a quarter of the traffic with four times the
    memory, where standard attention's N^2 stays; and both are quadratic in N."""
    tall, low = (costs(replace(PLAN, tile_q=t), LONG, SM_90) for t in (128, 32))
    compulsory = 16 * 32768 * (2 * 128 * 2 + 4)
    assert low.streamed_bytes - compulsory == 4 * (tall.streamed_bytes - compulsory)
    assert low.standard_hbm_bytes == tall.standard_hbm_bytes
    twice = costs(PLAN, replace(LONG, q_len=65536, k_len=65536), SM_90)
    assert twice.streamed_bytes - 2 * compulsory == 4 * (tall.streamed_bytes - compulsory)


@pytest.mark.parametrize(("d", "deterministic", "products"), [(128, False, 5), (128, True, 7), (256, False, 7)])
def test_the_warp_specialised_backward_pass_makes_fewer_products(d, deterministic, products):
    shape = Shape(batch=2, heads=8, kv_heads=4, q_len=1024, k_len=2048, head_dim=d, head_dim_v=d)
    plan = choose_backward(AttentionSpec("full"), shape, SM_90, deterministic=deterministic)
    whole, kernels = backward_costs(plan, shape, SM_90)
    assert plan.algorithm == "fa3"
    assert kernels.keys() == ({"delta", "dqkv"} if products == 5 else {"delta", "dq", "dkdv"})
    assert whole.flops - kernels["delta"].flops == products * 2 * 2 * 8 * 1024 * 2048 * d


def test_what_the_l2_loses_grows_from_a_third_of_it_on():
    mib, l2 = 2**20, 48 * 2**20

    def lost(alive: float, distinct: int = 2**30, readers: int = 8) -> Fraction:
        return Stream("K", 2**40, distinct, alive * mib, readers).lost(l2)

    assert [lost(n) for n in (16, 20, 25, 28.8, 99)] == [0, Fraction(31, 100), Fraction(70, 100), 1, 1]
    assert [lost(n, readers=1) for n in (32, 40, 57.6)] == [0, Fraction(31, 100), 1]  # in one half of the L2
    assert lost(99, distinct=8 * mib) == 0  # there is no more than that
    stream = Stream("K", 2**34, 2**30, 20 * mib, 8)
    assert stream.from_memory(l2) == pytest.approx(2**30 + 0.31 * (2**34 - 2**30) / 8)


@pytest.mark.parametrize(("d", "dtype"), [(64, "bf16"), (128, "bf16"), (256, "bf16"), (128, "f32")])
def test_heads_of_the_backward_pass_run_side_by_side_as_far_as_the_l2_holds_them(d, dtype):
    """In the model as in the launcher."""
    base, spec = Shape(head_dim=d, head_dim_v=d, dtype=dtype), AttentionSpec("full")
    plan = choose_backward(spec, base, SM_90, algorithm="fa2")
    text = render_backward(spec, kernel_visits(spec, "q"), kernel_visits(spec, "k"), plan)
    (own,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == "side_by_side")
    made: dict[str, Any] = {}
    exec(ast.unparse(own), made)
    for n, group in product((1, 500, 4096, 16384, 32768, 10**6), (1, 4)):
        shape = replace(base, heads=16, kv_heads=16 // group, q_len=n, k_len=n)
        rows, keys = (-(-n // x) for x in (plan.tile_q, plan.dkdv.tile_k))
        found = {name: side_by_side(plan, name, shape) for name in ("dq", "dkdv")}
        assert found == {"dq": made["side_by_side"](n, group * rows), "dkdv": made["side_by_side"](n, keys)}
        sizes = {k.name: s.together for k, s in backward_kernels(plan, shape, SM_90)}
        assert found == {name: sizes[name] for name in found} or max(found.values()) > 16 // group
    row = 2 * d * (4 if dtype == "f32" else 2)
    cases = ((512, 512, 8), (10**6, 10**6, 1), (10**6, 2**21 // row, 4), (512, 10**6, None))
    for rows, keys, expected in cases:  # short; long; 2 MiB a head; few rows, of which many heads fill the GPU
        found = side_by_side(plan, "dq", replace(base, q_len=rows, k_len=keys))
        assert found == (min(8, 256 // (-(-rows // plan.tile_q))) if expected is None else expected)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_backward_pass_is_the_sum_of_its_kernels(d):
    shape = Shape(batch=2, heads=8, kv_heads=4, q_len=1024, k_len=2048, head_dim=d, head_dim_v=d)
    plan = choose_backward(AttentionSpec("full"), shape, SM_90, algorithm="fa2")
    whole, kernels = backward_costs(plan, shape, SM_90)
    assert kernels.keys() == {"delta", *plan.passes}
    assert whole.flops == sum(k.flops for k in kernels.values())
    products = 7 if plan.dv is None else 8
    assert whole.flops - kernels["delta"].flops == products * 2 * 2 * 8 * 1024 * 2048 * d
    assert whole.hbm_bytes == sum(k.hbm_bytes for k in kernels.values())
    assert whole.predicted_ms >= whole.roofline_ms
    rows, keys = 2 * 8 * 1024, 2 * 4 * 2048
    assert kernels["dq"].hbm_bytes == rows * (3 * d * 2 + 8) + keys * 2 * d * 2  # Q, d_out, dQ, lse, delta; K, V
    for name, forms in backward_forms(plan, shape, SM_90).items():
        own = plan.passes.get(name, plan)
        tiles = 16 * -(-1024 // own.tile_q) * -(-2048 // own.tile_k)
        values = {"B": 2, "H": 8, "H_kv": 4, "N_q": 1024, "N_k": 2048, "d": d, "d_v": d, "e": 2, "T_q": own.tile_q,
                  "T_k": own.tile_k, "tiles": tiles}  # fmt: skip
        for what, form in forms.items():
            found = form.subs({s: values[s.name] for s in form.free_symbols}) if hasattr(form, "subs") else form
            assert int(found) == getattr(kernels[name], what)


def test_standard_attention_by_hand():
    shape = Shape(batch=1, heads=2, kv_heads=1, q_len=1024, k_len=16384, head_dim=64, head_dim_v=128)
    plan = replace(PLAN, algorithm="standard", head_dim=64)
    found = costs(plan, shape, SM_90)
    rows, keys, pairs = 2 * 1024, 16384, 2 * 1024 * 16384
    scores = rows * 64 * 2 + keys * 64 * 2 + pairs * 4
    weights = pairs * 4 + pairs * 4 + pairs * 2 + rows * 4  # S twice: the L2 does not hold 132 programs' rows of it
    output = pairs * 2 + keys * 128 * 2 + rows * 128 * 2
    assert found.hbm_bytes == scores + weights + output
    assert found.flops == 2 * pairs * (64 + 128) and found.exponentials == 2 * pairs
    assert found.bound == "memory" and found.hbm_bytes == found.standard_hbm_bytes
    assert costs(replace(plan, reference="two_pass"), shape, SM_90).hbm_bytes == found.hbm_bytes + pairs * 4
    short = replace(shape, k_len=2048)  # all scores of which fit
    assert costs(plan, short, SM_90).held


def test_fa1_by_hand_and_its_theorem():
    plan = replace(PLAN, algorithm="fa1", loop="kv_outer", tile_k=128)
    shape = Shape(heads=64, kv_heads=64, q_len=32768, k_len=32768)
    rows = 64 * 32768
    state = 128 * 4 + 8
    fixed = rows * 2 * 128 * 2 + rows * (128 * 2 + 4) + 2 * rows * state  # K, V; Out, lse; the state before and after
    found = costs(plan, shape, SM_90)
    assert not found.held and found.hbm_bytes == found.streamed_bytes
    assert found.hbm_bytes == fixed + rows * 32768 // 128 * (128 * 2 + 2 * state)
    quarter = costs(replace(plan, tile_k=32), shape, SM_90)
    assert quarter.hbm_bytes - fixed == 4 * (found.hbm_bytes - fixed)  # N^2 d^2 / M, where the tile is M / d
    assert costs(plan, replace(shape, q_len=512, k_len=512), SM_90).held
    assert found.programs == shape.batch * shape.heads  # one for each head; of fa2 one for each tile of rows
    assert costs(replace(PLAN, tile_q=128), shape, SM_90).programs == found.programs * shape.q_len // 128


@pytest.mark.parametrize("algorithm", ["standard", "fa1"])
def test_closed_forms_of_the_older_algorithms(algorithm):
    plan, shape = replace(PLAN, algorithm=algorithm), Shape(batch=2, heads=8, kv_heads=4, q_len=8192, k_len=4096)
    sizes, found = sizes_of(plan, shape, SM_90), costs(plan, shape, SM_90)
    values = {"B": 2, "H": 8, "H_kv": 4, "N_q": 8192, "N_k": 4096, "d": 128, "d_v": 128, "e": 2, "T_q": 128, "T_k": 64,
              "tiles": 16 * 64 * 64, "R": sizes.side, "G": sizes.together}  # fmt: skip
    for name, form in closed_forms(plan, SM_90, sizes).items():
        if name != "shared_bytes":
            assert int(form.subs({s: values[s.name] for s in form.free_symbols})) == getattr(found, name), name
