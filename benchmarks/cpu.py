"""The CPU program beside PyTorch's own attention, float32, in turns in one run: `python benchmarks/cpu.py`.

Bars: causal B1 H8 S4096 D64 at least 0.4 times the speed of scaled_dot_product_attention; a window of 256 at S 8192 at
least 3 times its speed with that mask as a bool tensor; the backward pass of causal B1 H4 S4096 D128 at most 3 times as
long. Only the ratio means something, and only on a machine that does nothing else: many short parallel loops, whose
threads spin at the end of each, wait for a core that is taken away, one long one does not. OMP_WAIT_POLICY=passive,
or OMP_NUM_THREADS=1, makes a busy machine fair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attncc

ROUNDS = 5


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, bar: float, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]) -> bool:
    """Warm both up, compare their numbers, time them in turns; True where the median ratio reaches the bar."""
    error = (ours() - theirs()).abs().max().item()
    times = [(seconds(theirs), seconds(ours)) for _ in range(ROUNDS)]
    sdpa_s, ours_s = (median(t) for t in zip(*times, strict=True))
    ratio = median(a / b for a, b in times)
    print(
        f"{name}: SDPA {sdpa_s:.3f} s, ours {ours_s:.3f} s, ratio {ratio:.2f} (bar {bar:.2f}), difference {error:.1e}"
    )
    return ratio >= bar and error < 1e-5


def main() -> int:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    causal = attncc.compile("attention causal { mask k <= q }")
    q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    good = compare(
        "causal S4096", 0.4, lambda: causal(q, k, v), lambda: sdpa(q, k, v, is_causal=True),
    )  # fmt: skip
    window = attncc.compile("attention window(window: int) { mask 0 <= q - k < window }")
    q2, k2, v2 = (torch.randn(1, 8, 8192, 64) for _ in range(3))
    distance = torch.arange(8192)[:, None] - torch.arange(8192)
    mask = (distance >= 0) & (distance < 256)
    good &= compare(
        "window 256 S8192", 3.0, lambda: window(q2, k2, v2, window=256), lambda: sdpa(q2, k2, v2, attn_mask=mask)
    )
    leaves = [torch.randn(1, 4, 4096, 128, requires_grad=True) for _ in range(3)]
    with torch.enable_grad():
        outs = causal(*leaves), sdpa(*leaves, is_causal=True)
    d_out = torch.randn_like(outs[0])
    ours, theirs = (lambda out=out: torch.autograd.grad(out, leaves, d_out, retain_graph=True)[1] for out in outs)
    good &= compare("causal backward S4096 D128", 1 / 3, ours, theirs)
    return 0 if good else 1


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
