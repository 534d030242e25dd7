"""Several processes: one builds, dead ones hold nobody up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from attncc.runtime import lock
from attncc.runtime.cache import Cache
from tests.cache.cache_samples import KEY, write

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, sys, time
from pathlib import Path
from attncc.runtime.cache import Cache
from tests.cache.cache_samples import KEY

def builder(folder):
    with open(sys.argv[2], "a") as log:
        log.write("x")
    {body}
    (folder / "causal.py").write_text("kernel = 1\\n")

entry = Cache(sys.argv[1]).get_or_build(KEY, builder)
print(entry.text("causal.py"), end="")
"""


def start(tmp_path, body):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER.format(body=body), tmp_path / "root", tmp_path / "log"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_of_many_builds(tmp_path):
    workers = [start(tmp_path, "time.sleep(0.5)") for _ in range(4)]
    assert [w.communicate(timeout=60)[0] for w in workers] == ["kernel = 1\n"] * 4
    assert (tmp_path / "log").read_text() == "x"


def test_a_killed_builder_holds_nobody_up(tmp_path):
    worker = start(tmp_path, "time.sleep(600)")
    wait_for(tmp_path / "log")
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    cache = Cache(tmp_path / "root")
    assert cache.get(KEY) is None and list(cache.entries()) == []
    assert cache.get_or_build(KEY, write()).fresh
    assert any("~" in p.name for p in (cache.root / "v1" / "work").iterdir())
    cache.clear()
    assert list((cache.root / "v1" / "work").iterdir()) == []


def test_a_lock_kept_by_a_child_of_a_killed_builder_is_broken(tmp_path):
    body = "child = os.fork()\n    if child == 0: time.sleep(60); os._exit(0)\n    "
    body += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child))\n    time.sleep(600)"
    worker = start(tmp_path, body)
    wait_for(tmp_path / "child")
    try:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        began = time.monotonic()
        assert Cache(tmp_path / "root").get_or_build(KEY, write()).fresh
        assert time.monotonic() - began < 30
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        worker.stdout.close()


def test_a_waiter_says_for_whom_it_waits_and_builds_in_the_end(tmp_path):
    said: list[str] = []
    path = tmp_path / "a.lock"
    with lock.held(path, said.append) as first:
        assert first and said == []
        with lock.held(path, said.append, patience=1.2) as second:
            assert not second
    assert said == [f"waiting for process {os.getpid()}, which builds the same file"]
    with lock.held(path, said.append) as again:
        assert again
    assert not path.with_suffix(".owner").exists()


def test_who_is_dead(tmp_path):
    owner = tmp_path / "a.owner"
    me = lock.identity()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while ended.poll() is None:
        time.sleep(0.01)
    for who, dead in (
        (me, False),
        (me | {"host": "elsewhere", "pid": ended.pid}, False),
        (me | {"pid": ended.pid}, True),
        (me | {"started": 1}, me["started"] is not None),
    ):
        owner.write_text(json.dumps(who))
        assert lock.is_dead(owner) == dead, who
    for text in ("", "{}", "[1]", '{"host": 1, "pid": "x", "started": 0}'):
        owner.write_text(text)
        assert not lock.is_dead(owner)
    assert not lock.is_dead(tmp_path / "none")
