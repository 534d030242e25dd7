"""Numbers against float64: a spec's program on random calls of many shapes, types and memory layouts.

Bounds: float32 within 1e-5 of the right answer's l1; a 16-bit result at most twice the error of an unfused computation
in the same type; lse within 1e-5; what the mask leaves empty is exactly 0 and its lse exactly -inf or the sink; a view
gives the bits of its contiguous copy; arguments stay as they are. Outputs are filled with NaN before each call.
Gradients: see check_gradients; tangents: see check_tangents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attncc.analysis.tangent import unbuilt
from attncc.errors import CheckError
from attncc.ir import AttentionSpec, Layout, Shape
from attncc.runtime.attention import Attention
from attncc.runtime.check_gradients import Errors, Once, gradient_errors
from attncc.runtime.check_packed import packed
from attncc.runtime.check_tangents import tangent_errors
from attncc.runtime.draw import DTYPES, Draw
from attncc.runtime.poison import poisoned
from attncc.runtime.reference import (
    alpha_of,
    chosen,
    environment,
    evaluate,
    has_lse,
    keep_mask,
    reference,
    scores,
    sparse,
    summed,
    undivided,
    weighed,
    weighted_values,
)

Run = Callable[..., tuple[Tensor, Tensor]]
TYPES = {"cpu": ("f32", "f64", "f16", "bf16"), "interpreter": ("f32", "f16"), "cuda": ("f32", "f16", "bf16")}
SEEDS = (0, 1)
CONST = 4  # for a const parameter that has neither a value nor a default
RELATIVE = {"f32": 1e-5, "f64": 1e-12}
LSE = {"f64": 1e-12}  # else 1e-5: it is float32 whatever the inputs


def _shape(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, head_dim: int, head_dim_v: int) -> Shape:
    return Shape(batch, heads, kv_heads, q_len, k_len, head_dim, head_dim_v, "f32")


SMALL = (  # more keys than queries and the other way round, one of each, every kind of group, odd head sizes
    _shape(2, 4, 2, 33, 47, 32, 16), _shape(1, 1, 1, 1, 1, 16, 16),
    _shape(1, 6, 2, 21, 5, 8, 24), _shape(2, 3, 3, 1, 129, 40, 40),
)  # fmt: skip
SHAPES = {
    "interpreter": (*SMALL, _shape(1, 2, 1, 70, 150, 16, 16)),
    "cpu": (*SMALL, _shape(1, 4, 1, 300, 530, 16, 16)),
    "cuda": (
        *SMALL, _shape(1, 4, 1, 300, 530, 64, 64), _shape(1, 2, 2, 200, 333, 256, 64),
        _shape(2, 8, 2, 515, 515, 128, 128),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One call. Errors and bounds are sums of absolute differences over the tensor; `faults` says what is wrong.

    `gradients`, tangents among them, is empty where they were not asked for.
    """

    shape: str
    dtype: str
    layout: str
    seed: int
    out_error: float
    out_bound: float
    lse_error: float
    lse_bound: float
    faults: tuple[str, ...]
    gradients: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # error and bound by name

    @property
    def passed(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class Report:
    """All calls of one spec on one device."""

    name: str
    device: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(r.passed for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(r), "faults": list(r.faults), "passed": r.passed} for r in self.rows]
        return {"name": self.name, "device": self.device, "passed": self.passed, "rows": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        rows = ({n: v for n, v in r.items() if n != "passed"} for r in data["rows"])
        whole = ({**r, "faults": tuple(r["faults"]), "gradients": {n: tuple(e) for n, e in r["gradients"].items()}}
                 for r in rows)  # fmt: skip
        return cls(data["name"], data["device"], tuple(Row(**r) for r in whole))

    def __str__(self) -> str:
        good = sum(r.passed for r in self.rows)
        lines = [f"{self.name} on {self.device}: {good} of {len(self.rows)} calls within bounds"]
        for r in self.rows:
            state = "ok  " if r.passed else "FAIL"
            lines.append(
                f"  {state} {r.shape}  {r.dtype} {r.layout} seed {r.seed}: "
                f"output {r.out_error:.1e} (bound {r.out_bound:.1e}), lse {r.lse_error:.1e} (bound {r.lse_bound:.1e})"
                + "".join(f", d_{n} {e:.1e} (bound {b:.1e})" for n, (e, b) in r.gradients.items())
                + "".join("; " + f for f in r.faults)
            )
        return "\n".join(lines)


def check(
    spec: AttentionSpec, device: str = "cpu", *, seeds: Sequence[int] = SEEDS, shapes: Sequence[Shape] | None = None,
    values: Mapping[str, Any] | None = None, run: Run | None = None, gradients: bool | None = None,
    differences: bool = False, tangents: bool | None = None,
) -> Report:  # fmt: skip
    """Compare a spec's program with the float64 reference on `device`: cpu | interpreter | cuda.

    `values` pins scalars and consts. `run(q, k, v, **params) -> (out, lse)` is what is checked; left out, it is
    attncc.compile of the spec. `gradients` of q, k, v and parameters marked grad are checked too, unless `run` is given
    and they are not asked for; `differences` compares them with finite differences beside. `tangents`, of forward
    mode, are checked where `gradients` are by themselves and the spec's are built.
    The interpreter runs in a process of its own, since it must be chosen before triton is imported. Raises CheckError
    where that process breaks; wrong numbers are rows of the report, not errors.
    """
    values = dict(values or {})
    consts = {p.name: int(values.pop(p.name, CONST if p.default is None else p.default)) for p in spec.consts}
    spec = spec.bind(consts)
    shapes = SHAPES[device] if shapes is None else tuple(shapes)
    if device == "interpreter" and run is None and os.environ.get("TRITON_INTERPRET") != "1":
        wanted = {"gradients": gradients, "differences": differences, "tangents": tangents}
        return _in_interpreter(spec, seeds, shapes, values, wanted)
    backward = (run is None and spec.precision.kept is None) if gradients is None else gradients
    forward_mode = (run is None and backward and not unbuilt(spec)) if tangents is None else tangents
    run = run or compiled(spec, device)
    spec = replace(spec, layout=Layout(rows=spec.layout.rows))  # as the reference knows it
    rows = [
        call(spec, run, device, shape, dtype, layout, seed, values, backward, differences, forward_mode)
        for shape, dtype, layout, seed in trials(spec, device, seeds, shapes)
    ]
    return Report(spec.name, device, tuple(rows))


def trials(
    spec: AttentionSpec, device: str, seeds: Sequence[int], shapes: Sequence[Shape]
) -> Iterator[tuple[Shape, str, str, int]]:
    """Every shape in the first type with every seed; the first and the last in the others; the first in each layout."""
    types = (spec.precision.inputs,) if spec.precision.inputs in DTYPES else TYPES[device]
    for seed in seeds:
        for shape in shapes:
            yield shape, types[0], "contiguous", seed
    for dtype in types[1:]:
        for shape in dict.fromkeys((shapes[0], shapes[-1])):
            yield shape, dtype, "contiguous", seeds[0]
    for layout in ("transposed", "sliced", "expanded"):
        yield shapes[0], types[-1 if layout == "sliced" else 0], layout, seeds[-1]


@dataclass(frozen=True)
class Compiled:
    """A call as users make it. Its gradients are a plain call's, though `poisoned` sets torch's switch for equal bits,
    or with `deterministic` those of equal bits."""

    attention: Attention
    deterministic: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
        if self.attention.spec.ragged:
            return packed(self.attention, self.deterministic)(q, k, v, **params)
        return self.attention.both(q, k, v, params, deterministic=self.deterministic)

    def apart(self, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> Compiled | None:
        """The call with equal bits, where another kernel makes its gradients."""
        if self.attention.spec.ragged:  # for which there is one
            return None
        ready = self.attention.ready(q, k, v, params)
        launches = {ready.kind.backward(ready.narrow, asked) for asked in (False, True)}
        return replace(self, deterministic=True) if len(launches) > 1 else None


def compiled(spec: AttentionSpec, device: str) -> Compiled:
    """What attncc.compile makes of the spec's text."""
    from attncc import frontend

    parsed = frontend.parse(frontend.canonical(spec))
    frontend.refuse_unbuilt(parsed)
    return Compiled(Attention(parsed, {}, device if device == "interpreter" else None))


def call(
    spec: AttentionSpec, run: Run, device: str, shape: Shape, dtype: str, layout: str, seed: int,
    values: Mapping[str, Any], gradients: bool = False, differences: bool = False, tangents: bool = False,
    once: Once = lambda name, make: make(),
) -> Row:  # fmt: skip
    """One call and its verdict. Finite differences are taken in float32 and float64, 16 bits are too few for them.

    `once` may keep what is right for another `run` of the same call.
    """
    place = "cuda" if device == "cuda" else "cpu"
    draw = Draw(spec, seed, values)
    q, k, v = draw.inputs(shape, dtype, layout, place)
    params = draw.params(shape, place)
    given = {"q": q, "k": k, "v": v, **{n: x for n, x in params.items() if isinstance(x, Tensor)}}
    before = {n: x.clone() for n, x in given.items()}
    with torch.no_grad(), poisoned():
        out, lse = run(q, k, v, **params)
        same = run(q.contiguous(), k.contiguous(), v.contiguous(), **params) if layout != "contiguous" else (out, lse)
    faults = [f"{n} was written to" for n, x in given.items() if not torch.equal(_bits(x), _bits(before[n]))]
    for name, x, y in (("out", out, same[0]), ("lse", lse, same[1])):
        if not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)):
            faults.append(f"{name} differs from that of contiguous inputs")
    want, want_lse = once("right", lambda: reference(spec, q, k, v, params))
    if out.dtype != q.dtype or out.shape != want.shape or lse.shape != want_lse.shape:
        faults.append(f"out is {list(out.shape)} {out.dtype}, lse {list(lse.shape)}: wrong shape or type")
        return _row(shape, dtype, layout, seed, (0.0, 0.0, 0.0, 0.0), faults)
    faults += _empty_rows(spec, q, k, params, out, lse, want_lse)
    bound = once("bound", lambda: out_bound(spec, q, k, v, params, want, dtype))
    errors = out_error(out, want), bound, *lse_error(lse, want_lse, dtype)
    if not errors[0] <= errors[1]:
        faults.append("out is beyond its bound")
    if not errors[2] <= errors[3]:
        faults.append("lse is beyond its bound")
    found: Errors = {}
    if gradients:
        by_differences = differences and dtype in RELATIVE
        found, more = gradient_errors(spec, run, (q, k, v), params, seed, by_differences, once)
        faults += more
        again = run.apart(q, k, v, params) if isinstance(run, Compiled) else None
        if again is not None:
            others, more = gradient_errors(spec, again, (q, k, v), params, seed, once=once)
            found |= {f"{n}, deterministic": error for n, error in others.items()}
            faults += [f"{fault}, deterministic" for fault in more]
    if tangents:
        along, more = tangent_errors(spec, run, (q, k, v), params, seed)
        found, faults = {**found, **along}, faults + more
    return replace(_row(shape, dtype, layout, seed, errors, faults), gradients=found)


