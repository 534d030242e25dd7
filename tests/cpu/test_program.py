"""The generated PyTorch program: numbers, what it looks at, what it keeps, and that nothing of a spec breaks it."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attncc
from attncc import analysis, frontend
from attncc.codegen import render_cpu
from attncc.codegen.naming import parameter_names, reserved
from attncc.ir import KernelPlan, Shape
from attncc.runtime.check import check
from attncc.runtime.reference import reference

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))
SHAPES = (Shape(2, 4, 2, 33, 47, 8, 12), Shape(1, 2, 1, 21, 5, 16, 8), Shape(1, 2, 2, 70, 133, 8, 8))


def rendered(text: str, tile_q: int = 16, tile_k: int = 16, tables: bool = True):
    """(spec with consts bound, the file's text)"""
    spec = frontend.parse(text).spec
    spec = spec.bind({p.name: 16 for p in spec.consts if p.default is None})
    plan = KernelPlan("cpu", "fa2", "q_outer", tile_q, tile_k, 1, 1, 16, 8, "f32")
    return spec, render_cpu(spec, analysis.visits(spec, "q", tables=tables), plan, text)


def program(text: str, **options):
    """(spec, a callable that takes parameters by name)"""
    spec, source = rendered(text, **options)
    space: dict = {"__name__": "program"}
    exec(compile(source, "program", "exec"), space)
    forward = space["forward"]
    given = {p.name for p in spec.params}
    return spec, lambda q, k, v, **params: forward(
        q, k, v, *(params[p.name] for p in spec.params), **{n: x for n, x in params.items() if n not in given}
    )


def random(*sizes, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in sizes]


def qkv(batch=1, heads=2, kv_heads=1, rows=40, keys=56, head=8, dtype=torch.float32):
    return random((batch, heads, rows, head), (batch, kv_heads, keys, head), (batch, kv_heads, keys, head), dtype=dtype)


def close(got, want, part=1e-5):
    for x, y in zip(got, want, strict=True):
        finite = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), finite)
        assert (x - y)[finite].abs().sum() <= part * y[finite].abs().sum()


def same(got, want, part=1e-5):
    """As close; infinities and NaN where they belong."""
    for x, y in zip(got, want, strict=True):
        x = x.double()
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(torch.isposinf(x), torch.isposinf(y)) and torch.equal(torch.isneginf(x), torch.isneginf(y))
        finite = torch.isfinite(y)
        assert (x - y)[finite].abs().sum() <= part * y[finite].abs().sum()


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_each_spec_of_the_library_over_many_tiles(path, tables):
    spec, run = program(path.read_text(encoding="utf-8"), tables=tables)
    report = check(spec, run=run, shapes=SHAPES, seeds=(0, 1))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "body",
    [
        "softmax off_by_one mask k <= q", "weight 1 / (1 + abs(q - k)) mask q != k", "scale 1 / sqrt(k_len + 1)",
        "score s * (h_kv + 1)", "score q * 0.5", "score where(s > 0, s, 0.0) mask h % 2 == 0 or k < 9",
        "mask b_len > 1 and not k_len < 3", "mask not (q_len > 40)", "score s - 0.1 * (q - k) score s * 2 mask true",
        "let near = abs(q - k) score s - 0.1 * near mask near < 20 weight where(near < 5, 1, 0.5)",
        "score 0.25", "score h", "mask (q - 100) // 7 % 3 == k // 7 % 3", "mask k // (k_len // 3) == 1",
        "score s + floor(log2(max(q - k, 1)))", "mask false", "softmax sink(0.1 * row - 1) mask k < row",
        "mask k <= q + floor(k_len / 2.5)", "mask k < floor(sqrt(q_len) * log2(k_len))", "mask exp(q_len) < 3",
        "mask sigmoid(k_len) > tanh(0.5) and k <= q", "mask k <= q or 1 / (k_len - k_len) < 3",
        "mask log(q_len - q_len) < exp(1000 * k_len) and k <= q",
    ],
)  # fmt: skip
def test_forms_of_the_language(body):
    spec, run = program(f"attention form {{ {body} }}")
    report = check(spec, run=run, shapes=SHAPES[:2], seeds=(0,))
    assert report.passed, str(report)


