"""What a call does on the host before the launch: counted, not timed. Case 27: how many kernels many lengths build."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import attncc
from attncc import pipeline
from attncc.runtime.kernels import Kernels
from attncc.runtime.loader import load_module
from tests.house.tree import ROOT

TRITONS = ("tensor_descriptor.py", "_utils.py", "<string>")  # making descriptors, which a bare launch has to do too


class Launched:
    """Stands where a kernel stands: the operations up to its launch are what a call costs beyond it."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@pytest.fixture
def operations(gpu, monkeypatch):
    """operations(attention, *tensors, **params): the functions, Python's and C's, that a known call calls, or, after
    one of these, the first call of the tensors in `new`."""
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)

    def count(attention, *tensors, new=None, **params):
        attention(*tensors, **params)
        (launch,) = attention.launchers()
        for name in list(launch.__globals__):
            if name.startswith(f"{attention.name}_forward"):
                launch.__globals__[name] = Launched()
        made: list[str] = []

        def hear(frame, event, what):
            if event == "call" and not frame.f_code.co_filename.endswith(TRITONS):
                made.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)
            elif event == "c_call" and not frame.f_code.co_filename.endswith(TRITONS):
                made.append(what.__qualname__)

        sys.setprofile(hear)
        try:
            attention(*(new or tensors), **params)
        finally:
            sys.setprofile(None)
        return made[:-1]  # but the end of listening

    return count


def tensors(length=64):
    return [torch.zeros(1, length, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "params", "most"),
    [("causal", {}, 26), ("window_alibi_sinks", {"slopes": torch.ones(4), "sinks": torch.ones(4)}, 36)],
)
def test_a_known_call_does_little_before_its_launch(operations, name, params, most):
    attention = attncc.load(ROOT / "specs" / f"{name}.attn")
    with torch.no_grad():
        made = operations(attention, *tensors(), **params)
    assert len(made) <= most, made
    assert made.count("Tensor.new_empty") == 2 and not {"Attention._prepare", "_prepare"} & set(made)


@pytest.mark.parametrize(
    ("name", "params", "most"),
    [("causal", {}, 96), ("streaming", {"first": 4, "window": 9}, 107)],
)
def test_a_new_length_of_a_known_bucket_does_little_more(operations, name, params, most):
    """What follows from the spec alone is worked out once."""
    attention = attncc.load(ROOT / "specs" / f"{name}.attn")
    with torch.no_grad():
        made = operations(attention, *tensors(), new=tensors(48), **params)
    assert len(made) <= most and {"Attention._prepare", "_prepare"} & set(made), made


def test_a_new_shape_of_a_known_bucket_plans_nothing(operations, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("planned again")

    attention = attncc.load(ROOT / "specs" / "causal.attn")
    with torch.no_grad():
        operations(attention, *tensors())
        monkeypatch.setattr(pipeline, "plan_parsed", refuse)
        monkeypatch.setattr(pipeline, "kernel", refuse)
        attention(*tensors(50))
        attention(*(x.repeat(3, 1, 1, 1) for x in tensors(33)))


def test_27_many_lengths_and_batches_build_few_kernels(gpu, monkeypatch):
    built: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def module(self, target, entry):
        built[entry.key["direction"]].add(entry.digest)
        nothing = lambda q, *_, **__: (q, q)
        return SimpleNamespace(forward=nothing, backward=nothing)

    monkeypatch.setattr(Kernels, "_module", module)
    attention = attncc.compile(
        "attention few(window: int, bias: f32[h] grad) { mask q - k < window score s + bias[h] }"
    )
    lengths = sorted({*range(1, 80), *(int(80 * 1.2**j) for j in range(22))})
    assert len(lengths) >= 100
    for length in lengths:
        for batch in range(1, 6):
            x = torch.empty(batch, 2, length, 64, dtype=torch.bfloat16)
            with torch.no_grad():
                attention(x, x, x, window=length, bias=torch.zeros(2))
            attention.ready(x, x, x, {"window": length, "bias": torch.zeros(2)}).kind.backward(True)
    assert 1 <= len(built["forward"]) <= 4 and 1 <= len(built["backward"]) <= 4


def test_nothing_is_collected_while_modules_are_made(tmp_path):
    """A collection goes through all that torch has made, which takes longer than the imports."""
    made = load_module(tmp_path / "quiet.py", b"import gc\ncollects = gc.isenabled()\n", "attncc_generated_quiet")
    assert not made.collects and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        load_module(tmp_path / "wrong.py", b"1 / 0", "attncc_generated_wrong")
    assert gc.isenabled()


NEW_PROCESS = """
import sys, torch, attncc
attention = attncc.load(sys.argv[1])
with torch.no_grad():
    attention(*(torch.zeros(1, 2, 40, 16) for _ in range(3)))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jinja2", "lark", "sympy", "triton", "rich", "click"}))
"""


def test_a_new_process_finds_its_kernels_without_what_plans_and_renders(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    spec = ROOT / "specs" / "causal.attn"
    with torch.no_grad():
        attncc.load(spec)(*(torch.zeros(1, 2, 40, 16) for _ in range(3)))
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, spec], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "[]\n"
