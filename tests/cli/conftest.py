"""The program in this process: its status, output and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from attncc import cli
from attncc.commands import console

CAUSAL = "attention causal {\n    mask k <= q\n}\n"


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


Program = Callable[..., Outcome]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Call it as `program("build", "causal.attn")`, in a folder of its own with a causal.attn and an empty cache."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(console, "PATIENCE", 1e6)  # a slow machine shall not change what is printed
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("causal.attn").write_text(CAUSAL)

    def run(*args: object) -> Outcome:
        capsys.readouterr()
        status = cli.run([str(a) for a in args])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run
