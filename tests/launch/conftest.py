from __future__ import annotations

import pytest

from tests.launch.stub import installed


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    with installed(tmp_path, monkeypatch) as made:
        yield made
