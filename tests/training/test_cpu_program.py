"""The backward pass of the generated PyTorch program: numbers, what it keeps, and that equal calls give equal bits."""

from __future__ import annotations

import math
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attncc
from attncc import analysis, frontend
from attncc.codegen import parameter_names
from attncc.codegen.cpu_backward import render_cpu_backward
from attncc.ir import KernelPlan
from attncc.runtime.reference import has_lse, reference
from tests.backward import cases
from tests.backward.dense import attention, leaves

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
ROUNDING = {torch.bfloat16: 4e-3, torch.float32: 2e-7}  # of a parameter's own type
FORMS = [
    cases.Case("tanh", "attention a(t: f32[h, row, k] grad) { score tanh(s) + t[h, row, k] * s }",
               cases.draw(t=(cases.H, cases.Q, cases.K))),
    cases.Case("bare", "attention a { score exp(tanh(s)) mask k < q }"),
    cases.Case("elements", "attention a(t: f32[3] grad) { score s + t[0] * s + t[q % 3] * sigmoid(s) "
               "weight where(abs(q - k) < 5, 1, t[1]) }", cases.draw(t=(3,))),
    cases.Case("mixed", "attention a(x: float grad) { score s * where(k < q, x, 1) + max(s, x) }",
               lambda g: {"x": 0.7}),
    cases.Case("heads_apart", "attention a(n: i32[h], t: f32[h_kv, k] grad) { mask k < n[h] score s * t[h_kv, k] }",
               lambda g: {"n": torch.tensor([9, 40, 53, 0]).int(), "t": torch.rand(2, cases.K, generator=g)},
               heads=4, kv_heads=2),
]  # fmt: skip


def program(text: str, tile_q: int = 16, tile_k: int = 16, head_dim: int = 16, head_dim_v: int = 16):
    """(spec with consts bound, the file's text, its `backward`)"""
    spec = frontend.parse(text).spec
    spec = spec.bind({p.name: 16 for p in spec.consts if p.default is None})
    plan = KernelPlan("cpu", "fa2", "q_outer", tile_q, tile_k, 1, 1, head_dim, head_dim_v, "f32", direction="backward")
    source = render_cpu_backward(spec, analysis.visits(spec, "q"), plan, text)
    space: dict = {"__name__": "program"}
    exec(compile(source, "program", "exec"), space)
    return spec, source, space["backward"]


def inputs(case, dtype=torch.float32):
    g = torch.Generator().manual_seed(7)
    draw = partial(torch.randn, generator=g)
    q = draw(case.batch, case.heads, case.q_len, case.head_dim)
    k = draw(case.batch, case.kv_heads, case.k_len, case.head_dim)
    v = draw(case.batch, case.kv_heads, case.k_len, case.head_dim_v)
    d_out = draw(case.batch, case.heads, case.q_len, case.head_dim_v)
    d_lse = draw(case.batch, case.heads, case.q_len) if case.with_lse else None
    if case.poisoned:
        k[:, :, -case.poisoned :], v[:, :, -case.poisoned :] = case.poison, case.poison
    if case.strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        d_out = torch.tensor(0.7).expand(d_out.shape)
    return (q.to(dtype), k.to(dtype), v.to(dtype), d_out.to(dtype), d_lse), dict(case.make(g))


def wanted(spec, case, call, params):
    """(out, lse, gradients of q, k, v and the parameters marked grad), dense and in float64."""
    q, k, v, d_out, d_lse = call
    wide = leaves(q, k, v)
    given = {p.name: params.get(p.name, p.default) for p in spec.params if p.grad}
    given = {n: torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for n, x in given.items()}
    learned = {n: leaves(x)[0] for n, x in given.items()}
    seen = torch.arange(case.k_len)[:, None] < case.k_len - case.poisoned
    out, lse = attention(spec, wide[0], *(torch.where(seen, x, 0.0) for x in wide[1:]), {**params, **learned})
    loss = (out * d_out).sum()
    if d_lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(d_lse).sum()
    found = torch.autograd.grad(loss, [*wide, *learned.values()], allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), dict(zip(["q", "k", "v", *learned], found, strict=True))


def gradients(spec, backward, call, params, out, lse):
    q, k, v, d_out, d_lse = call
    spelled = parameter_names(spec) | {"seed": "seed"}
    d_q, d_k, d_v, more = backward(
        q, k, v, out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32), d_out, d_lse,
        **{spelled[n]: x for n, x in params.items()},
    )  # fmt: skip
    return {"q": d_q, "k": d_k, "v": d_v, **more}


