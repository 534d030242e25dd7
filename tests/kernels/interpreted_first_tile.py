"""Run by test_first_tile.py with TRITON_INTERPRET=1: kernels whose rows take their first tiles as reference.

The planner takes that for bf16 alone, which Triton's interpreter gets wrong; so the plan is made by hand, in float32.
Takes names of CASES, with NAME:KIND,… some kinds of inputs only. Prints a JSON line for each call: the spec, what was
done to the inputs, the errors of out and lse.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from attncc import analysis, codegen, frontend
from attncc.codegen.tables import tables_of
from attncc.ir import KernelPlan
from attncc.runtime.loader import load_module
from attncc.runtime.reference import reference

torch.manual_seed(0)
SPECS = Path(__file__).parents[2] / "specs"
WEIGHTED = "attention weighted(gate: f32[b, h_kv, k]) { mask k <= q weight gate[b, h_kv, k] }"
BLOCKS = "attention block_sparse(blocks: bool[h, n, n]) { mask blocks[h, q // 8, k // 8] }"  # rows without keys, too
SINKS = torch.tensor([0.5, -1.0, 60.0, -torch.inf])
DOCUMENTS = torch.where(torch.arange(230) < 140, 1, torch.arange(230) // 37 % 4).int()  # a long one comes again
KINDS = ("plain", "grows", "falls", "spike", "large")
CASES = {
    "causal": (None, {}),
    "full": (None, {}),
    "window": (None, {"window": 70}),
    "streaming": (None, {"first": 4, "window": 60}),
    "window_alibi_sinks": (None, {"window": 90, "slopes": torch.rand(4), "sinks": SINKS}),
    "softcap": (None, {"cap": 5.0}),
    "document": (None, {"doc": DOCUMENTS.expand(2, 230)}),
    "neighborhood_2d": (None, {"height": 10, "width": 23, "radius": 2}),
    "block_sparse": (BLOCKS, {"blocks": torch.rand(4, 29, 29, generator=torch.Generator().manual_seed(0)) < 0.2}),
    "weighted": (WEIGHTED, {"gate": torch.rand(2, 2, 230)}),
}  # fmt: skip


def inputs(kind: str) -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(2, 4, 200, 32), torch.randn(2, 2, 230, 32), torch.randn(2, 2, 230, 16)
    if kind == "grows":  # later keys exceed the reference by far more than float32 can hold
        k = k * torch.linspace(0.1, 300, 230)[:, None]
    if kind == "falls":  # and the other way round: sums that vanish beside it
        k = k * torch.linspace(300, 0.1, 230)[:, None]
    if kind == "large":  # sums stay in range, but times v they would not
        k, v = k * torch.linspace(10, 0.5, 230)[:, None], v * 1e30
    if kind == "spike":  # one key in the middle, for some rows
        k[:, :, 100] *= 1000
    return q, k, v


def main(names: list[str]) -> None:
    for asked in names:
        name, _, kinds = asked.partition(":")
        torch.manual_seed(0)
        text, params = CASES[name]
        spec = frontend.parse(text or (SPECS / f"{name}.attn").read_text()).spec
        visits = analysis.kernel_visits(spec, forward=True)
        plan = KernelPlan("sm_90", "fa2", "q_outer", 64, 32, 2, 4, 32, 16, "f32", reference="first_tile",
                          tables=tables_of(visits).made)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.py"
            path.write_text(codegen.render(spec, visits, plan), encoding="utf-8")
            assert "for again in tl.static_range(2)" in path.read_text()
            module = load_module(path, path.read_bytes(), f"first_tile_{name}")
        spelled = {codegen.parameter_names(spec)[n]: value for n, value in params.items()}
        for kind in kinds.split(",") if kinds else KINDS:
            q, k, v = inputs(kind)
            out, lse = module.forward(q, k, v, **spelled)
            want, want_lse = reference(spec, q, k, v, params)
            there = want_lse.isfinite()
            print(json.dumps({
                "spec": name, "kind": kind, "nan": bool(out.isnan().any() | lse.isnan().any()),
                "out": ((out - want).abs().sum() / want.abs().sum()).item(),
                "lse": ((lse - want_lse)[there].abs() / want_lse[there].abs().clamp(min=1)).max().item(),
                "empty": bool((lse[~there] == want_lse[~there]).all()),
            }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
