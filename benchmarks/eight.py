"""8-bit inputs on this GPU: numbers against float64, and times beside the same attention in bfloat16 and cuDNN's.

    python benchmarks/eight.py [--out DIR] [--json NAME] [--only TEXT,...] [--parts numbers,rows,mixed,special]

Kernels are compiled side by side first. Numbers: what `attncc check` measures on the GPU, rows of 131072 flat keys,
equal values, one channel times 50, and quantised elements beside the CPU's. Times are medians of rounds in turns;
TFLOP/s of the kernel alone, over the pairs that the mask keeps; the quantising pass in bytes that it has to move, as
the GPU's own time (in a CUDA graph), and with what the host adds. `mixed` times a q of bfloat16 beside 8-bit k and v,
and the same kernel and the planner's for k and v in bfloat16, in long calls and where a query each waits for its keys.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peers
import records
import torch
import turns
from forward import timed

import attncc
from attncc.ir import Precision, Shape
from attncc.runtime.check_eight import check
from attncc.runtime.eight import EightBit
from attncc.runtime.quantise import Quantised, quantised

MASKS = {
    "full": "", "causal": "mask k <= q", "alibi": "mask k <= q  score s - 0.01 * (q - k)",
}  # fmt: skip
MODES = {
    "block": "", "head": "scales per_head", "plain": "scales per_tensor rotate none", "e5m2": "scales per_head",
}  # fmt: skip
ROWS = [  # mask, mode, batch, heads, heads of K and V, length, head size
    ("full", "head", 1, 16, 16, 16384, 128), ("causal", "head", 1, 16, 16, 16384, 128),
    ("full", "block", 1, 16, 16, 16384, 128), ("causal", "block", 1, 16, 16, 16384, 128),
    ("causal", "head", 1, 64, 8, 32768, 128), ("full", "head", 4, 32, 32, 4096, 64),
    ("full", "head", 4, 8, 8, 4096, 256), ("causal", "head", 4, 8, 8, 4096, 256), ("full", "block", 4, 8, 8, 4096, 256),
]  # fmt: skip
MIXED = [  # scales, batch, heads, heads of K and V, rows, keys, head size
    ("", 1, 16, 16, 16384, 16384, 128), ("scales per_head", 1, 16, 16, 16384, 16384, 128),
    ("scales per_block(128)", 1, 16, 16, 16384, 16384, 128), ("scales per_head", 4, 32, 32, 4096, 4096, 64),
    ("scales per_head", 16, 32, 32, 1, 8192, 128), ("scales per_block(128)", 16, 32, 32, 1, 8192, 128),
]  # fmt: skip
NUMBERS = [("causal", "block"), ("alibi", "head"), ("full", "e5m2")]
SHAPES = [Shape(1, 4, 2, 260, 390, d, d) for d in (64, 128, 256)]


def attention(mask: str, mode: str, eight: bool = True) -> Any:
    inputs = "f8e5m2" if mode == "e5m2" else "f8e4m3"
    precision = f" precision {{ inputs {inputs} {MODES[mode]} }} schedule {{ algorithm fa3 }}" if eight else ""
    return attncc.compile(f"attention {mask}_{mode} {{ {MASKS[mask]} }}{precision}")


def mixed(scales: str | None, algorithm: str = "") -> Any:
    """Causal attention of a q of bfloat16 and 8-bit k and v, or, where `scales` is None, k and v like q."""
    kept = "" if scales is None else f"precision {{ inputs bf16, f8e4m3 {scales} }}"
    pinned = f"schedule {{ algorithm {algorithm} }}" if algorithm else ""
    return attncc.compile(f"attention mixed {{ mask k <= q }} {kept} {pinned}")


def draw(batch: int, heads: int, kv_heads: int, length: int, size: int) -> list[torch.Tensor]:
    shapes = ((batch, h, length, size) for h in (heads, kv_heads, kv_heads))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


def compile_all(wanted: list[str]) -> None:
    """Each in a process of its own, which leaves its kernels in the cache."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--compile"]
    running = [subprocess.Popen([*command, one], env=os.environ) for one in wanted]
    print("compiled with", [p.wait() for p in running], f"{time.perf_counter() - start:.0f} s", flush=True)


def compile_one(mask: str, mode: str, size: int) -> None:
    attn = attention(mask, mode)
    attn(*draw(1, 2, 2, 5000, size))
    if mode == "head":
        attention(mask, mode, eight=False)(*draw(1, 2, 2, 5000, size))


