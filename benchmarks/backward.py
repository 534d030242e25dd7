"""The backward pass on this GPU: time beside SDPA and FlexAttention in the same run, memory, and equal bits.

    python benchmarks/backward.py [--out DIR] [--rows dense,variants,learned] [--only TEXT,...]
        [--flex tuned|default|none] [--warm SECONDS] [--json NAME] [--rounds N]
        [--algorithm NAME]

For each row the gradients of one head are checked against float64, then all are timed in turns with CUDA events through
autograd, the forward pass left out; the median of the rounds counts. TFLOP/s are over the pairs that the mask keeps:
10 * pairs * heads * head size / time, which is 2.5 times the forward pass. `same` tells in how many of 20 further runs
every gradient had equal bits; where it was not in all, the pass that calls ask for with `deterministic` is timed too.
Memory is the peak of a forward and a backward pass at 65536 rows beyond inputs, output
and gradients, in bytes for each batch entry, head and row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forward
import peers
import records
import torch
import turns
from forward import Row

RUNS = 20
LONG = 65536
FAR = 128


def learned_rows(s: int = 4096) -> list[Row]:
    """What learns a table, and the same shape without one."""
    shape = (4, 16, s, 128)
    buckets, far = bucket_table(), FAR
    table = torch.randn(32, 16, device="cuda", requires_grad=True)

    def biased(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return x + table.double()[buckets[(j - i).clamp(-far, far) + far], h]

    return [
        Row("learned", "full", *shape, causal=False),
        Row("learned", "relative_bias", *shape, {"bucket_of": buckets, "table": table}, score=biased),
    ]


def variant_rows() -> list[Row]:
    wanted = ("window", "alibi", "softcap", "document", "prefix", "streaming")
    return [r for r in (*forward.variant_rows(), *forward.mask_rows()) if r.spec in wanted]


MADE = {"dense": forward.dense_rows, "variants": variant_rows, "learned": learned_rows}


def bucket_table() -> torch.Tensor:
    """T5's 32 buckets, both directions; from FAR on all distances are in the last."""
    distance = torch.arange(-FAR, FAR + 1, device="cuda")
    size = distance.abs()
    large = 8 + (size.clamp(min=1) / 8).log() / math.log(FAR / 8) * 8
    bucket = torch.where(size < 8, size, large.long().clamp(max=15))
    return (bucket + 16 * (distance > 0)).to(torch.int32)


def scaled(row: Row) -> float:
    return 1.0 if row.spec == "relative_bias" else row.head_dim**-0.5  # T5 does not scale


def error(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, found: Any) -> float:
    """The worst relative error of the gradients of q, k and v in the last head of the first batch entry."""
    h = row.heads - 1
    query, key, value, incoming = (x[0, h].double() for x in (q, k, v, d_out))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (query, key, value))
    j = torch.arange(row.length, device="cuda")[None]
    for rows in torch.arange(row.length, device="cuda").split(1024):
        s = (query[rows] @ key.T * scaled(row)).requires_grad_()
        given = s if row.score is None else row.score(s, 0, torch.tensor(h, device="cuda"), rows[:, None], j)
        if row.mask is not None:
            given = given.masked_fill(~row.mask(0, 0, rows[:, None], j), -torch.inf)
        p = given.softmax(-1)
        (ds,) = torch.autograd.grad(p, s, incoming[rows] @ value.T)
        d_v += p.detach().T @ incoming[rows]
        d_q[rows] = ds @ key * scaled(row)
        d_k += ds.T @ query[rows] * scaled(row)
    pairs = zip(found[:3], (d_q, d_k, d_v), strict=True)
    return max(((x[0, h] - want).norm() / want.norm()).item() for x, want in pairs)


def pass_of(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor], d_out: torch.Tensor) -> Callable[[], Any]:
    """The backward pass alone of a call."""
    out = call()
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def rivals(row: Row, inputs: list[torch.Tensor], d_out: torch.Tensor, flex: str) -> dict[str, Callable[[], Any]]:
    """What the peers can do of this row; FlexAttention has no backward pass for every size."""
    q, k, v = inputs
    made: dict[str, Callable[[], Any]] = {}
    if row.causal is not None:
        for name, peer in (("cudnn", peers.cudnn), ("flash", peers.flash)):
            made[name] = pass_of(peer(q, k, v, row.causal), inputs, d_out)
    if flex != "none" and row.part != "learned":
        try:
            made["flex"] = pass_of(peers.flex(q, k, v, row.mask, row.score, flex == "tuned"), inputs, d_out)
            made["flex"]()
        except Exception as fault:  # a fault of theirs is a gap in the table, and is told
            made.pop("flex", None)
            print(f"{row.name}: FlexAttention fails: {str(fault).strip().splitlines()[-1][:100]}")
    return made


