"""In which order a kernel of 8-bit inputs visits tiles of keys, from its generated file."""

from __future__ import annotations

import re
import textwrap

import pytest

from attncc.analysis import kernel_visits
from attncc.codegen import render
from attncc.frontend import parse
from attncc.ir import Shape
from attncc.planner import choose
from attncc.targets import target

CAUSAL = "attention x { mask k <= q }"
STREAMING = "attention x { mask 0 <= q - k < 300 or k < 4 and k <= q }"
SEES = {
    "attention x { }": lambda q, k: True, CAUSAL: lambda q, k: k <= q,
    STREAMING: lambda q, k: 0 <= q - k < 300 or (k < 4 and k <= q),
}  # fmt: skip
CASES = [("attention x { }", 900, 700), (CAUSAL, 512, 1100), (STREAMING, 1500, 1500), (STREAMING, 100, 2000)]


class Language:
    """What a producer's lines call, on numbers."""

    maximum, minimum = max, min

    @staticmethod
    def cdiv(a, b):
        return -(-a // b)

    @staticmethod
    def where(c, a, b):
        return a if c else b


def visited(text, q_len, k_len, mine):
    """(tile, masked) in order, as the producer's loop says; of the `mine`-th tile of rows."""
    spec = parse(f"{text} precision {{ inputs f8e4m3 }}").spec
    visits = kernel_visits(spec, forward=True)
    plan = choose(spec, Shape(), target("sm_90"), visits).plan
    source = render(spec, visits, plan)
    (lines,) = re.findall(r"# ---- the key tiles that these rows see\n(.*?)\n +loaded = \w+_load\(", source, re.DOTALL)
    names = {
        "gl": Language, "q_len": q_len, "k_len": k_len, "mine": mine, "TILE_Q": plan.tile_q, "TILE_K": plan.tile_k,
        "MASKED": 2, "LAST": 1, "PLAIN": 8, "found": [], "floor_div": lambda a, b: a // b,
    }  # fmt: skip
    exec(textwrap.dedent(lines) + "\n    found.append(order)", names)
    assert [order & 1 for order in names["found"]] == [0] * (len(names["found"]) - 1) + [1]
    return [(order // 128, bool(order & 2)) for order in names["found"]], plan


@pytest.mark.parametrize(("text", "q_len", "k_len"), CASES)
def test_tiles_come_from_the_last_on(text, q_len, k_len):
    """Each tile once that a row sees, from the last on, and none that needs the mask without it."""
    for mine in range(-(-q_len // 192)):
        found, plan = visited(text, q_len, k_len, mine)
        rows = range(mine * plan.tile_q, min(mine * plan.tile_q + plan.tile_q, q_len))
        need = {}
        for tile in range(-(-k_len // plan.tile_k)):
            keys = range(tile * plan.tile_k, (tile + 1) * plan.tile_k)
            seen = [k < k_len and SEES[text](row + k_len - q_len, k) for row in rows for k in keys]
            if any(seen):
                need[tile] = not all(seen)
        tiles = [tile for tile, _ in found]
        assert tiles == sorted(need, reverse=True)
        assert all(masked or not need[tile] for tile, masked in found)