def numbers(mask: str, mode: str) -> list[dict[str, Any]]:
    """`attncc check` on this GPU."""
    rows = []
    for r in check(attention(mask, mode).parsed.spec, "cuda", shapes=SHAPES).rows:
        said = "ok" if r.passed else "BEYOND"
        print(mask, mode, r.inputs, r.shape, said, f"rmse {r.rmse:.2e} bf16 {r.rmse_bf16:.2e}",
              f"dequantised {r.rmse_dequantised:.2e} max {r.largest_dequantised:.2e} of bound {r.of_bound:.3f}",
              f"lse {r.lse:.1e}", flush=True)  # fmt: skip
        rows.append({"part": "numbers", "row": f"{mask} {mode} {r.inputs} {r.shape}", **r.__dict__, "passed": r.passed})
    return rows


def exact(x: Quantised, rows: int) -> torch.Tensor:
    """Attention of dequantised inputs in float64, of the first rows of one head."""
    q, k, v = (y[0, 0].double() for y in x.dequantised())
    return ((q[:rows] @ k.T) * q.shape[-1] ** -0.5).softmax(-1) @ v


def special() -> list[dict[str, Any]]:
    """Flat rows, equal values, an outlier channel, and the bits of quantised inputs."""
    found: dict[str, float] = {}
    attn = attention("full", "head")
    assert isinstance(attn, EightBit)
    q, k, v = draw(1, 1, 1, 131072, 128)
    q, v = q[:, :, :256] * 0.1, v + 1
    x = quantised(q, k, v, attn.spec.precision)
    for kind, out, want in (
        ("flat 131072", attn(q, k, v)[0, 0], exact(x, 256)),
        (
            "equal values",
            attn(q, k, torch.full_like(v, 0.7109375))[0, 0],
            torch.full((256, 128), 0.7109375, device="cuda"),
        ),
    ):
        found[kind] = ((out.double() - want).norm() / want.norm()).item()
    for inputs in ("head", "e5m2"):
        attn = attention("full", inputs)
        q, k, v = draw(1, 1, 1, 8192, 128)
        k[..., 40] *= 50
        want = exact(quantised(q, k, v, attn.spec.precision), 256)
        found[f"channel times 50, {inputs}"] = ((attn(q, k, v)[0, 0, :256].double() - want).norm() / want.norm()).item()
    for scales in ("per_tensor", "per_head", "per_block(128)"):
        p = Precision(inputs="f8e4m3", scales=scales)
        there, here = quantised(q, k, v, p), quantised(q.cpu(), k.cpu(), v.cpu(), p)
        for name in ("q", "k", "v", "q_scales", "k_scales", "v_scales"):
            a, b = getattr(there, name).cpu(), getattr(here, name)
            a, b = (y.view(torch.uint8) if y.element_size() == 1 else y for y in (a, b))
            found[f"bits of {name}, {scales}"] = float((a != b).sum())
    leaves = [y.requires_grad_() for y in draw(1, 2, 2, 700, 128)]
    plain = [y.detach().clone().requires_grad_() for y in leaves]
    d = torch.randn(1, 2, 700, 128, device="cuda", dtype=torch.bfloat16)
    attention("causal", "head")(*leaves).backward(d)
    attention("causal", "head", eight=False)(*plain).backward(d)
    for name, a, b in zip("qkv", leaves, plain, strict=True):
        found[f"gradient of {name} beside bf16's"] = ((a.grad - b.grad).norm() / b.grad.norm()).item()
    for name, value in found.items():
        print(f"{name}: {value:.3e}", flush=True)
    return [{"part": "special", "row": name, "value": value} for name, value in found.items()]


def measure(mask: str, mode: str, *sizes: int) -> dict[str, Any]:
    batch, heads, kv_heads, length, size = sizes
    q, k, v = draw(*sizes)
    attn, bare = attention(mask, mode), attention(mask, mode, eight=False)
    x = quantised(q, k, v, attn.spec.precision)
    with torch.no_grad():
        calls: dict[str, Any] = {
            "kernel": lambda: attn.quantised(x), "bf16": lambda: bare(q, k, v),
            "quantise and host": lambda: quantised(q, k, v, attn.spec.precision),
        }  # fmt: skip
        if heads == kv_heads:
            calls["cudnn_bf16"] = peers.cudnn(q, k, v, mask == "causal")
        with turns.GPU:
            ms = timed(calls)
            ms["quantise"] = turns.milliseconds(calls["quantise and host"])
            ms["copy"] = turns.milliseconds(lambda: [y.clone() for y in (q, k, v)])
        off = (attn(q, k, v).float() - bare(q, k, v).float()).norm() / bare(q, k, v).float().norm()
    flops = 4 * batch * heads * size * (length * length if mask == "full" else length * (length + 1) // 2)
    read = sum(y.numel() for y in (q, k, v)) * (3 if attn.spec.precision.block else 5)
    copied = sum(y.numel() for y in (q, k, v)) * 4
    name = f"{mask} {mode} D{size} H{heads}/{kv_heads} B{batch} S{length}"
    row = {
        "part": "rows", "row": name, "beside_bf16": off.item(),
        "ms": {n: round(t, 4) for n, t in ms.items()},
        "tflops": {n: round(flops / ms[n] / 1e9, 1) for n in ms if n in ("kernel", "bf16", "cudnn_bf16")},
        "gbs": {"quantise": round(read / ms["quantise"] / 1e6), "copy": round(copied / ms["copy"] / 1e6)},
    }  # fmt: skip
    print(row, flush=True)
    return row


def compile_mixed(scales: str, *sizes: int) -> None:
    _, heads, kv_heads, rows, keys, size = sizes
    q, k, v = (torch.zeros(1, h, n, size, device="cuda", dtype=torch.bfloat16)
               for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys)))  # fmt: skip
    blocks = -(-keys // 128) if "block" in scales else 1
    given = dict.fromkeys(("k_scales", "v_scales"), torch.ones(1, kv_heads, blocks, device="cuda")) if scales else {}
    with torch.no_grad():
        mixed(scales)(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), **given)
        for algorithm in ("fa2", ""):
            mixed(None, algorithm)(q, k, v)


