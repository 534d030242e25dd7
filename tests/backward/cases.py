"""What the backward pass is tried on: QUICK in every run, MORE in the long one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.backward.interpreted import Case

Make = Callable[[torch.Generator], Mapping[str, torch.Tensor]]
Q, K, H = 37, 53, 2  # lengths and heads of a Case


def draw(**shapes: tuple[int, ...]) -> Make:
    return lambda g: {n: torch.randn(shape, generator=g) for n, shape in shapes.items()}


def document(g: torch.Generator) -> Mapping[str, torch.Tensor]:
    return {"doc": torch.randint(0, 3, (2, K), generator=g, dtype=torch.int32).sort(-1).values}


def buckets(g: torch.Generator) -> Mapping[str, torch.Tensor]:
    distance = torch.arange(-20, 21)
    of = distance.abs() // 4 + 6 * (distance > 0)
    return {"bucket_of": of.to(torch.int32), "table": torch.randn(12, H, generator=g)}


def kinds(g: torch.Generator) -> Mapping[str, torch.Tensor]:
    return {
        "kind": torch.randint(-1, 6, (2, K), generator=g, dtype=torch.int32),
        "table": torch.randn(5, H, generator=g),
    }


CAUSAL = "attention causal { mask k <= q }"
T5 = """attention relative_bias(bucket_of: i32[distances], table: f32[buckets, h] grad) {
    let far = distances // 2
    let distance = min(max(k - q, -far), far)
    scale 1
    score s + table[bucket_of[distance + far], h]
}"""
BOTH = "attention both(c: f32[b, h, k] grad) { score s + c[b, h, q] - c[b, h, k] mask k <= q }"
GATES = "attention gates(g: f32[b, h, row] grad, w: f32[h_kv, k] grad) { weight g[b, h, row] * w[h_kv, k] mask k <= q }"
STACK = """attention stack(a: float grad, cap: float grad = 3.0, t: f32[h] grad) {
    score a * s
    score cap * tanh(s / cap) + t[h]
    score s + t[h] * s * s
    mask abs(q - k) < 9
}"""


def bias(axes: str, *shape: int, name: str = "") -> Case:
    """A table with a cell for each pair, over some of the axes."""
    text = f"attention bias(t: f32[{axes}] grad) {{ score s + t[{axes}] * s mask k <= q + 3 }}"
    return Case(name or "bias_" + axes.replace(", ", "_"), text, draw(t=shape), heads=4, kv_heads=2)


def table(name: str, params: str, index: str, make: Make, **more: int) -> Case:
    return Case(name, f"attention {name}({params}) {{ score s + {index} mask k <= q }}", make, **more)


CLAMPED = """attention clamped(t: f32[n, h] grad) {
    score s + t[min(max(q - k, -3), 4) + 3, h]
    mask k - q < 40
}"""

QUICK = [
    Case("causal", CAUSAL),
    Case("causal_long_rows", CAUSAL, q_len=70, k_len=41, with_lse=False),
    Case("by_tma", CAUSAL, q_len=70, k_len=41, head_dim=48, loads="descriptor", heads=4, kv_heads=2),
    Case("alibi", "attention alibi(slopes: f32[h] grad) { score s - slopes[h] * (q - k) mask k <= q }",
         draw(slopes=(4,)), heads=4, kv_heads=2),
    Case("softcap", "attention softcap(cap: float grad = 0.7) { score cap * tanh(s / cap) mask k <= q }",
         head_dim=48, head_dim_v=24),
    Case("document", "attention document(doc: i32[b, k]) { mask k <= q and doc[b, q] == doc[b, k] }", document),
    Case("sinks", "attention sinks(sinks: f32[h] grad) { mask 0 <= q - k < 5 softmax sink(sinks[h]) }",
         draw(sinks=(H,)), q_len=60, k_len=40),
    Case("one_sink", "attention one_sink(g: float grad = 0.7) { mask k <= q softmax sink(g) }"),
    Case("relative_bias", T5, buckets),
    Case("apart", GATES, draw(g=(2, H, Q), w=(1, K)), apart=True),
    Case("apart_both", BOTH, draw(c=(2, H, K)), apart=True, loads="descriptor"),
    Case("clamped", CLAMPED, draw(t=(9, H)), q_len=90, k_len=130),
    Case("both", BOTH, draw(c=(2, H, K))),
    Case("gates", GATES, draw(g=(2, H, Q), w=(1, K)), strided=True),
    bias("b, h, row, k", 2, 4, Q, K),
    bias("row, k", Q, K),
    Case("dropout", "attention dropped(w: f32[k] grad) { mask k <= q weight w[k] dropout 0.25 }",
         lambda g: {"w": torch.randn(K, generator=g), "seed": 2**50 + 3}, tiles=(64, 16)),
    Case("sigmoid", "attention weighed(e: f32[h] grad) { mask k <= q score 3 * tanh(s) softmax sigmoid(e[h]) }",
         draw(e=(H,)), with_lse=False),
    Case("rows_alone", "attention flat(t: f32[h] grad) { score t[h] * q / 9 mask k <= q }", draw(t=(H,))),
]  # fmt: skip

MORE = [
    Case("full", "attention full {}", q_len=16, k_len=16),
    Case("one", "attention full {}", q_len=1, k_len=1),
    Case("no_keys", "attention nothing(e: f32[h] grad) { softmax sink(e[h]) }", draw(e=(H,)), k_len=0),
    Case("no_rows", "attention nothing(e: f32[h] grad) { softmax sink(e[h]) }", draw(e=(H,)), q_len=0),
    Case("empty", "attention empty { mask k < q - 20 }"),
    Case("wide_ints", CAUSAL, int_bits=64, strided=True),
    Case("tall_tiles", CAUSAL, tiles=(64, 64), q_len=100, k_len=100),
    Case("flat_tiles", CAUSAL, tiles=(16, 64), head_dim=24, head_dim_v=48),
    Case("start", "attention start { align start mask k <= q }", q_len=70),
    Case("padding", "attention padding(n: i32[b]) { mask k < n[b] }", lambda g: {"n": torch.tensor([20, 33]).int()},
         poisoned=20),
    Case("stack", STACK, lambda g: {"a": 1.3, "t": torch.randn(H, generator=g) / 9}),
    Case("scale", "attention scaled(m: float grad) { scale m * m / 3 score s + 0.1 * s * s mask k <= q }",
         lambda g: {"m": 0.9}),
    Case("scale_alone", "attention scaled(m: float grad = 0.4) { scale m }"),
    Case("cells_alone", "attention flat(t: f32[row, k] grad) { score t[row, k] mask k <= q }", draw(t=(Q, K))),
    Case("keys_alone", "attention flat(t: f32[h] grad) { score t[h] * k / 9 mask k <= q }", draw(t=(H,))),
    Case("constant", "attention flat(t: f32[h] grad) { score s * t[h] score 0.5 mask k <= q }", draw(t=(H,))),
    Case("steps", "attention flat { score floor(s) mask k <= q }"),
    Case("off_by_one", "attention off { softmax off_by_one mask k <= q }"),
    Case("row_sink", "attention sunk(e: f32[b, h, row] grad) { softmax sink(2 * e[b, h, row]) mask k < q - 9 }",
         draw(e=(2, H, Q))),
    Case("sink_and_score", "attention both(e: f32[h] grad) { score s * e[h] softmax sink(e[h] * e[h]) mask k <= q }",
         draw(e=(H,))),
    Case("dropout_in_tiles", "attention dropped(t: f32[row, k] grad) { score s + t[row, k] dropout 0.25 }",
         lambda g: {"t": torch.randn(Q, 200, generator=g), "seed": 5}, tiles=(64, 64), k_len=200),
    Case("dropout_in_small_tiles", "attention dropped(t: f32[row, k] grad) { score s + t[row, k] dropout 0.25 }",
         lambda g: {"t": torch.randn(Q, 100, generator=g), "seed": 6}, tiles=(32, 32), k_len=100),
    Case("relu", "attention ramp { mask k <= q softmax relu(2) }", with_lse=False),
    Case("relu_cubed", "attention ramp { mask abs(q - k) < 9 score s + 1 softmax relu(3) }", with_lse=False),
    Case("retention", "attention kept(g: f32[h] grad) { mask k <= q weight 1 + 0.1 * k softmax none "
         "score s * exp2(-g[h] * g[h] * (q - k)) }", draw(g=(H,)), with_lse=False),
    Case("sigmoid_cells", "attention cells(t: f32[h, row, k] grad, w: f32[k] grad) { score s + t[h, row, k] "
         "softmax sigmoid(-2) weight w[k] }", draw(t=(H, Q, K), w=(K,)), with_lse=False),
    Case("wild", "attention wild(a: f32[h] grad) { score log(1 + exp(s * a[h])) mask k < q and k < 33 }", draw(a=(H,)),
         poisoned=20, poison=1e4),
    Case("shared_heads", "attention shared(t: f32[h_kv] grad, u: f32[b] grad) { score s * t[h_kv] + u[b] * s * s / 9 }",
         draw(t=(2,), u=(2,)), heads=4, kv_heads=2),
    Case("bf16_table", "attention narrow(t: bf16[h, k] grad) { score s + t[h, k] * s mask k <= q }",
         lambda g: {"t": torch.randn(H, K, generator=g).bfloat16()}),
    bias("h, row, k", 4, Q, K), bias("b, row, k", 2, Q, K), bias("h_kv, row, k", 2, Q, K),
    bias("b, h_kv, row, k", 2, 2, Q, K), bias("k, row, b, h", K, Q, 2, 4),
    Case("positions", "attention positions(t: f32[k, h, n] grad) { score s + t[q, h, k] mask k <= q }",
         draw(t=(K, H, 60))),
    table("summed", "t: f32[n] grad", "t[q + k]", draw(t=(80,))),
    table("of_row", "t: f32[n, h] grad", "t[row % 7, h] * s", draw(t=(6, H))),
    table("of_head", "t: f32[n] grad", "t[h % 2] * s + t[5 - h] * k", draw(t=(5,))),
    table("of_kind", "kind: i32[b, k], table: f32[kinds, h] grad", "table[kind[b, k], h] * s", kinds),
    table("of_two", "t: f32[x, h, y] grad", "t[q % 3, h, k % 4] * s", draw(t=(3, H, 4))),
    table("row_table", "t: f32[b, h, row, n] grad", "t[b, h, row, (q - k) // 4]", draw(t=(2, H, Q, 11))),
    table("row_table_h", "t: f32[n, h, row] grad", "t[k // 8, h, row] * s", draw(t=(6, H, Q))),
    table("key_table", "t: f32[b, n, h, k] grad", "t[b, (q - k) // 4, h, k]", draw(t=(2, 11, H, K))),
    table("key_table_free", "t: f32[n, m] grad", "t[k, row % 5] * s", draw(t=(K + 3, 4))),
    table("two_rows", "t: f32[row, h, k] grad", "t[row, h, q] * s", draw(t=(Q, H, K))),
    table("row_and_key", "t: f32[n, row, k] grad", "t[row % 3, row, k]", draw(t=(3, Q, K))),
    table("same_key", "t: f32[k, k] grad", "t[k, k] * s", draw(t=(K, K))),
    table("shifted", "c: f32[b, k] grad", "c[b, q - 1] * s", draw(c=(2, K))),
    Case("global_tokens", "attention g(seen: bool[b, k]) { align start mask abs(q - k) <= 4 or seen[b, k] }",
         lambda g: {"seen": torch.rand(2, K, generator=g) < 0.1}),
    Case("dilated", "attention dilated { mask 0 <= q - k < 20 and (q - k) % 3 == 0 }"),
]  # fmt: skip
