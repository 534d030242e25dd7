"""32-bit arithmetic where it is promised to be exact, and clamps that change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from brute import compare, environment, programs
from corpus import MASKS, Mask
from spelling import Call, Table, grid, spec_of

from attncc.analysis import evaluate, nonnegative, visits, widths
from attncc.analysis.evaluate import Env
from attncc.analysis.lift import Prover, at_least
from attncc.analysis.prepass import tables
from attncc.ir import AttentionSpec, Const, Expr, Op, Read, Var

BY_NAME = {m.name: m for m in MASKS}


def limit(text: str, **tables: Table) -> int:
    return widths(spec_of(text, tables)).limit


def test_limits_follow_from_the_largest_intermediate_value() -> None:
    assert limit("k <= q") == 2**29  # q_high = last + k_len - q_len
    assert limit("k < length[b]", length=Table("i32", ("b",))) >= 2**29
    assert limit("doc[b, q] == doc[b, k]", doc=Table("i32", ("b", "k"))) >= 2**29
    assert limit("k * q_len <= row * k_len") == 2**15
    assert limit("k // W * W <= q") >= 2**28  # n (X // n) is no product
    assert limit("k <= start[b] + row", start=Table("i32", ("b",))) == 0
    assert limit("k <= start[b] + row", start=Table("i64", ("b",))) >= 2**29  # 64 bits wide by itself
    assert limit("doc[b, q] == doc[b, k]", doc=Table("i64", ("b", "k"))) == 0  # its tables hold 32 bits
    assert limit("k <= floor(sqrt(abs(q)))") >= 2**28
    assert limit("k <= q + floor(k_len / 8)") >= 2**28
    assert limit("k <= floor(q / max(W, 1)) and k <= floor(-q / (b_len + 1)) + q") >= 2**28
    assert limit("k <= floor(q / W)") == 0  # W may be 0, and what is infinite has no floor
    assert limit("k <= floor(q / 0.25)") == 2**27
    assert limit("k * k * k <= q") == 2**8  # keys of the last tile reach 1,024 behind the end


def test_a_call_is_judged_by_its_own_values() -> None:
    w = widths(spec_of("abs(q // W - k // W) <= r and abs(q % W - k % W) <= r"))
    assert w.limit == 2**15
    assert w.fits(131072, {"W": 362, "r": 8})
    assert not w.fits(131072, {"W": 2**20, "r": 2**15})
    quotient = widths(spec_of("k <= floor(q / W)"))
    assert quotient.fits(131072, {"W": 3}) and quotient.fits(131072, {"W": -1}) and not quotient.fits(131072, {"W": 0})


@pytest.mark.parametrize(
    "name", ["window", "streaming", "two bands", "neighbourhood", "natten", "prefix", "chunked", "video"]
)
@pytest.mark.parametrize("outer", ["q", "k"])
def test_values_at_the_limit_stay_inside_32_bits(name: str, outer: str) -> None:
    """Every int node of the visits is worked out at lengths and parameters of the limit: none leaves 32 bits."""
    mask = BY_NAME[name]
    spec = spec_of(mask.text, mask.tables, mask.align)
    n = widths(spec).limit
    found = visits(spec, outer)
    rng = np.random.default_rng(0)
    for _ in range(20):
        scalars = {p: int(rng.choice([1, n // 3 + 1, n])) for p in mask.scalars}
        first = int(rng.choice([0, n // 2 // 64 * 64, max(n - 64, 0)]))
        names = {
            "q_len": int(rng.choice([1, n])),
            "k_len": int(rng.choice([1, n])),
            "first": first,
            "last": first + 63,
            "tile": 0,
            "b": 0,
            "h": 0,
            "TILE_Q": 64,
            "TILE_K": 64,
            **scalars,
        }
        for let, value in found.lets:
            for node in _nodes(value):
                got = evaluate(node, Env(names))
                assert -(2**31) <= int(got) < 2**31, (let, names)
            names[let] = int(evaluate(value, Env(names)))


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize(
    "name", ["window of each head", "row bounds, random", "prefix and padding", "key bounds", "padding of both"]
)
def test_any_contents_of_a_tensor_stay_inside_32_bits(name: str, outer: str) -> None:
    """Elements as small and as large as integers get: no sum of the visits overflows, and no tile is lost."""
    mask = BY_NAME[name]
    spec = spec_of(mask.text, mask.tables, mask.align)
    assert widths(spec).limit >= 2**28
    found, rng = visits(spec, outer, tables=True), np.random.default_rng(1)
    for _ in range(4):
        call = mask.call(70, 90)
        wild = {n: rng.choice([-(2**31), 2**31 - 1, 0, 30, 60], np.shape(t)) for n, t in call.tensors.items()}
        call = Call(70, 90, call.scalars, wild)
        for h in (0, 5):
            dense = grid(mask.text, call, mask.align, 1, h)
            assert compare(spec, found, dense, call, (16, 32), 1, h).wrong == 0
            env = tables(found, spec, environment(call, {"TILE_Q": 16, "TILE_K": 32}, 1, h)).plus(
                first=16, last=31, tile=1
            )
            for let, value in found.lets:
                assert all(-(2**31) <= int(evaluate(n, env)) < 2**31 for n in _nodes(value) if n.type == "int")
                env = env.plus(**{let: evaluate(value, env)})


def _nodes(e: Expr) -> list[Expr]:
    inner = e.args if isinstance(e, Op) else e.indices if isinstance(e, Read) else ()
    return [e, *(n for a in inner for n in _nodes(a))]


@pytest.mark.parametrize("mask", [m for m in MASKS if m.scalars], ids=lambda m: m.name)
def test_clamps_change_nothing(mask: Mask) -> None:
    spec = spec_of(mask.text, mask.tables, mask.align)
    found = widths(spec).clamped
    for q_len, k_len in ((20, 33), (33, 20)):
        call, reach = mask.call(q_len, k_len), q_len + k_len
        for name in sorted(found):
            for far in (2**31 - 1, -(2**31) + 1, q_len + k_len + 1, -q_len - k_len - 1):
                near = min(max(far, -reach), reach)
                grids = [
                    grid(mask.text, Call(q_len, k_len, {**call.scalars, name: v}, call.tensors), mask.align, b, h)
                    for b, h in programs(mask.text)
                    for v in (far, near)
                ]
                assert all((x == y).all() for x, y in zip(grids[::2], grids[1::2])), (name, far)


def test_which_parameters_are_clamped() -> None:
    assert widths(spec_of("0 <= q - k < w")).clamped == {"w"}
    assert widths(spec_of("k <= q and (k < sinks or q - k < w)")).clamped == {"sinks", "w"}
    assert not widths(spec_of("k <= q and q // C == k // C")).clamped  # a divisor
    assert not widths(spec_of("k * w <= q")).clamped
    spec = spec_of("0 <= q - k < w")
    scored = AttentionSpec("m", spec.params, masks=spec.masks, scores=(Op("float", (Var("w", "int"),), "float"),))
    assert not widths(scored).clamped  # its value is read


def test_a_window_as_wide_as_integers_go_does_not_overflow_once_clamped() -> None:
    spec = spec_of("0 <= q - k < w")
    w = widths(spec)
    assert w.clamped == {"w"} and w.fits(300, {"w": 100 + 300}) and not w.fits(300, {"w": 2**31 - 1})


def test_nonnegative_is_a_proof() -> None:
    spec = spec_of("q - k < w and k // C == q // C", name="m")
    v = lambda n: Var(n, "int")
    op = lambda o, *a: Op(o, a, "int")
    yes = [
        v("row"),
        v("k"),
        v("first"),
        v("k_len"),
        op("+", v("first"), v("TILE_K")),
        op("max", v("w"), Const(0)),
        op("%", v("q"), v("C")),
        op("-", v("k_len"), v("k")),
        op("-", v("last"), v("first")),
        op("abs", v("w")),
        op("//", v("k"), v("C")),
    ]
    no = [
        v("q"),
        v("w"),
        op("-", v("k_len"), v("q_len")),
        op("-", v("k"), Const(1)),
        op("//", v("q"), v("C")),
        op("%", v("q"), v("w")),
    ]
    assert all(nonnegative(e, spec) for e in yes)
    assert not any(nonnegative(e, spec) for e in no[:5])
    assert nonnegative(v("C"), spec) and at_least(v("C"), 1, spec) and not at_least(v("row"), 1, spec)
    assert not nonnegative(v("first"), spec_of("k < first"))  # a parameter of that name


@pytest.mark.parametrize("outer", ["q", "k"])
@pytest.mark.parametrize("mask", MASKS[::4], ids=lambda m: m.name)
def test_what_is_proved_nonnegative_is(mask: Mask, outer: str) -> None:
    spec = spec_of(mask.text, mask.tables, mask.align)
    found = visits(spec, outer)
    prover = Prover(spec, found.lets)
    proved = [n for _, e in found.lets for n in _nodes(e) if n.type == "int" and prover.nonnegative(n)]
    call = mask.call(77, 130)
    names: dict[str, Any] = dict(environment(call, {"TILE_Q": 16, "TILE_K": 32}, 0, 0).names)
    names |= {"_TILE_K": 32} if "TILE_K" in call.scalars else {}
    for first in (0, 48, 64):
        tile = {
            n: v
            for n, v in {"first": first, "last": min(first + 15, 76), "tile": first // 16}.items()
            if n not in call.scalars
        }
        env = Env(
            {**names, **tile, "_first": first, "_last": min(first + 15, 76), "_tile": first // 16}, dict(call.tensors)
        )
        for let, value in found.lets:
            env = env.plus(**{let: evaluate(value, env)})
        assert all(int(evaluate(n, env)) >= 0 for n in proved)


def test_operators_mean_what_the_language_says() -> None:
    assert evaluate(Op("//", (Const(-7), Const(2)), "int"), Env({})) == -4
    assert evaluate(Op("%", (Const(-7), Const(3)), "int"), Env({})) == 2
    assert evaluate(Op("//", (Const(5), Const(0)), "int"), Env({})) == 0
    assert evaluate(Op("floor", (Const(-0.5),), "int"), Env({})) == -1
    table = Env(
        {"i": np.array([-1, 0, 2, 3])}, {"t": np.array([5, 6, 7]), "m": np.array([0b101], np.int32)}, frozenset(("m",))
    )
    assert evaluate(Read("t", (Var("i", "int"),), "int"), table).tolist() == [0, 5, 7, 0]
    assert evaluate(Read("m", (Var("i", "int"),), "bool"), table).tolist() == [False, True, True, False]
