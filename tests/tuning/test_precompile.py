"""Plans compiled in processes of their own: a launch finds what they made, and a failure is told in words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

import attncc
from attncc import pipeline, planner
from attncc.ir import Shape
from attncc.runtime import headstart
from attncc.runtime.cache import Cache
from attncc.runtime.precompile import Job, Workers, compile_job
from attncc.runtime.tune import candidates_of

TEXT = "attention small { mask k <= q }"
SHAPE = planner.bucket_of(Shape(head_dim=16, head_dim_v=16, dtype="f16"))


def job(tmp_path, direction="forward", **changes):
    attn = attncc.compile(TEXT)
    planned = pipeline.plan_parsed(attn.parsed, {}, {}, SHAPE, "sm_90")
    planned = planned if direction == "forward" else pipeline.backward(planned)
    tuned = {direction: {**planner.choices_of(planned.choice.plan), **changes}}
    return Job(TEXT, {}, SHAPE, "sm_90", 32, tuned, direction, str(tmp_path))


def refuse(*_, **__):
    raise AssertionError("compiled although it was compiled ahead")


@pytest.fixture
def workers():
    made = Workers(2)
    yield made
    made.close()


def test_they_compile_and_say_what_fails(tmp_path, workers):
    good = workers.submit(job(tmp_path))
    bad = workers.submit(
        Job("attention wrong { mask k <= nobody }", {}, SHAPE, "sm_90", 32, {}, "forward", str(tmp_path))
    )
    assert good.result(timeout=120) is None
    with pytest.raises(RuntimeError, match="unknown name 'nobody'"):
        bad.result(timeout=120)
    assert sorted(e.kind for e in Cache(tmp_path).entries()) == ["binary", "kernel"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_launches_each_kernel_is_made_ahead_too(tmp_path, monkeypatch, direction):
    made = []
    monkeypatch.setattr(headstart, "launcher", lambda src: lambda: made.append(src.name))
    compile_job(job(tmp_path, direction))
    kept = [e.key["kernel"] for e in Cache(tmp_path).entries() if e.kind == "binary"]
    assert sorted(made) == sorted(kept) and made


def test_a_process_that_dies_is_told_of(tmp_path, workers):
    assert workers.submit(job(tmp_path)).result(timeout=120) is None
    for process in workers._started:
        process.kill()
        process.wait()
    other = job(tmp_path, stages=1)
    with pytest.raises(RuntimeError, match="ended with status -9"):
        workers.submit(other).result(timeout=120)
    assert workers.submit(other).result(timeout=120) is None  # what failed is tried again, what is done is not
    assert workers.submit(other) is workers.submit(other)


def test_a_launch_finds_what_was_compiled_ahead(gpu, tmp_path, monkeypatch):
    compile_job(job(tmp_path / "cache"))
    monkeypatch.setattr(triton, "compile", refuse)
    with torch.no_grad():
        attncc.compile(TEXT)(*tensors())
    assert gpu.launched == ["small_forward"]


def test_so_does_a_backward_pass(gpu, tmp_path, monkeypatch):
    attn, (q, k, v) = attncc.compile(TEXT), tensors()
    compile_job(job(tmp_path / "cache", "backward"))
    with torch.no_grad():
        out, lse = attn(q, k, v, return_lse=True)
        monkeypatch.setattr(triton, "compile", refuse)
        attn.gradients(attn.ready(q, k, v, {}), (q, k, v, out, lse, torch.zeros_like(out), torch.zeros_like(lse)), {})
    assert len(gpu.launched) == 4


@pytest.mark.slow
def test_so_does_a_warp_specialised_kernel(gpu, tmp_path, monkeypatch):
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    attn = attncc.compile(TEXT)
    planned = pipeline.plan_parsed(attn.parsed, {}, {}, SHAPE, "sm_90")
    (first, *_) = (c for c in candidates_of(planned, "forward") if c.plan.algorithm == "fa3")
    compile_job(replace(job(tmp_path / "cache"), tuned={"forward": first.choices}))
    monkeypatch.setattr(triton, "compile", refuse)
    plan = planner.with_choices(planned.choice.plan, first.choices, planned.target)
    pinned = replace(planned, choice=replace(planned.choice, plan=plan), tuned={"forward": first.choices})
    with torch.no_grad():
        attn.having(pinned.tuned, pinned)(*tensors())
    assert gpu.launched == ["small_forward"]


def tensors():
    return [torch.zeros(1, 2, 2000, 16, dtype=torch.float16) for _ in range(3)]
