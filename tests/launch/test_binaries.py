"""What Triton compiled is kept beside the source: the next process compiles nothing, and loads nothing broken."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
import triton

import attncc
from attncc import pipeline
from attncc.codegen.signature import arguments
from attncc.codegen.triton import kernel_names
from attncc.ir import Shape
from attncc.runtime.binaries import Binaries
from attncc.runtime.cache import Cache
from attncc.runtime.compile import cross_compile, load_module

TEXT = "attention small(window: int = 7) { mask 0 <= q - k < window }"


def call(attn=None):
    attn = attn or attncc.compile(TEXT)
    q, k, v = (torch.zeros(1, 2, 40, 16, dtype=torch.float16) for _ in range(3))
    with torch.no_grad():
        attn(q, k, v)
    return attn


def refuse(*_, **__):
    raise AssertionError("compiled although the cache has it")


def binaries():
    return [e for e in Cache().entries() if e.kind == "binary"]


def test_a_second_process_neither_renders_nor_compiles(gpu, monkeypatch):
    call()
    (kept,) = binaries()
    assert sorted(kept.files) == ["small_forward.cubin", "small_forward.json"]
    assert kept.key["target"] == "cuda 90 32" and ["window", "i32"] in kept.key["signature"]
    monkeypatch.setattr(triton, "compile", refuse)
    monkeypatch.setattr("attncc.pipeline.render", refuse)
    attn = call()
    call(attn)
    assert gpu.launched == ["small_forward"] * 3


@pytest.mark.parametrize("damage", ["truncated", "altered", "gone", "altered after it was compared"])
def test_a_broken_binary_is_compiled_again(gpu, monkeypatch, damage):
    call()
    (kept,) = binaries()
    cubin = kept.path / "small_forward.cubin"
    whole, compiled = triton.compile, []

    def count(*args, **options):
        compiled.append(args)
        return whole(*args, **options)

    monkeypatch.setattr(triton, "compile", count)
    if damage == "truncated":
        cubin.write_bytes(cubin.read_bytes()[:-1])
    elif damage == "altered":
        cubin.write_bytes(b"\0" * len(cubin.read_bytes()))
    elif damage == "gone":
        cubin.unlink()
    else:
        monkeypatch.setattr(Cache, "get_or_build", _alters(cubin, Cache.get_or_build))
    call()
    assert len(compiled) == 1 and len(gpu.launched) == 2


def _alters(path: Path, whole):
    def get_or_build(self, key, builder):
        entry = whole(self, key, builder)
        if key.kind == "binary":
            path.write_bytes(b"\0")
        return entry

    return get_or_build


@pytest.mark.parametrize("change", ["version", "variable"])
def test_what_triton_compiles_by_is_in_the_key(gpu, monkeypatch, change):
    call()
    first = {e.digest for e in binaries()}
    if change == "version":
        monkeypatch.setattr(triton, "__version__", "3.99.0")
    else:
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    call()
    assert len({e.digest for e in binaries()} - first) == 1


@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_compiled_ahead_is_what_a_launch_asks_for(gpu, monkeypatch, aligned):
    attn = attncc.compile(TEXT)
    shape = Shape(head_dim=16, head_dim_v=16, dtype="f16")
    planned = pipeline.every_kernel(pipeline.plan_parsed(attn.parsed, attn.consts, {}, shape, "sm_90"))
    entry = pipeline.kernel(planned[0 if aligned else -1], Cache(), resources=False)
    (source,) = entry.path.glob("*.py")
    kept = Binaries(Cache(), sha256(source.read_bytes()).hexdigest())
    chosen = planned[0 if aligned else -1].choice.plan
    args = arguments(attn.spec, chosen, kernel_names(attn.spec)[1])
    name = "small_forward" if aligned else "small_forward_any_stride"
    cross_compile(getattr(load_module(source), name), args, chosen, aligned, kept.compile)
    monkeypatch.setattr(triton, "compile", refuse)
    step = 1 if aligned else 2
    q, k, v = (torch.zeros(1, 2, 80, 16 * step, dtype=torch.float16)[..., ::step] for _ in range(3))
    with torch.no_grad():
        attn(q, k, v)
    assert gpu.launched == ["small_forward"]


def test_an_unusable_cache_compiles_all_the_same(gpu, monkeypatch, recwarn):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", "/proc/attncc")
    call()
    assert gpu.launched == ["small_forward"]
    assert sum("going on without it" in str(w.message) for w in recwarn.list) == 1


def test_other_kernels_are_left_alone(gpu):
    from triton.runtime.jit import JITFunction

    @triton.jit
    def own(X):
        triton.language.store(X, 1)

    call()
    own[(1,)](torch.zeros(1))
    assert own.compile is triton.compile and isinstance(own, JITFunction)
    assert len(binaries()) == 1 and gpu.launched == ["small_forward", "own"]
