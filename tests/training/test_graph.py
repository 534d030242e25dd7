"""Calls inside graphs: torch.compile without a break, torch.export and reload, the registered operators themselves."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import attncc
from attncc.runtime import operator
from tests.training.test_autograd import TEXT, call, learned

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture(scope="module")
def attn():
    return attncc.compile(TEXT)


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_one_graph_with_every_gradient(attn):
    f = lambda q, k, v, **params: (attn(q * 1.0, k, v, **params) ** 2).sum()
    inputs, params = call()
    want = torch.autograd.grad(f(*inputs, **params), learned(inputs, params))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    have = torch.autograd.grad(compiled(*inputs, **params), learned(inputs, params))
    assert all(torch.equal(x, y) for x, y in zip(have, want, strict=True))
    for changed in ({"window": 7}, {"cap": 2.5}, {"cap": 3.5}):  # numbers, of a tensor before
        params = {**params, **changed}
        assert torch.equal(compiled(*inputs, **params), f(*inputs, **params))


@pytest.mark.parametrize("gain", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_numbers_of_other_libraries_in_a_graph(gain):
    attn = attncc.compile("attention x(window: int, gain: float) { mask q - k < window score s * gain }")
    q = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda q: attn(q, q, q, window=np.int64(3), gain=gain), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), attn(q, q, q, window=3, gain=0.5))


def test_lse_and_other_lengths_in_one_graph(attn):
    compiled = torch.compile(
        lambda q, k, v, **p: attn(q, k, v, return_lse=True, **p), fullgraph=True, backend="aot_eager", dynamic=True
    )
    (q, k, v), params = call(grad=False)
    for rows in (37, 20, 9):
        have, want = (
            f(q[:, :, :rows], k, v, **params) for f in (compiled, lambda *x, **p: attn(*x, return_lse=True, **p))
        )
        assert torch.equal(have[0], want[0]) and torch.equal(have[1], want[1])


def test_what_a_graph_refuses(attn):
    plain = attncc.compile("attention x(slopes: f32[h]) { score s - slopes[h] * (q - k) }")
    inputs, params = call()
    compiled = torch.compile(lambda *x: plain(*x, slopes=params["slopes"]), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="slopes requires a gradient"):
        compiled(*inputs)
    checked = torch.compile(lambda *x: attn(*x, validate=True, **params), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="validate=True reads tensors"):
        checked(*inputs)


def test_export_and_reload():
    causal = attncc.load(SPECS / "causal.attn")

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    inputs, _ = call(grad=False)
    rows = ({2: torch.export.Dim.DYNAMIC},) * 3
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(), inputs, dynamic_shapes=rows), file)
    file.seek(0)
    operator.attention_of.cache_clear()
    reloaded = torch.export.load(file).module()
    q, k, v = inputs
    assert torch.equal(reloaded(q, k, v), causal(q, k, v))
    assert torch.equal(reloaded(q[:, :, :9], k, v), causal(q[:, :, :9], k, v))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with program.pt2, and call.pt: its inputs, and what it gives."""
    causal, folder = attncc.load(SPECS / "causal.attn"), tmp_path_factory.mktemp("exported")

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    inputs, _ = call(grad=False)
    torch.export.save(torch.export.export(Module(), inputs), folder / "program.pt2")
    torch.save((*inputs, causal(*inputs)), folder / "call.pt")
    return folder


@pytest.mark.parametrize("imports", ["import torch, attncc", "import attncc.ops, torch"])
def test_an_exported_program_loads_in_a_process_that_imported_attncc_alone(exported, imports):
    text = f"""{imports}
import sys
assert "attncc.frontend" not in sys.modules  # what a program that calls nothing would wait for
*given, out = torch.load({str(exported / "call.pt")!r})
assert torch.equal(torch.export.load({str(exported / "program.pt2")!r}).module()(*given), out)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_operators_are_registered_as_pytorch_asks(attn, dtype):
    inputs, params = call(dtype)
    tensors = {n: x for n, x in params.items() if isinstance(x, torch.Tensor)}
    args = (attn.text, "", ",".join([*tensors, "window"]), *inputs, list(tensors.values()), [20], [])
    torch.library.opcheck(operator._attention, args)
    out, lse = (x.detach() for x in torch.ops.attncc.attention(*args))
    (q, k, v), params = call(dtype, grad=False)
    plain = [x for x in params.values() if isinstance(x, torch.Tensor)]
    args = (*args[:3], q, k, v, plain, *args[7:])
    for d_out, d_lse in ((out, lse), (torch.tensor(1.0, dtype=dtype).expand(out.shape), None), (None, lse)):
        torch.library.opcheck(operator._backward, (*args, out, lse, d_out, d_lse))


def test_an_operator_is_differentiable_once():
    inputs, _ = call()
    text = attncc.load(SPECS / "causal.attn").text
    out, _ = torch.ops.attncc.attention(text, "", "", *inputs, [], [], [])
    (d_q,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        d_q.sum().backward()
