"""Plans compiled in processes of their own: a launch finds what they made, and a failure is told in words."""

from __future__ import annotations

import pytest
import torch
import triton

import attncc
from attncc import pipeline, planner
from attncc.ir import Shape
from attncc.runtime.cache import Cache
from attncc.runtime.precompile import Job, Workers, compile_job

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


def test_a_process_that_dies_is_told_of(tmp_path, workers):
    assert workers.submit(job(tmp_path)).result(timeout=120) is None
    for process in workers._started:
        process.kill()
        process.wait()
    with pytest.raises(RuntimeError, match="ended with status -9"):
        workers.submit(job(tmp_path)).result(timeout=120)
    assert workers.submit(job(tmp_path)).result(timeout=120) is None


def test_a_launch_finds_what_was_compiled_ahead(gpu, tmp_path, monkeypatch):
    compile_job(job(tmp_path / "cache"))
    monkeypatch.setattr(triton, "compile", refuse)
    q, k, v = (torch.zeros(1, 2, 2000, 16, dtype=torch.float16) for _ in range(3))
    with torch.no_grad():
        attncc.compile(TEXT)(q, k, v)
    assert gpu.launched == ["small_forward"]