class Count(TorchDispatchMode):
    """Which operators ran, and the largest storage that one of them made."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.calls.append(func._schema.name)
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return made


def test_full_tiles_never_evaluate_the_mask_and_empty_ones_are_not_visited():
    q, k, v = qkv(rows=64, keys=64)
    for text, visited, masked in (("mask k <= q", 10, 4), ("mask 0 <= q - k < 16", 7, 7), ("", 16, 0)):
        _, run = program(f"attention counted {{ {text} }}")
        with Count() as count:
            run(q, k, v)
        assert count.calls.count("aten::bmm") == visited
        assert count.calls.count("aten::masked_fill_") == masked


def laid(x, layout):
    """The same numbers in other places."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        return torch.cat((x, x, x), -1)[..., x.shape[3] : 2 * x.shape[3]]
    if layout == "part":
        return torch.cat((x[:, :, :3], x, x[:, :, :5]), 2)[:, :, 3:-5]
    offset = {"odd": 1, "line": 16}[layout]  # elements; a cache line holds 16 of float32
    return torch.cat((x.new_zeros(offset), x.flatten()))[offset:].view(x.shape)


@pytest.mark.parametrize("layout", ["transposed", "fused", "part", "odd", "line"])
@pytest.mark.parametrize("head", [64, 7])
def test_a_view_gives_the_bits_of_its_contiguous_copy(layout, head):
    """Whether keys are taken as they lie or copied; in every pass."""
    attn = attncc.compile("attention causal { mask k <= q }")
    plain = [x.requires_grad_() for x in qkv(2, 4, 2, 300, 333, head)]
    for views in (
        [laid(x.detach(), layout).requires_grad_() for x in plain],
        [plain[0], *(x.detach()[:1, :1].expand(x.shape).requires_grad_() for x in plain[1:])],
    ):
        copies = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in views]
        made = []
        for inputs in (views, copies):
            out, lse = attn(*inputs, return_lse=True)
            gradients = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
            moved = torch.func.jvp(attn, tuple(inputs), tuple(inputs))[1]
            made.append((out, lse, moved, *gradients))
        assert all(map(torch.equal, *made))


def test_keys_are_not_copied_where_they_lie_as_a_copy_would():
    _, run = program("attention causal { mask k <= q }")
    q, k, v = qkv(kv_heads=2, rows=64, keys=64, head=16)
    copied = []
    for keys, values in ((k, v), (k, laid(v, "transposed")), (laid(k, "odd"), laid(v, "fused"))):
        with Count() as count:
            run(q, keys, values)
        copied.append(count.calls.count("aten::copy_"))
    assert (copied[1] - copied[0], copied[2] - copied[0]) == (10, 2 * 10)  # ten tiles are visited


