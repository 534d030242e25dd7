"""An attention of one's own, from text to PyTorch: python examples/quickstart.py

Causal, with a fading memory: scores fall with the logarithm of the distance, at a rate that is a number of the call.
The result is compared with the same thing written out in PyTorch, which takes memory quadratic in the length.
"""

from __future__ import annotations

import torch

import attncc

FADING = """
# Scores fall with the logarithm of the distance.
attention fading(rate: float = 1.0, window: int = 512) {
    let distance = q - k
    mask  0 <= distance < window
    score s - rate * log(1 + distance)
}
"""


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: float, window: int) -> torch.Tensor:
    """The same by hand: [B, H, Q, D] queries, [B, H_kv, K, D] keys and values, every score in memory."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    distance = rows - torch.arange(k.shape[2], device=q.device)[None, :]
    score = q @ k.mT / q.shape[3] ** 0.5 - rate * torch.log1p(distance.clamp(min=0).to(q.dtype))
    return score.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1) @ v


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q = torch.randn(2, 8, 1000, 64, device=device)  # batch, heads, queries, head size
    k, v = torch.randn(2, 2, 2, 1000, 64, device=device)  # 2 heads of keys and values: 4 of queries share each

    attn = attncc.compile(FADING)
    out, lse = attn(q, k, v, rate=0.5, return_lse=True)
    print(f"out {list(out.shape)}, lse {list(lse.shape)} on {out.device}")
    for rate, window in ((0.5, 512), (2.0, 100)):  # other numbers, the same kernel: nothing is compiled again
        out = attn(q, k, v, rate=rate, window=window)
        difference = (out - written_out(q, k, v, rate, window)).abs().max().item()
        print(f"rate {rate}, window {window}: differs from the written-out form by at most {difference:.1e}")
        assert difference < 1e-5


if __name__ == "__main__":
    main()
