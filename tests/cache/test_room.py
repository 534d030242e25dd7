"""The size limit, what dead processes leave, and that a call runs the bytes that were compared."""

from __future__ import annotations

import inspect
import os
import time

import pytest

from attncc.errors import EnvironmentFault
from attncc.runtime import process, room
from attncc.runtime.cache import Cache
from attncc.runtime.loader import load_module
from tests.cache.cache_samples import KEY, other, write
from tests.cache.test_cache import refuse


def filled(root, count, size=1000):
    """`count` entries, the first of which was not used for longest."""
    cache = Cache(root)
    keys = [other(spec=str(i)) for i in range(count)]
    for i, k in enumerate(keys):
        entry = cache.get_or_build(k, write("#" * (size - 20) + "\n"))
        os.utime(entry.path, (1e9 + i, 1e9 + i))
    return keys


def test_what_was_not_used_for_longest_goes(tmp_path, monkeypatch):
    keys = filled(tmp_path / "root", 5)
    each = room.occupied(Cache(tmp_path / "root").get(keys[0]).path)  # used now
    monkeypatch.setenv("ATTNCC_CACHE_LIMIT", str(9 * each // 2))
    cache = Cache(tmp_path / "root")
    made = cache.get_or_build(KEY, write("#" * 980 + "\n"))
    kept = [cache.get(k) is not None for k in keys]
    assert kept == [True, False, False, True, True] and cache.get(KEY).files == made.files
    assert cache.verify() == [] and list((cache.root / "v1" / "work").iterdir()) == []


def test_an_entry_above_the_limit_is_kept_alone(tmp_path, monkeypatch):
    keys = filled(tmp_path / "root", 2)
    monkeypatch.setenv("ATTNCC_CACHE_LIMIT", "1")
    cache = Cache(tmp_path / "root")
    cache.get_or_build(KEY, write())
    assert [e.digest for e in cache.entries()] == [cache.get(KEY).digest] and cache.get(keys[0]) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("500M", 500e6), ("2G", 2e9), ("1.5 gb", 1.5e9), ("7", 7), ("0", 0), ("none", None), ("", 4e9)],
)
def test_the_limit_as_people_write_it(monkeypatch, text, size):
    monkeypatch.setenv("ATTNCC_CACHE_LIMIT", text)
    assert room.limit() == size


@pytest.mark.parametrize("text", ["big", "-1", "1e9", "2X", "9" * 40])
def test_another_limit_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("ATTNCC_CACHE_LIMIT", text)
    with pytest.raises(EnvironmentFault, match="500M or 2G"):
        Cache(tmp_path)


def test_leftovers_go_when_their_maker_is_gone(tmp_path):
    home, pid, _, nonce = process.own_name().split("~")
    gone = f"{home}~{2**22 + 1}~1~{nonce}"
    elsewhere = ("abcdefabcdef~7~7~01234567", "abcdefabcdef~7~7~89abcdef")
    for name in (gone, process.own_name(), *elsewhere, "notes"):
        (tmp_path / name).mkdir()
    for holder, lock in ((gone, "a.lock"), (process.own_name(), "b.lock"), (elsewhere[0], "c.lock")):
        (tmp_path / lock).mkdir()
        (tmp_path / lock / holder).touch()
    old = time.time() - 2 * room.LEFTOVER_AGE
    os.utime(tmp_path / elsewhere[1], (old, old))
    room.sweep(tmp_path)
    left = {p.name if "~" not in p.name else p.name.split("~")[1] for p in tmp_path.iterdir()}
    assert left == {pid, "7", "notes", "b.lock", "c.lock"}
    assert not (tmp_path / elsewhere[1]).exists()


def test_an_entry_that_goes_while_it_is_read_is_built_again(cache, monkeypatch):
    from attncc.runtime import publish

    cache.get_or_build(KEY, write())
    whole, taken = publish._checked, []

    def checked(folder, name, facts):
        if not taken:
            taken.append(folder)
            publish.remove_tree(folder)
        return whole(folder, name, facts)

    monkeypatch.setattr(publish, "_checked", checked)
    assert cache.get_or_build(KEY, write()).fresh
    assert cache.get_or_build(KEY, refuse).text("causal.py") == "kernel = 1\n"


def test_a_module_is_what_was_compared_and_leaves_nothing_beside_it(cache):
    source = "def kernel():\n    return 1\n"
    entry = cache.get_or_build(KEY, write(source))
    path = entry.path / "causal.py"
    path.write_text("def kernel():\n    return 2\n")
    module = load_module(path, entry.files["causal.py"], "attncc_generated_test")
    assert module.kernel() == 1 and inspect.getsource(module.kernel) == source and module.__file__ == str(path)
    cache.clear()
    assert inspect.getsource(load_module(path, entry.files["causal.py"], "attncc_generated_test").kernel) == source
    assert not list(cache.root.rglob("__pycache__"))
