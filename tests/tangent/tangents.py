"""The generated tangent files, and what torch.func.jvp makes of dense attention in float64 beside them."""

from __future__ import annotations

from typing import Any

import torch

from attncc import frontend
from attncc.analysis import kernel_visits, visits
from attncc.analysis.tangent import learned
from attncc.codegen import parameter_names, tangent_names
from attncc.codegen.cpu_tangent import render_cpu_tangent
from attncc.codegen.tangent import render_tangent
from attncc.ir import KernelPlan
from attncc.runtime.loader import load_module
from attncc.runtime.reference import has_lse
from tests.backward.dense import attention
from tests.backward.interpreted import Case


def module_of(case: Case, folder, target: str) -> Any:
    """(spec with consts bound, the file as a module)"""
    spec = frontend.parse(case.text, case.name).spec
    spec = spec.bind({p.name: 16 for p in spec.consts if p.default is None})
    plan = KernelPlan(
        target=target, algorithm="fa2", loop="q_outer", tile_q=case.tiles[0], tile_k=case.tiles[1], stages=1, warps=4,
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, dtype="f32", int_bits=case.int_bits, direction="tangent",
    )  # fmt: skip
    make, seen = (render_cpu_tangent, visits(spec, "q")) if target == "cpu" else (render_tangent, kernel_visits(spec))
    path = folder / f"{case.name}_{target}.py"
    path.write_text(make(spec, seen, plan, case.text), encoding="utf-8")
    return spec, load_module(path, path.read_bytes(), f"tangent_{case.name}_{target}")


def drawn(case: Case, spec, dtype=torch.float32):
    """q, k, v, their tangents, all parameters by name, and the tangents of those marked grad."""
    g = torch.Generator().manual_seed(7)
    sizes = [
        (case.batch, case.heads, case.q_len, case.head_dim),
        (case.batch, case.kv_heads, case.k_len, case.head_dim),
    ]
    sizes.append((*sizes[1][:3], case.head_dim_v))
    qkv = [torch.randn(size, generator=g).to(dtype) for size in sizes]
    moves = [torch.randn(size, generator=g).to(dtype) for size in sizes]
    params = dict(case.make(g))
    if case.poisoned:  # what no row sees need not be finite, nor its tangent
        for x in (*qkv[1:], *moves[1:]):
            x[:, :, -case.poisoned :] = case.poison
    if case.strided:
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        moves[0] = torch.tensor(0.7, dtype=dtype).expand(moves[0].shape)
    given = {p.name: params.get(p.name, p.default) for p in learned(spec)}
    given = {n: x if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64) for n, x in given.items()}
    of_params = {n: torch.randn(x.shape, generator=g).to(x.dtype) for n, x in given.items()}
    return qkv, moves, params, given, of_params


def wanted(case: Case, spec, qkv, moves, params, given, of_params):
    """out, lse and their tangents in float64; where the lse is -inf, its tangent is 0."""
    seen = torch.arange(case.k_len)[:, None] < case.k_len - case.poisoned

    def dense(q, k, v, *values):
        clean = (torch.where(seen, x, 0.0) for x in (k, v))
        return attention(spec, q, *clean, {**params, **dict(zip(given, values, strict=True))})

    primals, tangents = (
        tuple(x.double() for x in xs) for xs in ((*qkv, *given.values()), (*moves, *of_params.values()))
    )
    (out, lse), (out_t, lse_t) = torch.func.jvp(dense, primals, tangents)
    return out, lse, out_t, torch.where(lse.isfinite(), lse_t, 0.0) if has_lse(spec) else lse


def faults(case: Case, folder, target: str, dtype=torch.float32, part: float = 1e-5) -> list[str]:
    """What differs from the dense tangents by more than this part of their l1, in words."""
    spec, module = module_of(case, folder, target)
    qkv, moves, params, given, of_params = drawn(case, spec, dtype)
    out, lse, *want = wanted(case, spec, qkv, moves, params, given, of_params)
    called, moved = parameter_names(spec), tangent_names(spec)
    named = {called[n]: x for n, x in params.items()}
    named |= {moved[n]: x if spec.param(n).is_tensor else x.item() for n, x in of_params.items()}
    statistics = dtype if dtype == torch.float64 else torch.float32
    call = (*qkv, out.to(dtype), lse.to(statistics), *moves)
    have, again = (module.tangent(*call, **named) for _ in range(2))
    said = []
    for name, x, same, y in zip(("out_t", "lse_t"), have, again, want, strict=True):
        error = (x.double() - y).abs().sum() / y.abs().sum().clamp(min=1e-30)
        if x.shape != y.shape or not torch.equal(x, same):
            said.append(f"{name} has shape {list(x.shape)}, or differs from call to call")
        elif not error < part and (x != y).any():
            said.append(f"{name} is off by {error:.2e} of its l1")
    return said