def _row(
    s: Shape, dtype: str, layout: str, seed: int, errors: tuple[float, float, float, float], faults: Sequence[str]
) -> Row:
    text = f"B{s.batch} H{s.heads}/{s.kv_heads} Q{s.q_len} K{s.k_len} D{s.head_dim}/{s.head_dim_v}"
    return Row(text, dtype, layout, seed, *errors, tuple(faults))


def _bits(x: Tensor) -> Tensor:
    """What can be compared: PyTorch compares no 8-bit floats."""
    return x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x


def out_error(out: Tensor, want: Tensor) -> float:
    """Sum of |out - want|; a NaN, or an infinity that differs, is an infinite error."""
    return _difference(out.to(torch.float64), want)


def lse_error(lse: Tensor, want: Tensor, dtype: str) -> tuple[float, float]:
    """Sum of |lse - want| and its bound: a part of each value's size, or of 1 where it is smaller."""
    finite = want[torch.isfinite(want)]
    return _difference(lse.to(torch.float64), want), LSE.get(dtype, 1e-5) * float(finite.abs().clamp(min=1).sum())


def _difference(x: Tensor, want: Tensor) -> float:
    same = (x == want) | (x.isnan() & want.isnan())
    return float(torch.where(same, 0.0, (x - want).abs().nan_to_num(torch.inf, torch.inf)).sum())


