"""Which target this machine is: asked of a driver and a system that the tests make up."""

from __future__ import annotations

import ctypes

import pytest

from attncc.runtime import machine


class Driver:
    """The three calls of the CUDA driver that are used."""

    def __init__(self, capability: tuple[int, int], fails: str = "") -> None:
        self.capability, self.fails = capability, fails

    def cuInit(self, flags: int) -> int:
        return 100 if self.fails == "cuInit" else 0

    def cuDeviceGet(self, device, number: int) -> int:
        return 101 if self.fails == "cuDeviceGet" else 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        wanted = {machine.COMPUTE_CAPABILITY_MAJOR: 0, machine.COMPUTE_CAPABILITY_MINOR: 1}
        value._obj.value = self.capability[wanted[attribute]]
        return 0


@pytest.fixture
def no_amd(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_amd", lambda: None)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm_90"), ((8, 6), "sm_86"), ((10, 3), "sm_100"), ((12, 1), "sm_120"), ((7, 5), "sm_75")],
)
def test_nvidia(monkeypatch, no_amd, capability, name):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(capability))
    assert machine.local_target() == name


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet"])
def test_a_driver_without_a_gpu(monkeypatch, no_amd, fails):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver((9, 0), fails))
    assert machine.local_target() is None


def test_no_driver(monkeypatch, no_amd):
    def missing(path):
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert machine.local_target() is None


def test_amd(tmp_path):
    for node, version in ((0, 0), (1, 90402), (10, 90500)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    assert machine._amd(tmp_path) == "gfx942"
    assert machine._amd(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110001, "gfx1101")]
)
def test_names_of_amd(version, name):
    assert machine.gfx_name(version) == name