def compile_flex(part: str, index: int) -> None:
    """Ours, and FlexAttention's backward pass tuned, for one row; what they compile stays in their caches."""
    row = MADE[part]()[index]
    inputs, d_out = tensors(row)
    ours(row, inputs, d_out)()
    rivals(replace(row, causal=None), inputs, d_out, "tuned")


def tensors(row: Row) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v, and a gradient of the output."""
    d_out, *inputs = (*forward.tensors(row), forward.tensors(row)[0])
    return [x.requires_grad_() for x in inputs], d_out


def ours(
    row: Row, inputs: list[torch.Tensor], d_out: torch.Tensor, algorithm: str | None = None, equal_bits: bool = False
) -> Callable[[], Any]:
    attn = forward.compiled(row.spec, algorithm)
    learned = [x for x in row.params.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return pass_of(lambda: attn(*inputs, **row.params, deterministic=equal_bits), [*inputs, *learned], d_out)


def measure(row: Row, flex: str, algorithm: str | None = None) -> dict[str, Any]:
    inputs, d_out = tensors(row)
    q, k, v = inputs
    mine = ours(row, inputs, d_out, algorithm)
    found = mine()
    with turns.GPU:
        off = error(row, q.detach(), k.detach(), v.detach(), d_out, found)
        same = equal_runs(mine)
        flops = 10 * forward.kept_pairs(row) * row.batch * row.heads * row.head_dim
    calls = {"attncc": mine}
    if same < RUNS:
        calls["deterministic"] = ours(row, inputs, d_out, algorithm, equal_bits=True)
        with turns.GPU:
            assert equal_runs(calls["deterministic"]) == RUNS, f"{row.name} is not deterministic where it was asked for"
    calls |= rivals(row, inputs, d_out, flex)
    with turns.GPU:
        ms = forward.timed(calls)
    return {
        "row": row.name, "part": row.part, "error": off, "same": f"{same} of {RUNS}", "tflop": flops / 1e12,
        "ms": {n: round(t, 4) for n, t in ms.items()},
        "tflops": {n: round(flops / t / 1e9, 1) for n, t in ms.items()},
    }  # fmt: skip


def equal_runs(call: Callable[[], Any]) -> int:
    """In how many of RUNS further ones every gradient has equal bits."""
    found = call()
    return sum(all(map(torch.equal, found, call())) for _ in range(RUNS))


def memory(algorithm: str | None) -> float:
    """Bytes for each batch entry, head and row of the causal spec at LONG rows."""
    shape = (1, 8, LONG, 128)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    d_out = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    attn = forward.compiled("causal", algorithm)
    torch.autograd.grad(attn(*inputs), inputs, d_out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attn(*inputs)
    found = torch.autograd.grad(out, inputs, d_out)
    mine = sum(x.numel() * x.element_size() for x in (out, *found))
    return (torch.cuda.max_memory_allocated() - before - mine) / (shape[0] * shape[1] * shape[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--rows", default="dense,variants,learned")
    parser.add_argument("--only", default="", metavar="TEXT,...", help="rows whose name holds one of these texts")
    parser.add_argument("--json", default="backward.json")
    parser.add_argument("--flex", default="tuned", choices=("tuned", "default", "none"), help="by max-autotune or not")
    parser.add_argument("--warm", type=float, default=0, metavar="SECONDS", help="compile side by side first")
    parser.add_argument("--rounds", type=int, default=forward.ROUNDS, help="of which the median counts")
    parser.add_argument("--algorithm", help="pinned in every spec; the planner's choice where it is left out")
    options = parser.parse_args()
    forward.ROUNDS = options.rounds
    torch.manual_seed(0)
    rows = forward.wanted(MADE, options.rows, options.only)
    order = [row.name for _, _, row in forward.wanted(MADE, ",".join(MADE), "")]
    if options.warm and options.flex == "tuned":
        peers.warm("backward", [(part, i) for part, i, _ in rows], options.warm)
    told = {
        "rounds": forward.ROUNDS,
        "bytes_beyond": round(memory(options.algorithm), 2),
        "flex": options.flex,
        "algorithm": options.algorithm,
    }
    print(f"beyond inputs, output and gradients at {LONG} rows: {told['bytes_beyond']} bytes a row", flush=True)
    results = []
    for _, _, row in rows:
        result = measure(row, options.flex, options.algorithm)
        results.append(result)
        shown = "  ".join(f"{n} {t:6.1f}" for n, t in result["tflops"].items())
        print(f"{result['row']:40s} {shown}   error {result['error']:.1e}  same {result['same']}", flush=True)
        torch.cuda.empty_cache()
        records.write(Path(options.out) / options.json, results, order, **told)


if __name__ == "__main__":
    main()
