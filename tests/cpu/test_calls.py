"""Calls with wrong arguments: the error names the argument, what the spec expects, and what came."""

from __future__ import annotations

import copy
import pickle
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attncc
from attncc.errors import EnvironmentFault
from attncc.runtime.device import target_for

SPEC = """
attention x(window: int, block: const int = 2, gain: float = 1.0, slopes: f32[h], doc: i32[b, k] sorted,
            near: bool[buckets, h_kv], seen: bit[row, k], pair: i8[3]) {
    mask  q // block >= k // block and doc[b, q] == doc[b, k] and q % window >= 0 and near[k % buckets, h_kv]
    mask  seen[row, k]
    score gain * s + slopes[h] * pair[0]
}
"""
ATTN = attncc.compile(SPEC)


def good() -> dict:
    """B 2, H 4, H_kv 2, Q 5, K 40, D 8, D_v 16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 40, 8), "v": (2, 2, 40, 16)}
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} | {
        "window": 3, "slopes": torch.ones(4), "doc": torch.zeros(2, 40, dtype=torch.int32),
        "near": torch.ones(7, 2, dtype=torch.bool), "seen": torch.full((5, 2), -1, dtype=torch.int32),
        "pair": torch.zeros(3, dtype=torch.int8),
    }  # fmt: skip


WRONG = [
    ({"q": None}, TypeError, "q must be a tensor"),
    ({"q": torch.zeros(4, 5, 8)}, ValueError, "q must be [B, H, Q, D], and has shape [4, 5, 8]"),
    ({"v": torch.zeros(2, 40, 16)}, ValueError, "v must be [B, H_kv, K, D_v], and has shape [2, 40, 16]"),
    ({"k": torch.zeros(2, 2, 40, 8, dtype=torch.float16)}, TypeError, "k must have the dtype of q, torch.float32"),
    ({"v": torch.zeros(2, 2, 40, 16, device="meta")}, ValueError, "v must be on the device of q, cpu, and is on meta"),
    ({n: good()[n].int() for n in "qkv"}, TypeError, "q must be bfloat16, float16 or float32"),
    ({"k": torch.zeros(3, 2, 40, 8)}, ValueError, "batch size B"),
    ({"v": torch.zeros(2, 1, 40, 16)}, ValueError, "number of heads H_kv"),
    ({"k": torch.zeros(2, 2, 40, 9)}, ValueError, "head size D"),
    ({"v": torch.zeros(2, 2, 41, 16)}, ValueError, "length K"),
    ({"q": torch.zeros(2, 5, 5, 8)}, ValueError, "k must have a number of heads that divides q's 5, and has 2"),
    ({n: good()[n].to("meta") for n in "qkv"}, TypeError, "q must be a tensor with elements, and is on meta"),
    (
        {"q": torch.zeros(2, 4, 5, 513), "k": torch.zeros(2, 2, 40, 513)},
        ValueError,
        "head sizes go up to 512: D is 513, D_v is 16",
    ),
    ({"v": torch.zeros(2, 2, 40, 600)}, ValueError, "head sizes go up to 512: D is 8, D_v is 600"),
    ({"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 40, 0)}, ValueError, "head sizes must be at least 1"),
    ({"slope": torch.ones(4)}, TypeError, "slope"),
    ({"block": 4}, TypeError, "block"),
    ({"window": True}, TypeError, "window must be an int, and is a bool: True"),
    ({"window": 2.0}, TypeError, "window must be an int, and is a float: 2.0"),
    ({"window": 0}, ValueError, "window divides, so that it must be at least 1, and is 0"),
    ({"window": torch.ones(1)}, TypeError, "window must be an int, or a 0-d tensor of one"),
    ({"window": 2**63}, ValueError, "window must be a 64-bit int"),
    ({"gain": "1"}, TypeError, "gain must be a float, and is a str: '1'"),
    ({"slopes": 1.0}, TypeError, "slopes must be a tensor f32[h], and is a float"),
    ({"slopes": torch.ones(4, dtype=torch.float64)}, TypeError, "slopes must be torch.float32 for f32[h]"),
    ({"slopes": torch.ones(2, 4)}, ValueError, "slopes must have the axes f32[h], and has shape [2, 4]"),
    ({"slopes": torch.ones(2)}, ValueError, "slopes must have 4 (H) along axis 0 of f32[h], and has 2"),
    ({"slopes": torch.ones(4, device="meta")}, ValueError, "slopes must be on the device of q, cpu, and is on meta"),
    ({"doc": torch.zeros(2, 39, dtype=torch.int32)}, ValueError, "doc must have 40 (K) along axis 1"),
    ({"near": torch.ones(0, 2, dtype=torch.bool)}, ValueError, "the axis buckets divides"),
    ({"seen": torch.ones(5, 2, dtype=torch.bool)}, TypeError, "bits are packed 32 to an int32"),
    ({"seen": torch.ones(5, 40, dtype=torch.int32)}, ValueError, "seen must have 2 words of 32 bits (K) along axis 1"),
    ({"pair": torch.zeros(2, dtype=torch.int8)}, ValueError, "pair must have 3 along axis 0 of i8[3], and has 2"),
    ({"window": 10**400}, ValueError, "window must be a 64-bit int, and is about 2^1328"),
    ({"window": -(10**5000)}, ValueError, "window must be a 64-bit int, and is about -2^16609"),
    ({"gain": 10**400}, ValueError, "gain must be a float, and is about 2^1328, too large for one"),
    ({"window": np.float32(2)}, TypeError, "window must be an int, and is a numpy.float32"),
    ({"window": np.True_}, TypeError, "window must be an int, and is a numpy.bool"),
    ({"window": torch.tensor(2, device="meta")}, ValueError, "window must be an int, and is a tensor on meta"),
    ({"q": good()["q"].to_sparse()}, TypeError, "q must be a dense tensor, and is a sparse_coo one"),
    ({"v": good()["v"].to_sparse()}, TypeError, "v must be a dense tensor, and is a sparse_coo one"),
    (
        {"q": torch.nested.as_nested_tensor([good()["q"][0]], layout=torch.jagged)},
        TypeError,
        "q must be a dense tensor",
    ),
    ({"slopes": torch.ones(4).to_sparse()}, TypeError, "slopes must be a dense tensor"),
    ({"validate": True, "doc": torch.arange(80, dtype=torch.int32).flip(0).view(2, 40)}, ValueError, "declared sorted"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_a_wrong_argument_is_named(change, kind, said):
    with pytest.raises(kind, match=re.escape(said)):
        ATTN(**good() | change)


@pytest.mark.parametrize("window", [3, 2, np.int64(-5), torch.tensor(3)])
def test_a_divisor_that_is_computed_of_parameters_is_checked(window):
    text = "attention x(window: int = 8, skip: const int) { mask q // (window - skip) == k // min(window, 9) }"
    attn, x = attncc.compile(text, skip=3), torch.zeros(1, 1, 4, 16)
    attn(x, x, x)
    attn(x, x, x, window=4)
    said = f"x: window - 3 divides, so that it must be at least 1, and is {int(window) - 3} with window = {int(window)}"
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(said)):
            attn(x, x, x, window=window)
    low = attncc.compile(text.replace("8", "2"), skip=3)
    with pytest.raises(ValueError, match="window - 3 divides, so that it must be at least 1, and is -1"):
        low(x, x, x)


def test_a_divisor_that_a_call_does_not_settle_alone_gives_0():
    attn, x = attncc.compile("attention x(window: int) { mask q // (window - k_len) == 0 }"), torch.ones(1, 1, 4, 16)
    assert attn(x, x, x, window=4).equal(x)


@pytest.mark.parametrize("flag", ["return_lse", "return_max", "return_entropy", "return_pairs", "validate"])
@pytest.mark.parametrize(
    ("given", "kind"),
    [(1, "an int"), (None, "a NoneType"), ("yes", "a str"), (np.True_, "a numpy.bool_?"),
     (torch.tensor(True), "a torch.Tensor")],
    ids=repr,
)  # fmt: skip
def test_a_flag_is_a_bool(flag, given, kind):
    with pytest.raises(TypeError, match=f"{flag} must be a bool, and is {kind}: "):
        ATTN(**good(), **{flag: given})


def test_deterministic_is_a_bool_or_left_out():
    ATTN(**good(), deterministic=None)
    with pytest.raises(TypeError, match="deterministic must be a bool or None, and is an int: 1"):
        ATTN(**good(), deterministic=1)


@pytest.mark.parametrize(
    "mask", ["k * 4611686018427387904 * 4 > q", "q - k > -9223372036854775808", "k * w * 4611686018427387904 * 4 > q"]
)
def test_constants_that_come_to_more_than_64_bits_are_a_diagnostic(mask):
    attn, x = attncc.compile(f"attention x(w: int = 2) {{ mask {mask} }}"), torch.zeros(1, 1, 4, 16)
    with pytest.raises(
        attncc.SpecError, match=r"E105: the constants of the masks come to -?\d+ together, which does not fit"
    ):
        attn(x, x, x)


MANY, LARGE = {"w": 2**62}, {"f": 1e19}


@pytest.mark.parametrize(
    ("body", "given", "said"),
    [
        ("mask k < w + 1", {"w": 2**63 - 1}, "w + 1 is 9223372036854775808 with w = 9223372036854775807"),
        ("mask k * (w * 4) <= q", MANY, "w * 4 is 18446744073709551616 with w = 4611686018427387904"),
        ("mask seen[k] + w * k_len > q", MANY, "w * k_len is 18446744073709551616 with k_len = 4, w = 461168601842738"),
        ("mask k % (w + w) < 3", MANY, "w + w is 9223372036854775808 with w = 4611686018427387904"),
        ("score where(k < 0, 1.0 * -(w + w), s)", MANY, "w + w is 9223372036854775808 with w = 4611686018427387904"),
        ("mask k <= q scale 1.0 * (w * w)", MANY, "w * w is 21267647932558653966460912964485513216 with w = 46116860"),
        ("mask k <= floor(f)", LARGE, "floor(f) is 10000000000000000000 with f = 1e+19, which does not fit 64 bits"),
        ("mask k <= floor(f / 0)", LARGE, "floor(f / 0) is inf with f = 1e+19"),
    ],
)
def test_an_int_of_a_call_that_64_bits_do_not_hold_is_named(body, given, said):
    attn = attncc.compile(f"attention x(w: int = 8, f: float = 0.0, seen: i8[k]) {{ {body} }}")
    x, seen = torch.zeros(1, 1, 4, 16), torch.ones(4, dtype=torch.int8)
    if "/ 0" not in body:
        attn(x, x, x, w=2**31, f=1e18, seen=seen)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(f"x: {said}")):
            attn(x, x, x, seen=seen, **given)


@pytest.mark.parametrize("name", ["slopes", "doc", "window"])
def test_a_missing_parameter_is_named(name):
    with pytest.raises(TypeError, match=f"x needs the parameter {name}"):
        ATTN(**{n: x for n, x in good().items() if n != name})


def test_all_that_is_missing_and_all_that_is_unknown_is_named_at_once():
    given = {n: x for n, x in good().items() if n not in ("slopes", "doc")}
    with pytest.raises(TypeError, match=re.escape("x needs the parameters slopes: f32[h], doc: i32[b, k]")):
        ATTN(**given)
    said = "x has no parameters 'slope', 'docs': did you mean slopes, doc?; x needs the parameters slopes"
    with pytest.raises(TypeError, match=re.escape(said)):
        ATTN(**given, slope=1, docs=2)
    with pytest.raises(TypeError, match=r"takes no seed; x has no parameters 'slope', 'zzz': it has "):
        ATTN(**good(), slope=1, zzz=2, seed=3)


def test_all_constants_that_are_missing_or_unknown_are_named_at_once():
    text = "attention x(m: const int, n: const int) { mask q // m == k // n }"
    with pytest.raises(TypeError, match=re.escape("x needs its const parameters: attncc.load(..., m=..., n=...)")):
        attncc.compile(text)
    with pytest.raises(TypeError, match="x has no const parameter 'c', 'd': it has m, n"):
        attncc.compile(text, c=1, d=2)


def test_a_good_call_lets_no_wrong_one_pass_behind_it():
    ATTN(**good())
    for change, kind, said in WRONG:
        with pytest.raises(kind, match=re.escape(said)):
            ATTN(**good() | change)
    ATTN(**good())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_interpreter_refuses_what_it_does_not_multiply_rightly(dtype):
    attn = attncc.compile("attention x { mask k <= q }", target="interpreter")
    q, k, v = (torch.zeros(1, 1, 4, 16, dtype=dtype) for _ in range(3))
    with pytest.raises(TypeError, match=f"q must be float16 or float32 in Triton's interpreter, and is {dtype}"):
        attn(q, k, v)


def test_the_interpreter_has_to_be_turned_on(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    attn = attncc.compile("attention x { mask k <= q }", target="interpreter")
    with pytest.raises(EnvironmentFault, match="TRITON_INTERPRET=1"):
        attn(*(torch.zeros(1, 1, 4, 16) for _ in range(3)))
    with pytest.raises(ValueError, match="q must be on the CPU"):
        target_for("interpreter", SimpleNamespace(dtype=torch.float32, device=torch.device("cuda")))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), torch.tensor(0.5)])
def test_numbers_of_other_libraries_are_numbers(number):
    want = ATTN(**good() | {"gain": 0.5})
    assert torch.equal(ATTN(**good() | {"gain": number, "window": np.int16(3)}), want)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_of_the_text_and_its_constants(copied):
    attn = attncc.compile(SPEC, block=np.int64(3))
    want = attn(**good())  # with kernels loaded
    again = copied(attn)
    assert again.consts == {"block": 3} and type(again.consts["block"]) is int
    assert (again.text, again.parsed, again.target) == (attn.text, attn.parsed, attn.target)
    assert torch.equal(again(**good()), want)


@pytest.mark.parametrize("text", [None, b"attention x {}", 3])
def test_a_text_is_a_str(text):
    with pytest.raises(TypeError, match=f"must be a str, and is of type {type(text).__name__}"):
        attncc.compile(text)


def test_faults_of_a_spec_are_an_error_of_the_package(tmp_path):
    with pytest.raises(attncc.SpecError, match="E301"):
        attncc.compile("attention x { mask unknown }")
    with pytest.raises(attncc.SpecError, match="n = about 2\\^1328 does not fit 64 bits"):
        attncc.compile("attention x(n: const int) { mask k < n }", n=10**400)
    path = tmp_path / "latin.attn"
    path.write_bytes("attention x {} # \xe9".encode("latin-1"))
    with pytest.raises(attncc.SpecError, match=r"latin.attn:1:18: error E101: byte 0xe9 is no UTF-8 text"):
        attncc.load(path)


def test_the_largest_integer_is_a_number_like_others():
    q = torch.zeros(1, 1, 3, 8)
    for mask in ("k <= 9223372036854775807", "k < 9223372036854775807"):
        _, lse = attncc.compile(f"attention x {{ mask {mask} }}")(q, q, q, return_lse=True)
        assert torch.allclose(lse, torch.tensor(3.0).log())
    for mask in ("k > 9223372036854775807", "q < -9223372036854775808"):
        _, lse = attncc.compile(f"attention x {{ mask {mask} }}")(q, q, q, return_lse=True)
        assert lse.isneginf().all()
