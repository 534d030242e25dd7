"""Expressions: meaning against Python's own parser, types, and the way there and back."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncc.frontend import canonical, expression_text, format_text, let_names, parse
from attncc.ir import Const, Expr, Op, Read, Var, walk
from tests.frontend.meaning import PARAMS, of_text, of_tree, random_text, values

FIXED = settings(max_examples=400, derandomize=True, deadline=None)
LONG = settings(FIXED, max_examples=5000)
TYPES, SEEDS = st.sampled_from(("int", "bool", "float")), st.integers(0, 2**32)
NUMBERS = st.tuples(*(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8), st.integers(0, 8), st.integers(-3, 4)))


def check(text: str, type_: str, numbers: tuple[int, ...]) -> None:
    asked = f"where({text}, 1, s)" if type_ == "bool" else text
    whole = f"attention a({PARAMS}) {{ score {asked} }}"
    spec = parse(whole).spec
    (e,) = spec.scores
    env = values(*numbers)
    assert same(of_tree(e, env), of_text(asked, env))
    assert same(of_text(expression_text(e), env), of_tree(e, env))
    assert parse(canonical(spec)).spec == spec
    assert parse(format_text(whole)).spec == spec


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-12))


@FIXED
@given(TYPES, SEEDS, NUMBERS)
def test_meaning_is_pythons(type_: str, seed: int, numbers: tuple[int, ...]) -> None:
    check(random_text(type_, 4, random.Random(seed)), type_, numbers)


@pytest.mark.slow
@LONG
@given(TYPES, SEEDS, NUMBERS)
def test_meaning_is_pythons_long(type_: str, seed: int, numbers: tuple[int, ...]) -> None:
    check(random_text(type_, 5, random.Random(seed)), type_, numbers)


def mask(text: str) -> Expr:
    return parse(f"attention a({PARAMS}) {{ mask {text} }}").spec.masks[0]


def score(text: str) -> Expr:
    return parse(f"attention a({PARAMS}) {{ score {text} }}").spec.scores[0]


Q, K, S = Var("q", "int"), Var("k", "int"), Var("s", "float")


def test_trees() -> None:
    le = Op("<=", (K, Q), "bool")
    assert mask("k <= q") == le
    assert mask("0 <= k <= q") == Op("and", (Op("<=", (Const(0), K), "bool"), le), "bool")
    assert mask("not k <= q") == Op("not", (le,), "bool")
    assert score("s + k") == Op("+", (S, Op("float", (K,), "float")), "float")
    assert score("k / 2") == Op("/", (Op("float", (K,), "float"), Op("float", (Const(2),), "float")), "float")
    assert score("s * -2.5") == Op("*", (S, Const(-2.5)), "float")
    assert score("k") == Op("float", (K,), "float")
    assert mask("u[k // 2]") == Read("u", (Op("//", (K, Const(2)), "int"),), "bool")
    assert mask("floor(x) == floor(k)") == Op("==", (Op("floor", (Var("x", "float"),), "int"), K), "bool")
    assert mask("k > -9223372036854775808") == Op(">", (K, Const(-(2**63))), "bool")


def test_every_node_has_its_type() -> None:
    for node in walk(score("where(u[k], s * t[0, k] + n, -size) / max(f[h], 2)")):
        if isinstance(node, Op) and node.op not in ("float", "where", "floor"):
            assert {a.type for a in node.args} == {node.type}


# Printed as written: minimal parentheses, chains as chains.
PRINTED = """
k <= q
0 <= q - k < n
0 <= k <= q and u[k]
u[k] and k <= q
not (k <= q and u[k])
not k <= q
(not u[k]) == u[q]
k - (q - n) > 0
k - q - n > 0
-(k + 1) < 0
k < -3
k < -(3)
(k + 1) * n < k // 2 % 7
k * (n * q) < 0
k <= q or u[k] and k > 3
(k <= q or u[k]) and k > 3
t[k, q + 1] == t[q, k]
x < k
x * k < 0.5
q > k >= n
k == q == n
(k < q) == (q < n)
where(k < q, k, n) < max(k, -q)
k < q and (u[k] and n < 5)
true != u[k]
k < q and (q < 5 or u[k])
"""


@pytest.mark.parametrize("text", PRINTED.strip().split("\n"))
def test_printed_as_written(text: str) -> None:
    assert expression_text(mask(text)) == text


def test_printed_plainer() -> None:
    assert expression_text(mask("--k < 0")) == "-(-k) < 0"
    assert expression_text(mask("((k)) < (q)")) == "k < q"
    assert expression_text(mask("k < q and (q < n and n < 5)")) == "k < q and q < n < 5"


def test_lets_come_back() -> None:
    text = (
        "attention a(window: int) {\n    let distance = q - k\n    let near     = distance < window\n"
        "    let two      = 2\n    mask  0 <= distance and near\n    score s - distance * 2\n}\n"
    )
    spec = parse(text).spec
    assert canonical(spec) == text
    assert expression_text(spec.masks[0]) == "0 <= q - k < window"
    assert expression_text(spec.masks[0], let_names(spec)) == "0 <= distance and near"


def test_bound_constants_are_numbers() -> None:
    spec = parse("attention a(block: const int = 64, w: int) { mask k // block == q // block and k > -block + w }").spec
    bound = spec.bind({"block": 32})
    assert canonical(bound).splitlines() == [
        "attention a(w: int) {",
        "    mask k // 32 == q // 32 and k > -(32) + w",
        "}",
    ]
    assert parse(canonical(bound)).spec == bound
    negative = spec.bind({"block": -5}).masks[0]
    assert expression_text(negative) == "k // -5 == q // -5 and k > -(-5) + w"
