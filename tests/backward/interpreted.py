"""Run the generated backward pass in Triton's interpreter against dense autograd; TRITON_INTERPRET=1 must be set."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attncc import frontend
from attncc.analysis import kernel_visits
from attncc.codegen import parameter_names
from attncc.codegen.backward import render_backward
from attncc.ir import KernelPlan, PassPlan
from attncc.runtime.loader import load_module
from tests.backward.dense import attention, leaves

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # of a tensor's l1


@dataclass(frozen=True)
class Case:
    """One spec at one shape; `make` draws its tensors and scalars from a seeded generator."""

    name: str
    text: str
    make: Callable[[torch.Generator], Mapping[str, Any]] = field(default=lambda g: {})
    q_len: int = 37
    k_len: int = 53
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    tiles: tuple[int, int] = (32, 16)
    with_lse: bool = True
    int_bits: int = 32
    loads: str = "pointer"
    apart: bool = False  # dV by a kernel of its own
    strided: bool = False
    poisoned: int = 0  # keys at the end that no row sees, with this in k and v
    poison: float = math.nan


def module_of(case: Case, folder: Path) -> Any:
    spec = frontend.parse(case.text, case.name).spec.bind({})
    outer, inner = case.tiles
    plan = KernelPlan(
        target="sm_90", algorithm="fa2", loop="q_outer", tile_q=outer, tile_k=inner, stages=1, warps=4,
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, dtype="f32", int_bits=case.int_bits,
        direction="backward", loads=case.loads, dkdv=PassPlan(inner, outer, 1, 4, case.loads),
        dv=PassPlan(inner, outer, 1, 4, case.loads) if case.apart else None,
    )  # fmt: skip
    path = folder / f"{case.name}.py"
    path.write_text(render_backward(spec, kernel_visits(spec, "q"), kernel_visits(spec, "k"), plan, case.text))
    return spec, load_module(path, path.read_bytes(), f"backward_{case.name}")


def faults(case: Case) -> list[str]:
    """What differs from the dense gradients by more than the tolerance, in words."""
    g = torch.Generator().manual_seed(7)
    draw = partial(torch.randn, generator=g)
    q = draw(case.batch, case.heads, case.q_len, case.head_dim)
    k = draw(case.batch, case.kv_heads, case.k_len, case.head_dim)
    v = draw(case.batch, case.kv_heads, case.k_len, case.head_dim_v)
    d_out = draw(case.batch, case.heads, case.q_len, case.head_dim_v)
    d_lse = draw(case.batch, case.heads, case.q_len) if case.with_lse else None
    if case.poisoned:  # what no row sees need not be finite
        k[:, :, -case.poisoned :], v[:, :, -case.poisoned :] = case.poison, case.poison
    if case.strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        d_out = torch.tensor(0.7).expand(d_out.shape)
    params = dict(case.make(g))
    with tempfile.TemporaryDirectory() as folder:
        spec, module = module_of(case, Path(folder))
        wide = leaves(q, k, v)
        wanted = {p.name: leaves(torch.as_tensor(params.get(p.name, p.default)))[0] for p in spec.params if p.grad}
        seen = torch.arange(case.k_len)[:, None] < case.k_len - case.poisoned
        clean = (wide[0], *(torch.where(seen, x, 0.0) for x in wide[1:]))
        out, lse = attention(spec, *clean, {**params, **wanted})
        loss = (out * d_out).sum()
        if d_lse is not None:
            loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(d_lse).sum()
        every = [*wide, *wanted.values()]
        found = torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True)
        spelled = parameter_names(spec)
        given = {spelled.get(n, n): x for n, x in params.items()}
        call = (q, k, v, out.detach().float(), lse.detach().float(), d_out, d_lse)
        *mine, more = module.backward(*call, **given)
        again = module.backward(*call, **given)
    said = []
    names = ["d_q", "d_k", "d_v", *wanted]
    for name, have, same, want in zip(names, [*mine, *(more[n] for n in wanted)],
                                      [*again[:3], *(again[3][n] for n in wanted)], found, strict=True):  # fmt: skip
        error = (have.double() - want).abs().sum() / want.abs().sum().clamp(min=1e-30)
        if have.shape != want.shape:
            said.append(f"{name} has shape {list(have.shape)}, not {list(want.shape)}")
        elif not error < TOLERANCE[have.dtype] and (have != want).any():
            said.append(f"{name} is off by {error:.2e} of its l1")
        if not torch.equal(have, same):
            said.append(f"{name} differs from call to call")
    return said
