"""Run by test_quotient.py with TRITON_INTERPRET=1: the generated helper that divides by a product, on given numbers.

Reads [[a, ...], [n, ...]] from standard input, prints a // n and a % n as two lists.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

from attncc import analysis, codegen, frontend
from attncc.ir import KernelPlan
from attncc.runtime.loader import load_module

TEXT = "attention strips(width: int) { mask k // width == q // width and k % width < 5 }"


def helpers() -> tuple[object, object, object]:
    spec = frontend.parse(TEXT).spec
    plan = KernelPlan("sm_90", "fa2", "q_outer", 64, 32, 2, 4, 32, 16, "f32")
    text = codegen.render(spec, analysis.kernel_visits(spec), plan)
    assert "fast_div(k, width, inverse_width)" in text and "fast_mod(k, width, inverse_width)" in text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strips.py"
        path.write_text(text, encoding="utf-8")
        module = load_module(path, path.read_bytes(), "strips")
    return module.inverse, module.fast_div, module.fast_mod


inverse, fast_div, fast_mod = helpers()


@triton.jit
def divide(A, N, Quotient, Remainder, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, n = tl.load(A + i), tl.load(N + i)
    tl.store(Quotient + i, fast_div(a, n, inverse(n)))
    tl.store(Remainder + i, fast_mod(a, n, inverse(n)))


def main() -> None:
    a, n = (torch.tensor(numbers, dtype=torch.int32) for numbers in json.load(sys.stdin))
    found = torch.empty_like(a), torch.empty_like(a)
    divide[(1,)](a, n, *found, COUNT=len(a))
    print(json.dumps([x.tolist() for x in found]))


if __name__ == "__main__":
    main()
