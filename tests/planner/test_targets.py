import dataclasses

import pytest

from attncc.targets import TARGETS, target

GPUS = [t for t in TARGETS.values() if t.is_gpu]


def test_the_targets_of_the_language_are_there():
    names = ["cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"]
    assert list(TARGETS) == names
    assert all(target(n).name == n for n in names)


def test_an_unknown_target_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown target 'sm_75'; there are: cpu, sm_80, .*gfx950"):
        target("sm_75")


def test_tritons_triple():
    assert target("sm_90").gpu_target == ("cuda", 90, 32)
    assert target("gfx942").gpu_target == ("hip", "gfx942", 64)


@pytest.mark.parametrize("t", GPUS, ids=lambda t: t.name)
def test_figures_are_of_one_chip(t):
    assert 0 < t.shared_bytes <= t.shared_bytes_sm
    assert t.registers_sm >= 64 * 1024
    assert t.measured_tflops <= t.tensor_tflops
    assert t.measured_gbs <= t.hbm_gbs
    assert 0 < t.fp32_tflops < t.tensor_tflops
    assert t.caps.has_tensor_core
    assert not (t.caps.has_wgmma and t.caps.has_tcgen05)
    assert t.caps.has_mfma == (t.backend == "hip")


def test_what_blocks_can_ask_for():
    shared = {name: t.shared_bytes for name, t in TARGETS.items() if t.is_gpu}
    assert shared == {
        "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376,
        "gfx942": 65536, "gfx950": 163840,
    }  # fmt: skip


def test_targets_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        target("sm_90").shared_bytes = 1
