"""Random specs and calls of them: odd sizes, nothing of one kind, every kind of stride, types, scalars, gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from attncc.ir import AttentionSpec, Param
from attncc.runtime.arguments import ELEMENTS

MASKS = (
    "k <= q", "0 <= q - k < w", "q - k < w and k >= 0", "k < w", "k % 3 != w % 2", "t1[b, q] == t1[b, k]",
    "t2[h, row, k]", "t3[row, k]", "t4[q - k]", "k <= t5[b]", "t1[b, k] <= w", "row // 4 >= k // 4", "abs(q - k) <= w",
    "k < k_len - w", "k_len > 3", "h_kv < 1 or k <= q", "b % 2 == 0 or k > q", "false", "t4[t6[q - k]]", "k * f <= q",
    "not (k > q)", "floor(q / 3.0) >= k // 3",
)  # fmt: skip
SCORES = (
    "s + t7[h] * (q - k)", "s * f", "f * tanh(s / f)", "s + t8[h, q - k]", "s + t8[h, abs(q - k)]",
    "s * (1 + t9[b, k])", "s + t10[t6[q - k + 5], h]", "where(k < q, s, s - 1)", "max(s, -1.0)",
    "s - 0.1 * abs(q - k)", "s + t11[h, row, k]", "min(s, 3) + exp(-abs(s))", "s * sigmoid(t9[b, q])",
    "s + log(1 + k)", "s + t7[h_kv]", "abs(s)", "s + t12[b, h_kv, k // 4]", "s + exp2(-k / 1.5)", "0.3",
    "s + t9[b, k] + t9[b, q]",
)  # fmt: skip
SOFTMAX = ("", "", "", "softmax off_by_one", "softmax sink(f)", "softmax sink(t7[h])", "softmax sink(t9[b, row])")
WEIGHTS = ("", "", "", "weight f", "weight t9[b, k]", "weight 1 / (1 + abs(q - k))", "weight t7[h] * t9[b, q]")
SCALES = ("", "", "scale 0.3", "scale f", "scale 1 / sqrt(k_len)")
TENSORS = {
    "t1": "i32[b, k]", "t2": "bool[h, row, k]", "t3": "bit[row, k]", "t4": "bool[n]", "t5": "i64[b]", "t6": "i16[n2]",
    "t7": "f32[h]", "t8": "{}[h, n3]", "t9": "{}[b, k]", "t10": "{}[m, h]", "t11": "{}[h, row, k]",
    "t12": "f32[b, h_kv, blocks]",
}  # fmt: skip
FREE = {"n": 9, "n2": 11, "n3": 13, "m": 7, "blocks": 3}


@dataclass(frozen=True)
class Call:
    """q, k, v and parameters; `want` says of which of the first three a gradient is asked for."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    params: dict[str, Any]
    want: tuple[bool, bool, bool]


def random_spec(random: Random) -> str:
    pick = random.choice
    body = [f"mask {pick(MASKS)}" for _ in range(pick((0, 1, 1, 2)))]
    body += [f"score {pick(SCORES)}" for _ in range(pick((0, 1, 1, 2)))]
    text = " ".join([*body, pick(SOFTMAX), pick(WEIGHTS), pick(("", "", "align start")), pick(SCALES)])
    element = pick(("f32", "f32", "bf16", "f16"))
    used = sorted(set(re.findall(r"\bt\d+\b", text)))
    params = [f"{t}: {TENSORS[t].format(element)}" for t in used]
    params += [p for p in ("w: int = 3", "f: float = 1.5") if re.search(rf"\b{p[0]}\b", text)]
    return f"attention drawn({', '.join(params)}) {{ {text} }}"


def strided(x: torch.Tensor, random: Random) -> torch.Tensor:
    """The same elements in other strides, or a part of them in strides of 0."""
    how = random.randrange(5)
    if how == 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 2:
        wide = torch.full([2 * n + 1 for n in x.shape], 7).to(x.dtype)
        part = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return part.copy_(x)
    if how == 3 and x.shape[0]:
        return x[:1].expand(x.shape)
    if how == 4 and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    return x


def random_call(spec: AttentionSpec, random: Random, dtypes: tuple[torch.dtype, ...]) -> Call:
    pick = random.choice
    g = torch.Generator().manual_seed(random.randrange(2**31))
    kv_heads = pick((0, 1, 1, 1, 2, 2, 3))
    batch, heads = pick((0, 1, 2, 2, 3)), kv_heads * pick((1, 1, 2, 3))
    rows, keys = pick((0, 1, 5, 17, 40)), pick((0, 1, 2, 7, 33, 61))
    d, dv, dtype = pick((1, 3, 8, 16, 24)), pick((1, 5, 8, 16)), pick(dtypes)
    sizes = {"b": batch, "h": heads, "h_kv": kv_heads, "row": rows, "k": keys, **FREE}
    shapes = (batch, heads, rows, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)
    q, k, v = (strided(torch.randn(s, generator=g).to(dtype), random) for s in shapes)
    params: dict[str, Any] = {p.name: _tensor(p, sizes, g, random) for p in spec.tensors}
    names = {p.name for p in spec.scalars}
    if "w" in names and random.random() < 0.7:
        params["w"] = pick((0, 1, 4, 100, -3, 2**40, -(2**62)))
    if "f" in names and random.random() < 0.7:
        params["f"] = pick((1.0, 0.5, -2.0, 3, torch.tensor(0.7)))
    gradients = random.random() < 0.5 and dtype != torch.float16
    want = tuple(gradients and random.random() < 0.7 for _ in range(3))
    return Call(q, k, v, params, want)  # type: ignore[arg-type]


def _tensor(p: Param, sizes: dict[str, int], g: torch.Generator, random: Random) -> torch.Tensor:
    shape = [a if isinstance(a, int) else sizes[a] for a in p.axes]
    if p.element == "bit":
        shape[-1] = -(-shape[-1] // 32)
        return torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32)
    if p.element == "bool":
        return strided(torch.rand(shape, generator=g) < 0.7, random)
    if p.type == "float":
        return strided(torch.randn(shape, generator=g).to(ELEMENTS[p.element or ""]), random)
    return strided(torch.randint(-1, 8, shape, generator=g).to(ELEMENTS[p.element or ""]), random)


def calls(seed: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, Random, tuple[torch.dtype, ...]]]:
    """Specs without end, each with the source of its calls."""
    random = Random(seed)
    while True:
        yield random_spec(random), Random(random.randrange(2**31)), dtypes
