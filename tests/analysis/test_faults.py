"""Do the tests bite? One rule at a time is broken, and the comparison with the grid has to notice."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator

import pytest
from brute import check
from corpus import MASKS, SHAPES

# module, function, what is right, what is wrong, a mask that shows it early
FAULTS = [
    (
        "interval",
        "Domain._holds",
        "return home.le0(high), home.le0(low)",
        "return home.le0(low), home.le0(low)",
        "streaming",
    ),
    (
        "interval",
        "Domain._holds",
        "return home.le0(high), home.le0(low)",
        "return home.le0(high), home.le0(high)",
        "key bounds",
    ),
    ("interval", "Domain._holds", "return ~may, ~must", "return ~must, ~may", "other documents"),
    ("interval", "Domain._residue", "-((r2 - low) // n)", "1 - ((r2 - low) // n)", "dilated causal"),
    (
        "interval",
        "Domain._residue",
        "(low - r1) // n",
        "(low - r1) // n + 1",
        "column stripes",
    ),
    ("interval", "Domain._mod", "home.where(same, a % c, 0)", "a % c", "swin"),
    (
        "interval",
        "Domain._cells",
        "known & home.every(atoms), ~known",
        "home.every(atoms), home.false",
        "table of small blocks",
    ),
    (
        "interval",
        "Domain._ends",
        "home.where(inside, least, home.least(least, 0))",
        "least",
        "documents, sorted, from the start",
    ),
    ("normal", "Solver._upper", "n * u + n - 1", "n * u", "chunked"),
    ("normal", "Solver._lower", "t.args[1] * u", "t.args[1] * u + 1", "swin"),
    ("normal", "Solver._upper", "self._first(t, u + 1) - 1", "self._first(t, u) - 1", "retrieval, sorted"),
    (
        "normal",
        "_same_side",
        "home.most(_least(a.upper), _least(b.upper))",
        "home.least(_least(a.upper), _least(b.upper))",
        "prefix",
    ),
    ("normal", "_opened", '(c > 0) == (t.op != "min")', '(c > 0) == (t.op == "min")', "bounds by min and max"),
    ("normal", "_guarded", "len(extra) == 1 and covers", "len(extra) == 1", "a condition that covers nothing"),
    (
        "solve",
        "_must",
        "ok = home.every([domain.holds(g)[0] for g in ordered(c.conditions)])",
        "ok = home.true",
        "padding of both",
    ),
    ("solve", "_must", "domain.extremes(bound)[1]", "domain.extremes(bound)[0]", "window"),
    ("solve", "_must", "ok = ok & scan[0].lt(scan[1])", "pass", "block table"),
    ("solve", "_may", "domain.extremes(kept)[0]", "domain.extremes(kept)[1]", "window"),
    ("solve", "_tiles", "home.ceiling(must.low, t)", "must.low // t", "window"),
    (
        "solve",
        "_tiles",
        "full_end = home.ceiling(must.low, t), must.stop // t",
        "full_end = home.ceiling(must.low, t), home.ceiling(must.stop, t)",
        "causal",
    ),
    ("solve", "_full_ranges", "(home.ceiling(a, t), b // t)", "(a // t, b // t)", "two windows"),
    ("solve", "_classes", "must = must & ", "must = must | ", "block checkerboard"),
    ("segments", "union", "a.home.most(a, ends[i - 1])", "a", "fixed"),
    ("segments", "hull", "[(first, left), (right, last)]", "[(first, left), (right, ranges[-2][1])]", "three bands"),
    ("segments", "subtract", "[b for _, b in full]", "[a for a, _ in full]", "fixed"),
    (
        "lift",
        "Lift._division",
        "a.where(valid, make(x, a.most(n, 1)), 0)",
        "make(x, a.most(n, 1))",
        "chunks of each head",
    ),
]


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[str]:
    """The analysis with one rule replaced, wherever its name was imported to."""
    where, function, right, wrong, mask = request.param
    module = sys.modules[f"attncc.analysis.{where}"]
    owner, _, name = function.rpartition(".")
    holder = getattr(module, owner) if owner else module
    old = getattr(holder, name)
    source = textwrap.dedent(inspect.getsource(old))
    assert source.count(right) >= 1, f"{function} does not read {right!r} any more"
    scope = dict(vars(module))
    exec(compile(source.replace(right, wrong), function, "exec"), scope)
    users = (
        [holder]
        if owner
        else [m for n, m in sys.modules.items() if n.startswith("attncc.analysis") and vars(m).get(name) is old]
    )
    for user in users:
        setattr(user, name, scope[name])
    yield mask
    for user in users:
        setattr(user, name, old)


def noticed(first: str) -> bool:
    """Some mask, the named one before the others, shows a wrong tile (or the plan cannot even be made)."""
    for mask in sorted(MASKS, key=lambda m: m.name != first):
        for shape in SHAPES[:6]:
            for outer in ("q", "k"):
                for search in (False, True):
                    try:
                        if check(mask, shape, outer, tables=True, search=search).wrong:
                            return True
                    except (AssertionError, IndexError, RecursionError):
                        return True
        if mask.name == first:
            continue
    return False


@pytest.mark.parametrize("broken", FAULTS, indirect=True, ids=lambda f: f"{f[1]}: {f[3]}"[:60])
def test_a_broken_rule_is_noticed(broken: str) -> None:
    assert noticed(broken)
