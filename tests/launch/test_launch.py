"""A launch finds the kernel that Triton would, looks up less, and keeps out of the way of who wants to see launches."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import attncc
from attncc.runtime.binaries import own_kernels
from attncc.runtime.kernels import Kernels
from attncc.runtime.launch import Launcher
from tests.house.tree import ROOT

TEXT = "attention odd(window: int = 7, bias: f32[h, k]) { mask 0 <= q - k < window score s + bias[h, k] }"


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of the files that calls load, by name."""
    found: dict[str, JITFunction] = {}
    whole = Kernels._module

    def module(self, target, entry):
        made = whole(self, target, entry)
        found.update((k.fn.__name__, k) for k in own_kernels(made))
        return made

    monkeypatch.setattr(Kernels, "_module", module)
    return found


def call(attn, length=40, offset=0, step=1, bias_offset=0):
    """On a q that begins `offset` elements behind an aligned address, and a bias of which every `step`th is taken."""
    q = torch.zeros(1, 2, length, 16 + offset, dtype=torch.float16)[..., offset:]
    k, v = (torch.zeros(1, 2, length, 16, dtype=torch.float16) for _ in range(2))
    bias = torch.zeros(2, length * step + bias_offset)[:, bias_offset:][:, ::step]
    with torch.no_grad():
        attn(q, k, v, bias=bias)


def test_every_launch_is_of_the_kernel_that_triton_finds(gpu, kernels, monkeypatch):
    """Over many layouts: what was found for one class of arguments is what Triton's own search gives for another."""
    attn, draw, compared = attncc.compile(TEXT), random.Random(0), []
    known = Launcher.run

    def run(self, *args, grid, warmup, **options):
        mine = known(self, *args, grid=grid, warmup=warmup, **options)
        compared.append(mine is self._run(*args, grid=grid, warmup=True, **options))
        return mine

    monkeypatch.setattr(Launcher, "run", run)
    for _ in range(24):
        call(attn, draw.choice([1, 16, 33]), draw.choice([0, 0, 4]), draw.choice([1, 1, 2]), draw.choice([0, 4]))
    assert len(compared) >= 24 and all(compared)
    assert len({id(c) for k in kernels.values() for c in _compiled(k)}) >= 3


def _compiled(kernel):
    return [c for kept in kernel.device_caches.values() for c in kept[0].values()]


def test_a_known_launch_looks_up_less_than_tritons_own(gpu, kernels):
    attn = attncc.load(ROOT / "specs" / "causal.attn")
    q, k, v = (torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        attn(q, k, v)
        own = _operations(lambda: attn(q, k, v))
        for kernel in kernels.values():
            del kernel.run
        theirs = _operations(lambda: attn(q, k, v))
    assert own < theirs - 20, (own, theirs)


def _operations(action) -> int:
    made = []
    sys.setprofile(lambda frame, event, what: made.append(what) if event in ("call", "c_call") else None)
    try:
        action()
    finally:
        sys.setprofile(None)
    return len(made)


@pytest.mark.parametrize("who", ["before each run", "enter", "debug"])
def test_who_wants_to_see_launches_sees_each(gpu, kernels, monkeypatch, who):
    attn, seen = attncc.compile(TEXT), []
    call(attn)
    (kernel,) = [k for name, k in kernels.items() if name == "odd_forward"]
    before = len(_compiled(kernel))
    if who == "before each run":
        kernel.add_pre_run_hook(lambda *_, **__: seen.append(1))
    elif who == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    else:
        monkeypatch.setattr(gpu, "launcher_cls", lambda src, metadata: lambda *args: seen.append(args[7]))
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", seen.append)
        attn = attncc.compile(TEXT)
    call(attn)
    call(attn)
    if who == "debug":  # another kernel, with its assertions
        assert len(_compiled(kernel)) == before + 1
    else:
        assert len(seen) >= 2


def test_each_device_has_its_own(gpu, kernels, monkeypatch):
    attn = attncc.compile(TEXT)
    call(attn)
    (kernel,) = [k for name, k in kernels.items() if name == "odd_forward"]
    monkeypatch.setattr(type(driver.active), "get_current_device", lambda self: 1)
    call(attn)
    call(attn)
    assert sorted(kernel.device_caches) == [0, 1] and len(gpu.launched) == 3


def test_pointers_of_amd_are_left_to_triton(gpu, kernels, monkeypatch):
    """It specialises them by the size of their storage too."""
    monkeypatch.setattr(Launcher, "takes", staticmethod(lambda backend, takes=Launcher.takes: takes("hip")))
    call(attncc.compile(TEXT))
    assert kernels and not any("run" in vars(kernel) for kernel in kernels.values())