def test_documents_visit_their_own_tiles_alone():
    _, run = program("attention documents(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] }")
    q, k, v = qkv(batch=2, rows=64, keys=64)
    doc = torch.stack([torch.arange(64) // 32, torch.arange(64) // 16]).int()
    with Count() as count:
        run(q, k, v, doc=doc)
    assert count.calls.count("aten::bmm") == 4 * 2 + 4
    assert count.calls.count("aten::masked_fill_") == 0


def test_so_do_those_that_the_road_builds():
    attn = attncc.compile("attention documents(doc: i32[b, k]) { mask doc[b, q] == doc[b, k] }")
    q, k, v = qkv(rows=1024, keys=1024)
    doc = (torch.arange(1024) // 256)[None].int()
    attn(q, k, v, doc=doc)
    (forward,) = attn.launchers()  # to a mode, the call as a whole is one operator
    with Count() as count:
        forward(q, k, v, doc)
    assert count.calls.count("aten::bmm") == 4 * 2
    assert count.calls.count("aten::masked_fill_") == 0


def test_memory_is_linear_in_length():
    text = "attention linear(window: int, slopes: f32[h]) { mask 0 <= q - k < window score s - slopes[h] * k }"
    _, run = program(text)
    for length in (256, 1024):
        q, k, v = qkv(rows=length, keys=length)
        with Count() as count:
            run(q, k, v, window=40, slopes=torch.ones(2))
        assert count.largest <= 4 * 2 * length * 8  # the output itself; a tile of scores is smaller


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "copy",
        "first",
        "last",
        "tile",
        "keys",
        "rows",
        "dtype",
        "group",
        "m",
        "out",
        "Q",
        "B",
        "range",
        "len",
        "i",
        "slice",
        "s_",
        "k_",
    ],
)
def test_names_of_a_spec_do_not_meet_those_of_the_file(name):
    text = f"attention named({name}: int, real: f32[h]) {{ mask k < {name} and k <= q score s + real[h] * (q - k) }}"
    spec, run = program(text)
    q, k, v = qkv()
    params = {name: 13, "real": torch.tensor([0.5, -0.25])}
    close(run(q, k, v, **params), reference(spec, q, k, v, params))


RICH = """attention rich(doc: i32[b, k], on: bit[b, row, n], sink: f32[h], near: int, blocks: bool[h, x, y]) {
    mask (doc[b, q] == doc[b, k] or on[b, row, k]) and k < floor(k_len / 0.5) + near
    mask blocks[h, q // 64, k // 64] or near // 3 % 2 == 0
    softmax sink(sink[h])
}"""


def test_no_parameter_can_take_the_name_of_a_function_that_the_program_calls():
    for text in (RICH, *(path.read_text(encoding="utf-8") for path in SPECS)):
        tree = ast.parse(rendered(text)[1])
        forward = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
        called = {n.func.id for n in ast.walk(forward) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert "slice" in called and called <= reserved()


def test_names_stay_where_they_can():
    spec, source = rendered("attention plain(window: int, first: int = 3) { mask q - k < window or k < first }")
    names = parameter_names(spec)
    assert names["window"] == "window" and f"def forward(q, k, v, window, {names['first']}=3):" in source


@pytest.mark.parametrize(
    "comment", ["coding: latin-1", "vim: set fileencoding=ascii :", '"""', "\x0c import os", "é \u2028 x"]
)
def test_a_comment_stays_a_comment(comment):
    source = rendered("attention c { }")[1]
    spec = frontend.parse("attention c { }").spec
    plan = KernelPlan("cpu", "fa2", "q_outer", 16, 16, 1, 1, 16, 8, "f32")
    for text in (f"# {comment}\nattention c {{ }}", f"\n# x {comment}"):
        hostile = render_cpu(spec, analysis.visits(spec, "q"), plan, text)
        code = compile(hostile.encode(), "c", "exec")
        assert list(code.co_names) == list(compile(source.encode(), "c", "exec").co_names)


def test_equal_requests_give_equal_bytes():
    text = SPECS[0].read_text(encoding="utf-8")
    assert rendered(text)[1] == rendered(text)[1]


@pytest.mark.parametrize("dtype, part", [(torch.float64, 1e-13), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_types(dtype, part):
    spec, run = program("attention typed(gain: float, t: f32[k]) { score s * gain + t[k] - 0.1 * (q - k) mask k <= q }")
    q, k, v = qkv(dtype=dtype)
    params = {"gain": 0.7, "t": torch.linspace(0, 1, 56)}
    out, lse = run(q, k, v, **params)
    assert out.dtype == dtype and lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    close((out, lse), reference(spec, q, k, v, params), part)


def test_the_process_defaults_change_nothing():
    _, run = program("attention d(gain: float) { score s * gain / (1 + abs(q - k)) mask k <= q }")
    q, k, v = qkv()
    want = run(q, k, v, gain=0.7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = run(q, k, v, gain=0.7)
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(q, k, v, gain=0.7)
    for x, y, z in zip(want, again, cast, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_excluded_adds_nothing_even_where_it_is_not_finite(bad):
    spec, run = program("attention padded(length: int) { mask k < length and k <= q }")
    q, k, v = qkv(keys=40)
    k[:, :, 29:], v[:, :, 29:] = torch.nan, bad
    v[0, 0, 20, 3] = bad  # a key that rows from 20 on do see
    got, want = run(q, k, v, length=29), reference(spec, q, k, v, {"length": 29})
    close(got, want)
    assert torch.equal(got[0].isnan(), want[0].isnan())
    assert torch.isfinite(got[0][:, :, :20]).all() and not torch.isfinite(got[0][:, :, 20:, 3]).any()


@pytest.mark.parametrize("weight", ["1.0", "-1.0", "0.0", "k - 2", "2 - k", "where(q > 9, gain, -gain)"])
def test_a_weight_takes_its_sign_and_its_zero_to_what_is_not_finite(weight):
    spec, run = program(f"attention gated(gain: float) {{ mask k <= q weight {weight} + 0.0 * gain }}")
    q, k, v = qkv()
    v[0, 0, 2, 0], v[0, 0, 3, 1], v[0, 0, 20, 0], v[0, 0, 30, 2] = torch.inf, -torch.inf, -torch.inf, torch.nan
    same(run(q, k, v, gain=2.0), reference(spec, q, k, v, {"gain": 2.0}))


def test_what_is_not_finite_stays_so_when_the_maximum_rises():
    _, run = program("attention rises { score s + 12 * k }")  # by more than float32 can rescale
    q, k, v = qkv()
    v[0, 0, 1, 0] = torch.inf
    assert torch.isposinf(run(q, k, v)[0][..., 0]).all()


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_a_sink_may_be_infinite(sink):
    spec, run = program("attention sunk(sink: float) { mask k <= q softmax sink(sink) }")
    q, k, v = qkv(keys=30)  # some rows see nothing
    same(run(q, k, v, sink=sink), reference(spec, q, k, v, {"sink": sink}))


@pytest.mark.parametrize("f", [0.0, -0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "body",
    [
        "softmax sink(1 / f)", "score s + 1 / f", "score s + n / f - f / 0.0", "mask k * (1 / f) >= 0",
        "mask f / f > 0 or k < 2", "weight 1 / f", "score s + 2 / (f / f) / (f + f)",
        "mask k <= q + floor(1 / (f * f + 1))",
        "score where(k == 2, -1.0 / 0.0, s)", "score where(k == 2, 1 / (0 * f), s)", "scale 1 / (1 + 1 / f)",
    ],
)  # fmt: skip
def test_floats_divide_as_ieee_has_it(body, dtype, f):
    spec, run = program(f"attention divided(f: float, n: int) {{ {body} }}")
    q, k, v = (x.to(dtype) for x in qkv())
    params = {"f": f, "n": 0}
    same(run(q, k, v, **params), reference(spec, q, k, v, params))


@pytest.mark.parametrize("empty", ["batch", "heads", "rows", "keys"])
def test_nothing_to_do(empty):
    sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "rows": 3, "keys": 4, empty: 0}
    if empty == "heads":
        sizes["kv_heads"] = 0
    text = "attention e(length: i32[b], t: f32[k]) { mask k < length[b] and k % k_len == k score s + t[k] }"
    _, run = program(text)
    q, k, v = qkv(**sizes)
    out, lse = run(q, k, v, length=torch.ones(sizes["batch"], dtype=torch.int32), t=torch.ones(sizes["keys"]))
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_a_row_has_the_same_bits_whatever_lies_beside_it_in_the_batch():
    _, run = program("attention causal { mask k <= q }")
    q, k, v = qkv(batch=3)
    for whole, one in zip(run(q, k, v), run(q[1:2], k[1:2], v[1:2]), strict=True):
        assert torch.equal(whole[1:2], one)


def _run_file(tmp_path, source):
    file = tmp_path / "file.py"
    file.write_text(source, encoding="utf-8")
    return subprocess.run([sys.executable, "-I", str(file)], capture_output=True, text=True, check=False, cwd=tmp_path)


def test_the_file_runs_alone_and_checks_itself(tmp_path):
    _, source = rendered((SPECS[-1]).read_text(encoding="utf-8"), 64, 64)
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import torch"]
    done = _run_file(tmp_path, source)
    assert done.returncode == 0 and "from float64" in done.stdout, done.stderr
    wrong = source.replace("rescale = torch.exp(m - m_safe)", "rescale = 1.001 * torch.exp(m - m_safe)")
    assert wrong != source
    assert _run_file(tmp_path, wrong).returncode == 1


def test_a_const_is_a_number_in_the_file():
    spec, source = rendered("attention blocks(size: const int = 24) { mask k // size == q // size }")
    assert "// 24" in source and "size" not in source.split("import torch")[1].split("def copy")[0]
    assert replace(spec, params=()) == spec
