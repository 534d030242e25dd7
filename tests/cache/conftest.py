from __future__ import annotations

from pathlib import Path

import pytest

from attncc.runtime.cache import Cache


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, said: list[str]) -> Cache:
    return Cache(tmp_path / "root", warn=said.append, note=said.append)
