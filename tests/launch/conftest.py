from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from tests.launch.stub import Driver


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A stub of a Hopper GPU for Triton and attncc, whose tensors are on the CPU; caches are empty."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr("attncc.runtime.attention.target_for", lambda asked, q: "sm_90")
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    yield triton.runtime.driver.active
    triton.runtime.driver.set_active(before)
