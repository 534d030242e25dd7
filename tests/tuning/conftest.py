from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from attncc.runtime import tune, winners
from attncc.runtime.winners import Device

HERE = Device("Stub 9000", "sm_90", "12.8")


class Unneeded:
    """Stands where processes compile."""

    def submit(self, job):
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self):
        pass


@pytest.fixture
def device(tmp_path, monkeypatch):
    """The CPU passes for a GPU that winners are kept for; nothing is compiled ahead. Gives what changes it."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "Workers", Unneeded)
    monkeypatch.setattr(winners, "target_of", lambda device: "sm_90")

    def become(device: Device | None) -> None:
        monkeypatch.setattr(winners, "device_of", lambda _: device)

    become(HERE)
    return become


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 80, 16, generator=generator).half() for _ in range(3)]


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    from tests.launch.stub import installed

    with installed(tmp_path, monkeypatch) as made:
        yield made
