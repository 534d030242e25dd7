"""`attn.varlen`: what it takes and refuses, graphs, and the same results as dense calls."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import attncc
from attncc.errors import SpecError
from attncc.runtime import operator
from tests.varlen.sequences import starts

SPECS = Path(__file__).parents[2] / "specs"
ROWS, KEYS = (0, 5, 70, 1, 0), (3, 5, 90, 0, 0)
CU = starts(ROWS), starts(KEYS)
TEXT = """attention several(window: int, cap: float grad, slopes: f32[h], c: f32[b, h, row] grad, t: f32[b, k] grad) {
    score cap * tanh(s / cap) - slopes[h] * (q - k) + c[b, h, row] * s + t[b, q] - t[b, k]
    mask  0 <= q - k < window
}"""


def draw(grad: bool = True, dtype: torch.dtype = torch.float32):
    g = torch.Generator().manual_seed(1)
    sizes = (sum(ROWS), 4, 16), (sum(KEYS), 2, 16), (sum(KEYS), 2, 24)
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in sizes)
    params = {
        "cap": torch.tensor(3.0, dtype=torch.float64).requires_grad_(grad), "slopes": torch.rand(4, generator=g) / 9,
        "c": torch.randn(4, sum(ROWS), generator=g).requires_grad_(grad),
        "t": torch.randn(sum(KEYS), generator=g).requires_grad_(grad), "window": 20,
    }  # fmt: skip
    return (q, k, v), params


@pytest.fixture(scope="module")
def attn():
    return attncc.compile(TEXT)


def leaves(inputs, params):
    return [*inputs, *(params[n] for n in ("cap", "c", "t"))]


def one_by_one(attn, inputs, params, **more):
    """The same by dense calls, one for each sequence."""
    outs, lses = [], []
    for (a, b), (c, d) in zip(*(pairwise(x.tolist()) for x in CU), strict=True):
        one = (x[i:j].transpose(0, 1)[None] for x, i, j in zip(inputs, (a, c, c), (b, d, d), strict=True))
        mine = {**params, "c": params["c"][None, :, a:b], "t": params["t"][None, c:d]}
        out, lse = attn(*one, return_lse=True, **mine, **more)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def test_equal_to_dense_calls_with_every_gradient(attn):
    inputs, params = draw()
    out, lse = attn.varlen(*inputs, *CU, return_lse=True, **params)
    want, want_lse = one_by_one(attn, inputs, params)
    assert out.shape == (sum(ROWS), 4, 24) and lse.shape == (4, sum(ROWS))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    back = torch.randn(out.shape), torch.where(lse.isfinite(), torch.randn(lse.shape), 0.0)
    have = torch.autograd.grad([out, lse], leaves(inputs, params), back)
    for x, y in zip(have, torch.autograd.grad([want, want_lse], leaves(inputs, params), back), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, atol=1e-5)


def test_equal_to_the_same_batch_padded():
    attn = attncc.compile("attention causal { align start mask k <= q }")
    lengths = [5, 0, 33]
    q, k, v = (torch.randn(38, 2, 16) for _ in range(3))
    out = attn.varlen(q, k, v, starts(lengths))
    padded = [torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v)]
    whole = attn(*padded).transpose(1, 2)
    assert torch.allclose(out, torch.cat([x[:n] for x, n in zip(whole, lengths, strict=True)]), atol=1e-6)


def test_dropout_is_that_of_the_same_batch_padded():
    attn = attncc.compile("attention dropped { align start mask k <= q dropout 0.4 }")
    lengths = [5, 0, 33]
    q, k, v = (torch.randn(38, 2, 16, requires_grad=True) for _ in range(3))
    padded = [torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v)]
    whole = attn(*padded, seed=3).transpose(1, 2)
    want = torch.cat([x[:n] for x, n in zip(whole, lengths, strict=True)])
    out = attn.varlen(q, k, v, starts(lengths), seed=3)
    assert torch.allclose(out, want, atol=1e-6)
    for x, y in zip(*(torch.autograd.grad((o * o).sum(), (q, k, v)) for o in (out, want)), strict=True):
        assert (x - y).abs().sum() <= 1e-5 * y.abs().sum()


def test_the_numbers_are_those_of_the_sequence():
    """b, and tensors with an axis b and none that is packed; one table [k] for all, as long as it is."""
    text = """attention own(w: int, n: i32[b], table: f32[k], bias: f32[h, row, k]) {
        mask  k < n[b] + b and k < k_len - w
        score s + table[k] * b_len + table[q + 40] + bias[h, row, k]
    }"""
    attn = attncc.compile(text)
    q, k, v = (torch.randn(50, 2, 16) for _ in range(3))
    n, table, bias = torch.tensor([3, 9, 20]).int(), torch.randn(40), torch.randn(2, 9, 40)
    lengths = [10, 15, 25]
    have = attn.varlen(q, k, v, starts(lengths), n=n, table=table, bias=bias, w=2)
    at = 0
    for b, length in enumerate(lengths):
        rows, keys = torch.arange(length)[:, None], torch.arange(length)
        one_q, one_k, one_v = (x[at : at + length].transpose(0, 1).double() for x in (q, k, v))
        read = lambda i: torch.where((i >= 0) & (i < 40), table[i.clamp(0, 39)], 0.0)
        cells = torch.zeros(2, 40, 40)
        cells[:, :9] = bias
        s = one_q @ one_k.mT / 4 + read(keys) * 3 + read(rows + 40) + cells[:, :length, :length]
        keep = (keys < n[b] + b) & (keys < length - 2)
        want = s.masked_fill(~keep, -torch.inf).softmax(-1) @ one_v
        assert torch.allclose(have[at : at + length].transpose(0, 1).double(), want, atol=1e-5)
        at += length


def test_strides_and_types(attn):
    inputs, params = draw(grad=False)
    want = attn.varlen(*inputs, *CU, **params)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    cu = [x.repeat_interleave(2)[::2] for x in CU]
    more = {**params, "c": params["c"].mT.contiguous().mT, "t": params["t"].repeat_interleave(2)[::2]}
    assert torch.equal(attn.varlen(*strided, *cu, **more), want)
    for dtype in (torch.bfloat16, torch.float64):
        (q, k, v), _ = draw(False, dtype)
        out = attn.varlen(q, k, v, *CU, **params)
        assert out.dtype == dtype and torch.allclose(out.float(), want, atol=3e-2)


def test_one_graph_with_every_gradient(attn):
    torch._dynamo.reset()
    f = lambda q, k, v, cu, **p: (attn.varlen(q * 1.0, k, v, *cu, **p) ** 2).sum()
    inputs, params = draw()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    have = torch.autograd.grad(compiled(*inputs, CU, **params, max_seqlen_q=80), leaves(inputs, params))
    want = torch.autograd.grad(f(*inputs, CU, **params), leaves(inputs, params))
    assert all(torch.equal(x, y) for x, y in zip(have, want, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["", " layout { q ragged  kv ragged }"])
def test_a_graph_needs_no_call_before_it(layout):
    """What it calls is made where it runs."""
    torch._dynamo.reset()
    (q, k, v), _ = draw(False)
    attn, other = (attncc.compile(f"attention a(n: const int) {{ mask k <= q + n }}{layout}", n=2) for _ in range(2))
    call = lambda attn: attn.varlen(q, k, v, *CU, return_lse=True)
    made = torch.compile(lambda: call(attn), fullgraph=True, backend="eager")()
    assert "packed" not in vars(attn) and all(map(torch.equal, made, call(other)))
    undivided = attncc.compile(f"attention a {{ softmax sigmoid(0.0) }}{layout}")
    with pytest.raises(Exception, match="divides by no sum, and has no lse"):
        torch.compile(lambda: call(undivided), fullgraph=True, backend="eager")()
    torch._dynamo.reset()


def test_operators_are_registered_as_pytorch_asks(attn):
    (q, k, v), params = draw()
    tensors = {"cu_seqlens_q": CU[0], "cu_seqlens_k": CU[1]}
    tensors |= {n: x for n, x in params.items() if isinstance(x, torch.Tensor)}
    args = (attn.packed.text, "", ",".join([*tensors, "window"]), q, k, v, list(tensors.values()), [20], [])
    torch.library.opcheck(operator._attention, args)
    out, lse = (x.detach() for x in torch.ops.attncc.attention(*args))
    plain = [x.detach() for x in tensors.values()]
    args = (*args[:3], q.detach(), k.detach(), v.detach(), plain, *args[7:], out, lse, out, None)
    torch.library.opcheck(operator._backward, args)


def bad(**changed):
    """The arguments of a call, some of them changed."""
    (q, k, v), params = draw(grad=False)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": CU[0], "cu_seqlens_k": CU[1], **params, **changed}


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"cu_seqlens_q": [0, 1]}, TypeError, "cu_seqlens_q must be an int32 tensor"),
        ({"cu_seqlens_q": CU[0].long()}, TypeError, "cu_seqlens_q must be int32, and is torch.int64"),
        ({"cu_seqlens_k": CU[1].to("meta")}, ValueError, "cu_seqlens_k must be on the device of q, cpu,"),
        ({"cu_seqlens_k": CU[1][None]}, ValueError, r"cu_seqlens_k must be \[B \+ 1\]"),
        ({"cu_seqlens_k": CU[1][:0]}, ValueError, r"cu_seqlens_k must be \[B \+ 1\]"),
        ({"cu_seqlens_k": CU[1][1:]}, ValueError, "cu_seqlens_k must have the length of cu_seqlens_q, 6, and has 5"),
        ({"cu_seqlens_q": CU[0] + 1}, ValueError, "cu_seqlens_q must start at 0, and starts at 1"),
        ({"cu_seqlens_q": starts((0, 9, -4, 71, 0))}, ValueError, "cu_seqlens_q must not fall.* 9 to 5 at index 3"),
        ({"cu_seqlens_k": starts((3, 5, 90, 0, 1))}, ValueError, "cu_seqlens_k must end at total_k, 98, and ends"),
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must end at total_k"),
        ({"max_seqlen_q": 69}, ValueError, "max_seqlen_q is 69, and cu_seqlens_q has a sequence of 70"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0"),
        ({"max_seqlen_k": 90.0}, TypeError, "max_seqlen_k must be an int"),
        ({"q": torch.randn(1, 4, 76, 16)}, ValueError, r"q must be \[total_q, H, D\]"),
        ({"v": torch.randn(97, 2, 16)}, ValueError, "v must have k's length total_k, 98, and has 97"),
        ({"c": torch.randn(4, 75)}, ValueError, r"c must have 76 \(total_q\) along axis 1 of f32\[h, row\]"),
        ({"t": torch.randn(5, 98)}, ValueError, r"t must have the axes f32\[k\], and has shape \[5, 98\]"),
        ({"windw": 3}, TypeError, "no parameter 'windw': did you mean window"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(attn, changed, kind, said):
    with pytest.raises(kind, match=said):
        attn.varlen(**bad(**changed))


@pytest.mark.parametrize("body", ["mask k < k_len * w", "mask k < max(b_len * k_len * w, n)", "score s + w * k_len"])
def test_an_int_of_a_sequence_that_64_bits_do_not_hold_is_named(body):
    """On the CPU, where its lengths are known; the first sequence is too short for it."""
    attn, x = attncc.compile(f"attention x(w: int, t: f32[n]) {{ {body} score s + t[0] }}"), torch.zeros(6, 1, 16)
    attn.varlen(x, x, x, starts((1, 5)), w=2**58, t=torch.ones(3))
    with pytest.raises(ValueError, match=r"x: .*k_len.* is \d+ with .*k_len = 5, w = 2305843009213693952, which does"):
        attn.varlen(x, x, x, starts((1, 5)), w=2**61, t=torch.ones(3))


def test_layouts_of_a_spec():
    packed = attncc.compile("attention causal { mask k <= q } layout { q ragged kv ragged }")
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    want = attncc.compile("attention causal { mask k <= q }").varlen(q, k, v, starts([4, 5]))
    assert torch.equal(packed.varlen(q, k, v, starts([4, 5])), want)
    with pytest.raises(TypeError, match="causal has the layout ragged: call its varlen"):
        packed(q[None], k[None], v[None])
    with pytest.raises(SpecError, match=r"E608.*bias in a packed call"):
        attncc.load(SPECS / "dense_bias.attn").varlen(q, k, v, starts([4, 5]), bias=torch.zeros(9, 9))


def test_a_second_derivative_is_refused(attn):
    inputs, params = draw()
    out = attn.varlen(*inputs, *CU, **params)
    (d_q,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        d_q.sum().backward()