def assert_right(case, dtype=torch.float32, part=1e-5):
    spec, _, backward = program(case.text)
    call, params = inputs(case, dtype)
    out, lse, want = wanted(spec, case, call, params)
    have = gradients(spec, backward, call, params, out, lse)
    assert have.keys() == want.keys()
    for name, x in have.items():
        narrow = max(part, ROUNDING.get(x.dtype, 0.0))
        assert x.shape == want[name].shape
        assert (x.double() - want[name]).abs().sum() <= narrow * want[name].abs().sum() + 1e-12, name
    for name, x in gradients(spec, backward, call, params, out, lse).items():
        assert torch.equal(x, have[name]), name


@pytest.mark.parametrize("case", [*cases.QUICK, *cases.MORE, *FORMS], ids=lambda c: c.name)
def test_gradients(case):
    assert_right(case)


@pytest.mark.parametrize("case", [*cases.QUICK, *FORMS], ids=lambda c: c.name)
def test_gradients_in_float64(case):
    assert_right(case, torch.float64, 1e-12)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_each_file_of_the_library_checks_itself(path, capsys):
    _, source, _ = program(path.read_text(encoding="utf-8"), 64, 128)
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, path.stem, "exec"), {"__name__": "__main__"})
    assert not ended.value.code, capsys.readouterr().out


def test_a_file_that_is_wrong_says_so(capsys):
    _, source, _ = program(SPECS[0].read_text(encoding="utf-8"), 64, 128)
    with pytest.raises(SystemExit) as ended:
        exec(compile(source.replace("dp.sub_(delta)", "dp.add_(delta)"), "wrong", "exec"), {"__name__": "__main__"})
    assert ended.value.code, capsys.readouterr().out


def test_excluded_pairs_give_exactly_nothing():
    """Rows and keys that are left out may hold anything, in the gradient too; what is kept passes NaN on."""
    _, _, backward = program("attention a { mask k < 20 and row >= 5 }")
    call, _ = inputs(cases.Case("a", ""))
    q, k, v, d_out, _ = call
    out = torch.zeros(2, 2, 37, 16)
    lse = torch.logsumexp((q @ k.repeat_interleave(2, 1).mT / 4)[..., :20], -1)
    lse[:, :, :5] = -math.inf
    clean = backward(q, k, v, out, lse, d_out)[:3]
    for x, at in ((q, slice(0, 5)), (d_out, slice(0, 5)), (k, slice(20, None)), (v, slice(20, None))):
        x[:, :, at] = math.nan
    for x, y in zip(backward(q, k, v, out, lse, d_out)[:3], clean, strict=True):
        assert torch.equal(x, y)
    assert not clean[0][:, :, :5].any() and not clean[1][:, :, 20:].any() and not clean[2][:, :, 20:].any()
    d_out[0, 0, 9, 0] = math.nan
    d_q, d_k, d_v, _ = backward(q, k, v, out, lse, d_out)
    assert d_q[0, 0, 9].isnan().all() and d_k[0, 0, :20].isnan().all() and d_v[0, 0, :20, 0].isnan().all()
    assert d_q[0, 0, 10:].isfinite().all() and d_v[0, 0, :, 1:].isfinite().all() and d_k[1].isfinite().all()


