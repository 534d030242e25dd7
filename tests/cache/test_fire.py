"""Case 26: 8 processes want 8 entries of a cold folder, and some are killed at whatever touch of a file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from attncc.runtime.cache import Cache
from tests.cache import fire_worker
from tests.cache.fire_worker import KEYS, content, key

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, TOUCHES = 8, 160  # a process that builds all eight touches the folder about 400 times


def one_round(folder: Path, seed: int) -> int:
    """Runs it, checks what must hold, gives how many were killed."""
    draw = random.Random(seed)
    root, log = folder / "root", folder / "log"
    deaths = [draw.randint(1, TOUCHES) if draw.random() < 0.5 else 0 for _ in range(PROCESSES)]
    workers = [
        subprocess.Popen(
            [sys.executable, fire_worker.__file__, root, log, str(seed * PROCESSES + i), str(deaths[i])],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for i in range(PROCESSES)
    ]  # fmt: skip
    try:
        statuses = [w.wait(timeout=60) for w in workers]
    finally:
        for w in workers:
            w.kill()
    killed = statuses.count(-signal.SIGKILL)
    assert all(s == 0 or (s == -signal.SIGKILL and deaths[i]) for i, s in enumerate(statuses)), (seed, statuses)
    said = Counter(log.read_text().splitlines()) if log.exists() else Counter()
    cache = Cache(root)
    assert not [line for line in said if line.startswith("broken")], (seed, said)
    assert all(said[f"built {i}"] <= 1 for i in range(KEYS)), (seed, said)
    assert sum(said[f"began {i}"] for i in range(KEYS)) <= KEYS + killed, (seed, said)
    assert cache.verify() == []
    for i in range(KEYS):
        if killed < PROCESSES:
            assert cache.get(key(i)).text("kernel.py") == content(i)
    cache.clear()
    work = root / "v1" / "work"
    assert not work.exists() or list(work.iterdir()) == []
    return killed


def test_killed_builders_break_nothing(tmp_path):
    assert sum(one_round(tmp_path / str(seed), seed) for seed in _made(tmp_path, 2)) >= 2


@pytest.mark.slow
def test_killed_builders_break_nothing_in_fifty_rounds(tmp_path):
    assert sum(one_round(tmp_path / str(seed), seed) for seed in _made(tmp_path, 50)) >= 50


def _made(folder: Path, rounds: int) -> range:
    for seed in range(rounds):
        (folder / str(seed)).mkdir()
    return range(rounds)