def out_bound(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], want: Tensor, dtype: str
) -> float:
    """The error that the output may have, as a sum over the tensor."""
    l1 = float(want[torch.isfinite(want)].abs().sum())
    if dtype in RELATIVE:
        return RELATIVE[dtype] * l1
    rounding = torch.finfo(q.dtype).eps / 2 * l1  # of the right answer itself: an unfused computation may be lucky
    return 2 * out_error(unfused(spec, q, k, v, params), want) + rounding


def unfused(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]) -> Tensor:
    """The output of a computation step by step that rounds every intermediate to the inputs' type."""
    env = environment(spec, q, k, params)
    to = lambda x: x.to(q.dtype).to(torch.float64)
    plain = replace(spec, scores=(), scale=None)
    s = to(to(scores(plain, q, k, env) * q.shape[-1] ** 0.5) * _scale(spec, q, env))
    for score in spec.scores:
        s = to(evaluate(score, env.having(s=s)).expand(s.shape))
    keep = keep_mask(spec, env, tuple(s.shape)) & (s != -torch.inf)
    if (alpha := alpha_of(spec)) is not None:
        p = to(sparse(torch.where(keep, s, -torch.inf), alpha)[0])
        keep = chosen(spec, p, keep)
    elif summed(spec):
        p = torch.where(keep, to(undivided(spec, s, env)), 0.0)
        total = p.sum(-1, keepdim=True)
        p = to(p / torch.where(total == 0, 1.0, total))
    elif has_lse(spec):
        _, lse = reference(spec.reporting(()), q, k, v, params)
        p = torch.where(keep, to(torch.exp(s - lse[..., None])), 0.0)
    else:
        p = torch.where(keep, to(undivided(spec, s, env)), 0.0)
    p = to(weighed(spec, p, keep, env, params))
    return to(weighted_values(p, v, keep))