UNSEEN = [
    "attention a { mask k <= q - 20 }",
    "attention a(t: f32[h] grad) { mask k <= q - 20 score s * t[h] + tanh(s) weight t[h] }",
    "attention a { mask k <= q - 20 softmax sigmoid(0.5) }",
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", UNSEEN)
def test_a_row_that_is_not_finite_reaches_the_keys_that_it_sees_alone(text, bad):
    """In the same tile as others: row 34 sees keys up to 30, and what it holds goes no further."""
    spec, _, backward = program(text)
    params = {p.name: torch.tensor([0.5, 1.5]) for p in spec.params}
    (q, k, v, d_out, _), _ = inputs(cases.Case("a", text))
    d_lse = torch.ones(2, 2, 37) if has_lse(spec) else None
    for which in ("q", "d_out", "d_lse")[: 3 if d_lse is not None else 2]:
        given = {"q": q.clone(), "d_out": d_out.clone(), "d_lse": None if d_lse is None else d_lse.clone()}
        given[which][0, 0, 34] = bad
        out, lse = (x.float() for x in reference(spec, given["q"], k, v, params))
        have = gradients(spec, backward, (given["q"], k, v, given["d_out"], given["d_lse"]), params, out, lse)
        given[which][0, 0, 34] = 0.0  # beyond what it sees, this row is as good as any other
        call = (given["q"], k, v, given["d_out"], given["d_lse"])
        out, lse = (x.float() for x in reference(spec, given["q"], k, v, params))
        want = gradients(spec, backward, call, params, out, lse)
        for name in "kv":
            assert torch.equal(have[name][0, 0, 31:], want[name][0, 0, 31:]), (which, name)
            assert torch.equal(have[name][1], want[name][1]), (which, name)
        assert torch.equal(have["q"][0, 0, :34], want["q"][0, 0, :34]), which
        seen = [have[name][0, 0, :31].isfinite().all() for name in "qkv"]
        assert not all(seen), which


@pytest.mark.parametrize("case", [c for c in cases.QUICK if not c.strided], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_are_sums_in_float32_rounded_once(case, dtype):
    spec, _, backward = program(case.text)
    (q, k, v, d_out, d_lse), params = inputs(case, dtype)
    out, lse, _ = wanted(spec, case, (q, k, v, d_out, d_lse), params)
    out = out.to(dtype).float()
    have = gradients(spec, backward, (q, k, v, d_out, d_lse), params, out, lse)
    wide = gradients(spec, backward, (*(x.float() for x in (q, k, v, d_out)), d_lse), params, out, lse)
    for name, x in have.items():
        assert torch.equal(x, wide[name].to(x.dtype)), name


def test_16_bit_gradients_of_sparse_weights_look_at_every_key_for_each_part():
    attn = attncc.compile("attention a { mask k <= q softmax sparsemax }")
    narrow = [torch.randn(1, 1, 300, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
    found = []
    for *call, d_out in (narrow, [x.float() for x in narrow]):
        call = [x.requires_grad_() for x in call]
        found.append(torch.autograd.grad(attn(*call), call, d_out))
    for x, wide in zip(*found, strict=True):
        assert torch.equal(x, wide.bfloat16())


class Largest(TorchDispatchMode):
    """The largest storage that an operator made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return made


def test_memory_is_linear_in_length():
    _, _, backward = program("attention a(t: f32[h] grad) { score s * t[h] mask k <= q }")
    sizes = []
    for length in (256, 512):
        q, k, v, d_out = (torch.ones(1, 1, length, 16) for _ in range(4))
        with Largest() as largest:
            backward(q, k, v, q, torch.zeros(1, 1, length), d_out, t=torch.ones(1))
        sizes.append(largest.bytes)
    assert sizes == [256 * 16 * 4, 512 * 16 * 4]


class Peak(TorchDispatchMode):
    """The most bytes that were held at once of what operators made since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known and not self._given(storage, args):
                self.known.add(storage._cdata)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return made

    @staticmethod
    def _given(storage, args) -> bool:
        tensors = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return any(x.untyped_storage()._cdata == storage._cdata for x in tensors)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.held -= size


FEW = "mask 0 <= q - k < 64 and k >= 65000"
CAPPED = f"score 20.0 * tanh(s / 20.0) {FEW}"


@pytest.mark.parametrize(
    "heads, kv_heads, head, body",
    [(1, 1, 16, CAPPED), (1, 1, 64, CAPPED), (2, 1, 128, CAPPED),
     (1, 1, 64, f"{FEW} dropout 0.1"), (1, 1, 64, f"{FEW} softmax sparsemax")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beyond_what_a_call_returns(dtype, heads, kv_heads, head, body):
    """At most 16 bytes for each of 65536 rows of a head in all, tiles and the lse included; most rows see no key."""
    attn = attncc.compile(f"attention a(t: f32[h] grad) {{ score s * t[h] {body} }}")
    rows, params = 65536, {"t": torch.ones(heads, requires_grad=True), **({"seed": 1} if "dropout" in body else {})}
    q = torch.randn(1, heads, rows, head, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, rows, head, dtype=dtype, requires_grad=True) for _ in range(2))
    ready = attn.ready(q, k, v, params)
    with torch.no_grad(), Peak() as forward:
        out, lse = attn._launch(ready, q, k, v, params)
    d_out = torch.ones((), dtype=dtype).expand(out.shape)
    with torch.no_grad(), Peak() as backward:
        found = attn.gradients(ready, (q, k, v, out, lse, d_out, None), params)
    assert lse.nbytes < forward.peak - out.nbytes <= 16 * heads * rows
    assert 0 < backward.peak + lse.nbytes - sum(x.nbytes for x in found[:3]) <= 16 * heads * rows
