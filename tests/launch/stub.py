"""A GPU that is not there: Triton compiles for it, loads and launches nothing, and says what it would have launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget


@dataclass
class Driver:
    """Stands where Triton's driver stands (`triton.runtime.driver.set_active`); launches are counted, not done."""

    arch: int = 90
    launched: list[str] = field(default_factory=list)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: self.launched.append(src.name)

    @property
    def utils(self) -> Driver:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024


@contextmanager
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A stub of a Hopper GPU for Triton and attncc, whose tensors are on the CPU. The cache is empty, Triton's is that
    of all tests of a run."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path.parent / "triton"))
    monkeypatch.setattr("attncc.runtime.attention.target_for", lambda asked, q: "sm_90")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    yield triton.runtime.driver.active
    triton.runtime.driver.set_active(before)