def measure_mixed(scales: str, *sizes: int) -> dict[str, Any]:
    batch, heads, kv_heads, rows, keys, size = sizes
    shapes = ((batch, h, n, size) for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys)))
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    k8, v8, given = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), {}
    exact = [y[:1, :1].double() for y in (k8, v8)]
    if scales:
        x = quantised(q, k, v, Precision(inputs="f8e4m3", scales=scales.removeprefix("scales "), rotate="none"))
        k8, v8, given = x.k, x.values, {"k_scales": x.k_scales, "v_scales": x.v_scales}
        exact = [y[:1, :1].double() for y in x.dequantised()[1:]]
    attn, fa2, usual = mixed(scales), mixed(None, "fa2"), mixed(None)
    with torch.no_grad(), turns.GPU:
        calls = {"mixed": lambda: attn(q, k8, v8, **given), "fa2": lambda: fa2(q, k, v), "bf16": lambda: usual(q, k, v)}
        ms = {name: turns.milliseconds(call) for name, call in calls.items()}
        last, group = slice(max(0, rows - 64), rows), heads // kv_heads
        s = q[:1, :group, last].double() @ exact[0].mT * size**-0.5
        later = torch.arange(keys, device="cuda") > torch.arange(keys - s.shape[2], keys, device="cuda")[:, None]
        want = s.masked_fill(later, -torch.inf).softmax(-1) @ exact[1]
        off = (attn(q, k8, v8, **given)[:1, :group, last].double() - want).norm() / want.norm()
    pairs = batch * heads * (rows * keys - rows * (rows - 1) // 2)
    moved = batch * (2 * kv_heads * keys + 4 * heads * rows) * size  # bytes that the mixed call has to move
    row = {
        "part": "mixed", "row": f"causal {scales or 'unscaled'} D{size} H{heads}/{kv_heads} B{batch} Q{rows} K{keys}",
        "beside_float64": off.item(), "ms": {n: round(t, 4) for n, t in ms.items()},
        "tflops": {n: round(4 * pairs * size / t / 1e9, 1) for n, t in ms.items()},
        "gbs": {"mixed": round(moved / ms["mixed"] / 1e6)},
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--json", default="eight.json")
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--parts", default="numbers,rows,mixed,special")
    parser.add_argument("--compile", metavar="MASK,MODE,SIZE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.compile:
        mask, mode, size = options.compile.split(",")
        if mask == "mixed":
            compile_mixed(*MIXED[int(size)])
        else:
            compile_one(mask, mode, int(size))
        return
    chosen = [r for r in ROWS if any(text in " ".join(map(str, r)) for text in options.only.split(","))]
    parts = options.parts.split(",")
    needed = {
        "mixed": [f"mixed,,{i}" for i in range(len(MIXED))], "rows": [f"{r[0]},{r[1]},{r[-1]}" for r in chosen],
        "special": ["full,head,128", "causal,head,128"],
        "numbers": [f"{mask},{mode},{size}" for mask, mode in NUMBERS for size in (64, 128, 256)],
    }  # fmt: skip
    compile_all(list(dict.fromkeys(one for part in parts for one in needed[part])))
    found: list[dict[str, Any]] = []
    made = {
        "rows": lambda: [measure(*row) for row in chosen], "special": special,
        "mixed": lambda: [measure_mixed(*row) for row in MIXED],
        "numbers": lambda: [row for pair in NUMBERS for row in numbers(*pair)],
    }  # fmt: skip
    for part in parts:
        try:
            found += made[part]()
        except Exception as fault:  # the other parts are still worth their time
            print(part, "failed:", type(fault).__name__, str(fault)[:600], flush=True)
    records.write(Path(options.out) / options.json, found)


if __name__ == "__main__":
    main()