def _scale(spec: AttentionSpec, q: Tensor, env: Any) -> Any:
    return q.shape[-1] ** -0.5 if spec.scale is None else evaluate(spec.scale, env)


def _empty_rows(
    spec: AttentionSpec, q: Tensor, k: Tensor, params: Mapping[str, Any], out: Tensor, lse: Tensor, want: Tensor
) -> list[str]:
    """A row that sees nothing gives exactly 0, its lse -inf or the sink."""
    env = environment(spec, q, k, params)
    empty = ~keep_mask(spec, env, (*q.shape[:3], k.shape[2])).any(-1)
    faults = []
    if (out[empty] != 0).any():
        faults.append("a row that sees nothing is not exactly 0")
    if (torch.isneginf(lse) != torch.isneginf(want)).any():
        faults.append("lse is -inf in the wrong rows")
    return faults


def _in_interpreter(
    spec: AttentionSpec, seeds: Sequence[int], shapes: Sequence[Shape], values: Mapping[str, Any],
    wanted: Mapping[str, bool | None],
) -> Report:  # fmt: skip
    """The same check in a process whose triton interprets."""
    from attncc import frontend

    request = {"text": frontend.canonical(spec), "seeds": list(seeds), "values": dict(values),
               "shapes": [asdict(s) for s in shapes], "wanted": dict(wanted)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "attncc.runtime.check"], input=json.dumps(request), text=True, capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CheckError(f"the interpreter's process ended with status {done.returncode}:\n{done.stderr.strip()}")
    return Report.from_json(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """The other side of `_in_interpreter`: a request on standard input, a report on standard output."""
    from attncc import frontend

    request = json.load(sys.stdin)
    shapes = [Shape(**s) for s in request["shapes"]]
    spec = frontend.parse(request["text"]).spec
    report = check(spec, "interpreter", seeds=request["seeds"], shapes=shapes, values=request["values"],
                   **request["wanted"])  # fmt: skip
    print(json.dumps(report.to_json()))


if __name__ == "__main__":
    main()
