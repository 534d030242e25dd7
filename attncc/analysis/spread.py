"""How the tiles lie that a mask leaves, as far as that is known before lengths and parameters are."""

from __future__ import annotations

from attncc.analysis.evaluate import Env, evaluate
from attncc.analysis.solve import visits
from attncc.ir import AttentionSpec, Visits, tile_names

SHORT, LONG, TILE = 2**14, 2**17, 64
UNGIVEN = 256  # an int parameter without a default


def spread(spec: AttentionSpec, v: Visits) -> str:
    """all: there is no mask. dense: longer sequences have more tiles in each row of tiles, as under a causal mask.
    local: they have not (a window, documents). scattered: no tile is known to be whole before it comes up (a
    neighbourhood on a grid, a table of blocks)."""
    if not spec.masks:
        return "all"
    tested = v.may is not None or v.must is not None
    if tested and not v.full:  # ranges may have been left out because they are long to print
        v = v if v.listed else visits(spec, v.outer, tables=True)
    if tested and not v.full:
        return "scattered"
    try:
        return "dense" if _visited(spec, v, LONG) > 2 * _visited(spec, v, SHORT) else "local"
    except KeyError:  # contents of a tensor
        return "local" if tested else "dense"


def even(spec: AttentionSpec, v: Visits) -> bool:
    """Whether a tile at the start of a sequence visits hardly more than one in its middle, as without a mask and under
    a window. False where that is not known."""
    return 0 < _first_by_middle(spec, v) <= 1.25


def lopsided(spec: AttentionSpec, v: Visits) -> bool:
    """Whether a tile at the start visits many times what one in the middle does: of keys, those that all rows see."""
    return _first_by_middle(spec, v) > 4


def _first_by_middle(spec: AttentionSpec, v: Visits) -> float:
    """How many times as many tiles the first tile of a long sequence visits as that in the middle; 0 where that is not
    known."""
    if v.may is not None or v.must is not None:
        return 0.0
    try:
        return _visited(spec, v, SHORT, 0) / max(1, _visited(spec, v, SHORT))
    except KeyError:  # contents of a tensor
        return 0.0


def _visited(spec: AttentionSpec, v: Visits, length: int, middle: int | None = None) -> int:
    """Tiles that the query tile, or of visits of keys the key tile, in the `middle` of a sequence visits."""
    called = tile_names({*(p.name for p in spec.params), *spec.free_axes})
    given = {p.name: UNGIVEN if p.default is None else p.default for p in spec.scalars}
    middle = length // 2 if middle is None else middle
    places = {"first": middle, "last": middle + TILE - 1, "tile": middle // TILE, "TILE_Q": TILE, "TILE_K": TILE}
    program = {"b": 0, "h": 0, "h_kv": 0, "b_len": 1, "h_len": 1, "q_len": length, "k_len": length}
    env = Env(
        {**dict.fromkeys(spec.free_axes, UNGIVEN), **program, **given, **{called[n]: x for n, x in places.items()}}
    )
    for name, value in v.lets:
        env = env.plus(**{name: evaluate(value, env)})
    return sum(max(0, int(evaluate(s.end, env)) - int(evaluate(s.begin, env))) for s in (*v.masked, *v.full))
