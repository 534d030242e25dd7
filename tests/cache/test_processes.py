"""Several processes: one builds, dead ones hold nobody up."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from attncc.runtime import lock, process
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
    assert list((cache.root / "v1" / "work").iterdir()) == []


def test_a_child_of_a_killed_builder_holds_nobody_up(tmp_path):
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
    assert list(tmp_path.iterdir()) == []


def test_locks_that_systems_give_are_not_needed(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(fcntl, "lockf", none)
    test_a_waiter_says_for_whom_it_waits_and_builds_in_the_end(tmp_path)


def hold(path: Path, holder: str) -> None:
    """A lock as another process made it."""
    path.mkdir()
    (path / holder).touch()


def test_a_holder_elsewhere_that_falls_silent_is_dead(tmp_path, monkeypatch):
    """Whatever its clock says: only that it stands still counts."""
    monkeypatch.setattr(lock, "LOOK", 0.05)
    path, there = tmp_path / "a.lock", "abcdefabcdef~7~7~01234567"
    for skew in (-1e6, 0, 1e6):
        hold(path, there)
        os.utime(path / there, (skew + 2e9, skew + 2e9))
        with lock.held(path, print, patience=60, silence=0.2) as got:
            assert got
    hold(path, there)
    beating = threading.Event()

    def beat():
        while not beating.wait(0.1):
            os.utime(path / there)

    thread = threading.Thread(target=beat)
    thread.start()
    with lock.held(path, print, patience=1.5, silence=1.0) as got:
        assert not got
    beating.set()
    thread.join()


def test_a_lock_that_changed_hands_is_given_back(tmp_path):
    path = tmp_path / "a.lock"
    hold(path, "home~1~1~aaaaaaaa")
    lock.drop(path, "home~1~1~bbbbbbbb")
    assert lock.look(path).holder == "home~1~1~aaaaaaaa"
    lock.drop(path, "home~1~1~aaaaaaaa")
    assert not path.exists() and list(tmp_path.iterdir()) == []


def test_a_rename_whose_answer_got_lost_counts(tmp_path, monkeypatch):
    """As a network file system does that repeats a request: the second time the folder is no longer there."""
    whole = os.rename

    def twice(old, new):
        whole(old, new)
        whole(old, new)

    monkeypatch.setattr(os, "rename", twice)
    with lock.held(tmp_path / "a.lock", print) as got:
        assert got


def test_where_no_lock_can_be_made_nobody_waits(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("mkdir", "open", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with lock.held(tmp_path / "a.lock", print) as got:
                assert not got


def test_who_is_gone():
    me = process.own_name()
    home, pid, started, nonce = me.split("~")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while ended.poll() is None:
        time.sleep(0.01)
    assert process.is_ours(me) and not process.is_gone(me) and process.pid_of(me) == os.getpid()
    assert process.is_gone(f"{home}~{ended.pid}~{started}~{nonce}")
    assert process.is_gone(f"{home}~{pid}~1~{nonce}") is (started != "0")
    assert not process.is_gone(f"elsewhere~{ended.pid}~{started}~{nonce}")
    for name in ("", "a.lock", f"{home}~x~0~1", f"{home}~1~{'9' * 30}~1", f"{home}~{'9' * 19}", "~~~"):
        assert not process.is_gone(name), name
