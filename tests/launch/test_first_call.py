"""What the first call of a spec does: no more than that call needs, and some of it beside the rest."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import get_cache_key

import attncc
from attncc import pipeline
from attncc.runtime import binaries, headstart, specs, winners
from attncc.runtime.winners import Device

TEXT = "attention first { mask k <= q }"


def call(attn, offset=0):
    """On k and v whose rows begin `offset` elements behind an aligned address."""
    q, k, v = (torch.zeros(1, 2, 40, 16 + offset, dtype=torch.float16)[..., offset:] for _ in range(3))
    with torch.no_grad():
        attn(q, k, v)


def files(attn):
    """What it has launched of, in the order of the calls."""
    return [Path(launch.__code__.co_filename).name for launch in attn.launchers()]


def refuse(*_, **__):
    raise AssertionError("planned although nobody needs it")


def test_the_kernel_for_any_strides_is_planned_when_a_call_needs_it(gpu, monkeypatch):
    attn = attncc.compile(TEXT)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "general", refuse)
        call(attn)
        with pytest.raises(AssertionError, match="nobody needs"):
            call(attn, offset=1)
    call(attn, offset=1)
    assert files(attn) == ["first_forward_sm_90.py", "first_forward_sm_90_any_stride.py"]
    monkeypatch.setattr(pipeline, "plan_parsed", refuse)
    later = attncc.compile(TEXT)
    call(later, offset=1)
    call(later)
    assert files(later) == files(attn)[::-1] and len(gpu.launched) == 4


def test_triton_is_made_ready_while_a_kernel_is_planned(gpu, monkeypatch):
    """On a GPU, and only where something has to be planned."""
    done, plan = [], pipeline.plan_parsed
    monkeypatch.setattr(winners, "device_of", lambda _: Device("Stub 9000", "sm_90", "12.8"))
    monkeypatch.setattr(headstart, "begin", lambda: done.append("begun"))
    monkeypatch.setattr(headstart, "wait", lambda: done.append("waited"))
    monkeypatch.setattr(pipeline, "plan_parsed", lambda *a, **k: done.append("planned") or plan(*a, **k))
    call(attncc.compile(TEXT))
    assert done == ["begun", "planned", "waited"]
    call(attncc.compile(TEXT))
    assert done[3:] == ["waited"]


def test_so_it_is_while_a_new_text_is_read_where_a_gpu_is_in_use(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(headstart, "begin", lambda: begun.append(True))
    for in_use in (False, True):
        monkeypatch.delitem(sys.modules, specs.READER, raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        attncc.compile(TEXT)
        assert begun == [True] * in_use


@pytest.fixture
def anew():
    """As in a new process, here and afterwards."""
    headstart.begin.cache_clear()
    yield
    headstart.begin.cache_clear()


def test_what_fails_beforehand_fails_where_it_is_needed(gpu, anew, monkeypatch):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(driver.active, "get_current_target", broken, raising=False)
    headstart.begin()
    headstart.wait()
    with pytest.raises(RuntimeError, match="no driver"):
        call(attncc.compile(TEXT))


def test_triton_does_not_hash_its_own_files(gpu, monkeypatch):
    """Which takes up to a second; its own key stays what it is for others."""
    monkeypatch.setattr("triton.runtime.cache.triton_key", refuse)
    call(attncc.compile(TEXT))
    assert gpu.launched == ["first_forward"]
    with pytest.raises(AssertionError, match="nobody needs"):
        get_cache_key(*[SimpleNamespace(hash=str)] * 3, {})
    assert triton.compile.__globals__["get_cache_key"] is get_cache_key


def test_where_triton_compiles_by_another_key_it_is_left_alone(monkeypatch):
    assert binaries._by_version() is not triton.compile
    monkeypatch.setattr(triton, "compile", lambda src: src)
    assert binaries._by_version() is triton.compile


def test_a_launcher_is_made_beside_the_compilation(gpu, monkeypatch):
    """The very one that the launch asks for: Triton keeps it by the arguments."""
    made = []

    def launcher(self, src, metadata):
        metas = getattr(metadata, "tensordesc_meta", None) or []
        made.append((threading.current_thread().name, dict(src.signature), dict(src.constants), len(metas)))
        return lambda *args: None

    monkeypatch.setattr(type(gpu), "launcher_cls", launcher)
    call(attncc.compile(TEXT))
    (thread, *first), (other, *second) = made
    assert (thread, other) == ("attncc-launcher", threading.current_thread().name) and first == second
    call(attncc.compile(TEXT))  # from the cache nothing is made ahead
    assert len(made) == 3


def test_a_launcher_that_fails_beside_is_made_again(gpu, monkeypatch):
    def launcher(self, src, metadata):
        if threading.current_thread().name == "attncc-launcher":
            raise RuntimeError("no compiler")
        return lambda *args: self.launched.append(src.name)

    monkeypatch.setattr(type(gpu), "launcher_cls", launcher)
    call(attncc.compile(TEXT))
    assert gpu.launched == ["first_forward"]


def test_no_garbage_is_collected_while_a_kernel_is_made(gpu, tmp_path, monkeypatch):
    """Which would go through all that PyTorch made, several times."""
    on = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))  # empty
    for place, name in ((pipeline, "plan_parsed"), (pipeline, "render"), (ASTSource, "make_ir")):
        whole = getattr(place, name)
        hear = lambda *a, whole=whole, **k: on.append(gc.isenabled()) or whole(*a, **k)
        monkeypatch.setattr(place, name, hear)
    call(attncc.compile(TEXT))
    assert on == [False] * 3 and gc.isenabled()
