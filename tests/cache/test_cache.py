"""The cache: hits, misses, broken files, permissions, an unusable folder."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import replace

import pytest

from attncc.errors import EnvironmentFault
from attncc.runtime import keys, publish
from attncc.runtime.cache import Cache, default_root
from tests.cache.cache_samples import KEY, TOOLS, other, write


def refuse(folder):
    raise AssertionError("built although the cache has it")


def test_a_miss_builds_and_a_hit_does_not(cache):
    assert cache.get(KEY) is None
    made = cache.get_or_build(KEY, write())
    assert made.fresh and made.text("causal.py") == "kernel = 1\n"
    found = cache.get_or_build(KEY, refuse)
    assert not found.fresh and found.files == made.files and found.path == made.path
    assert found.key == keys.plain(KEY)
    assert found.size == len("kernel = 1\n") + len('{"registers": 168}\n')


def test_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        cache = Cache(tmp_path / "new" / "root")
        entry = cache.get_or_build(KEY, write())
    finally:
        os.umask(before)
    for folder in (cache.root, entry.path, entry.path.parent, entry.path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_a_failing_builder_leaves_no_trace(cache):
    def half(folder):
        (folder / "causal.py").write_text("half")
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        cache.get_or_build(KEY, half)
    assert cache.get(KEY) is None
    assert not [p for p in cache.root.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_an_interrupted_builder_leaves_no_trace(cache):
    def interrupted(folder):
        (folder / "causal.py").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_build(KEY, interrupted)
    assert not [p for p in cache.root.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert cache.get_or_build(KEY, write()).fresh


def test_trouble_of_the_builder_is_not_taken_for_trouble_of_the_cache(cache, said):
    def missing(folder):
        raise FileNotFoundError(errno.ENOENT, "no ptxas")

    with pytest.raises(FileNotFoundError, match="no ptxas"):
        cache.get_or_build(KEY, missing)
    assert said == []


def test_a_builder_may_import_what_it_wrote(cache):
    def builder(folder):
        write()(folder)
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "causal.pyc").write_bytes(b"x")

    assert set(cache.get_or_build(KEY, builder).files) == {"causal.py", "resources.json"}


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_entries_hold_plain_files_only(cache, kind):
    def builder(folder):
        write()(folder)
        (folder / "x").mkdir() if kind == "folder" else (folder / "x").symlink_to("/etc/passwd")

    with pytest.raises(ValueError, match="plain files"):
        cache.get_or_build(KEY, builder)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path):
    path.write_bytes(b"")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _grow(path):
    path.write_bytes(path.read_bytes() + b"\n\n")


def _remove(path):
    path.unlink()


def _into_folder(path):
    path.unlink()
    path.mkdir()


FILES = ("causal.py", "resources.json", "manifest.json")
DAMAGES = [(name, damage) for name in FILES for damage in (_truncate, _empty, _flip, _grow, _remove, _into_folder)]
HARMLESS = [("manifest.json", _truncate), ("manifest.json", _grow)]  # white space at the end of a manifest says nothing


@pytest.mark.parametrize(("name", "damage"), [d for d in DAMAGES if d not in HARMLESS])
def test_a_broken_file_is_a_miss_and_is_mended(cache, name, damage):
    entry = cache.get_or_build(KEY, write())
    damage(entry.path / name)
    assert cache.get(KEY) is None
    assert [f.path for f in cache.verify()] == [entry.path]
    assert cache.get_or_build(KEY, write()).fresh
    assert cache.get(KEY).files == entry.files
    assert cache.verify() == []


def test_every_flipped_bit_of_a_manifest_is_noticed_or_harmless(cache):
    entry = cache.get_or_build(KEY, write())
    path = entry.path / "manifest.json"
    whole = path.read_bytes()
    missed = 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        found = cache.get(KEY)
        missed += found is None
        assert found is None or (found.files == entry.files and found.key == entry.key)
    assert missed > 0.5 * len(whole)


def test_files_and_keys_that_do_not_belong_are_noticed(cache):
    entry = cache.get_or_build(KEY, write())
    (entry.path / "more.py").write_text("import os\n")
    assert cache.get(KEY) is None
    (entry.path / "more.py").unlink()
    assert cache.get(KEY) is not None
    moved = entry.path.with_name(keys.key_digest(other(direction="backward")))
    shutil.move(entry.path, moved)
    assert cache.get(other(direction="backward")) is None
    assert "does not give its name" in cache.verify()[0].problem


@pytest.mark.parametrize("name", ["../../../causal.py", "/etc/passwd", "..", "a/b"])
def test_a_manifest_cannot_reach_outside(cache, name):
    entry = cache.get_or_build(KEY, write())
    path = entry.path / "manifest.json"
    path.write_text(path.read_text().replace('"causal.py"', f'"{name}"'))
    assert cache.get(KEY) is None


def test_an_entry_that_others_can_write_to_is_a_miss(cache):
    entry = cache.get_or_build(KEY, write())
    entry.path.chmod(0o770)
    assert cache.get(KEY) is None
    assert "others may write" in cache.verify()[0].problem


def test_versions_live_side_by_side(cache):
    newer = other(toolchain=replace(TOOLS, attncc="2.0"))
    cache.get_or_build(KEY, write("old\n"))
    cache.get_or_build(newer, write("new\n"))
    assert cache.get(KEY).text("causal.py") == "old\n"
    assert cache.get(newer).text("causal.py") == "new\n"
    assert len(list(cache.entries())) == 2
    assert cache.verify() == []


def test_a_miss_is_explained_by_the_nearest_entry(cache, said, monkeypatch):
    assert cache.explain_miss(KEY)[0].endswith("the cache holds no kernel yet")
    cache.get_or_build(KEY, write())
    cache.get_or_build(other(direction="backward", plan={"tile_q": 16}, consts=(("n", 1),)), write())
    wanted = other(toolchain=replace(TOOLS, triton="3.9.0"))
    monkeypatch.setenv("ATTNCC_EXPLAIN_MISS", "1")
    cache.get_or_build(wanted, write())
    assert said[-1].splitlines()[1:] == ["    toolchain.triton: '3.7.1' -> '3.9.0'"]
    cache.get_or_build(wanted, refuse)
    assert len(said) == 1


def test_clear_removes_entries_and_leaves_foreign_files(cache):
    entry = cache.get_or_build(KEY, write())
    foreign = cache.root / "notes.txt"
    foreign.write_text("mine")
    count, size = cache.clear()
    assert count == 1 and size > entry.size
    assert cache.get(KEY) is None and list(cache.entries()) == [] and foreign.exists()
    assert cache.clear() == (0, 0)
    assert cache.get_or_build(KEY, write()).fresh


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_root_that_others_write_to_is_refused(tmp_path, mode):
    root = tmp_path / "a root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(EnvironmentFault, match=f"chmod go-w '{root}'") as caught:
        Cache(root)
    assert caught.value.exit_code == 5
    root.chmod(0o755)
    assert Cache(root).get_or_build(KEY, write()).fresh


def test_a_root_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(EnvironmentFault, match=r"belongs to user \d+.*export ATTNCC_CACHE_DIR"):
        Cache(tmp_path / "root")


def test_a_file_in_place_of_the_root_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(EnvironmentFault, match="is a file"):
        Cache(tmp_path / "root")


@pytest.mark.parametrize("call", ["mkdir", "stage", "rename", "seal", "write"])
def test_an_unusable_folder_costs_one_warning(tmp_path, said, monkeypatch, call):
    def broken(*_, **__):
        raise OSError(errno.EROFS if call != "write" else errno.ENOSPC, "Read-only file system")

    cache = Cache(tmp_path / "root", warn=said.append)
    runs = []

    def builder(folder):
        runs.append(folder)
        if call == "write" and folder.is_relative_to(cache.root):
            broken()
        write()(folder)

    if call == "mkdir":
        monkeypatch.setattr("attncc.runtime.cache.Path.mkdir", _only_below(cache.root, broken))
    elif call == "stage":
        monkeypatch.setattr("attncc.runtime.cache.Path.mkdir", _only_below(cache.root / "v1" / "work" / ".", broken))
    elif call == "rename":
        monkeypatch.setattr(os, "rename", broken)
    elif call == "seal":
        monkeypatch.setattr(publish, "seal", _first(broken, publish.seal))
    entries = [cache.get_or_build(k, builder) for k in (KEY, other(direction="backward"))]
    assert all(e.text("causal.py") == "kernel = 1\n" for e in entries)
    assert all((e.path / "causal.py").exists() for e in entries)
    assert len(said) == 1 and "going on without it" in said[0]
    assert cache.get(KEY) is None


def _only_below(root, broken):
    from pathlib import Path

    whole = Path.mkdir
    inside = lambda path: (
        path.is_relative_to(root) and "~" in path.name if root.name == "work" else path.is_relative_to(root)
    )
    return lambda path, *a, **k: broken() if inside(path) else whole(path, *a, **k)


def _first(broken, then):
    """Fails on every odd call: the one in the cache, not the one aside."""
    calls = []

    def seal(*args):
        calls.append(args)
        return broken() if len(calls) % 2 else then(*args)

    return seal


def test_a_read_only_cache_still_gives_what_it_has(cache, said, monkeypatch):
    made = cache.get_or_build(KEY, write())
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert cache.get_or_build(KEY, refuse).files == made.files
    assert said == []
    assert cache.get_or_build(other(direction="backward"), write()).fresh
    assert len(said) == 1


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "here"))
    assert Cache().root == tmp_path / "here"
    monkeypatch.delenv("ATTNCC_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root().name == "attncc" and default_root().is_relative_to(tmp_path)


def test_a_file_of_a_user_is_replaced_in_one_step(tmp_path):
    path, link = tmp_path / "a.attn", tmp_path / "link.attn"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert publish.replace_file(link, b"new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert not publish.replace_file(path, b"new")
    assert publish.replace_file(tmp_path / "b", b"") and (tmp_path / "b").read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.attn", "b", "link.attn"]


@pytest.mark.parametrize(
    ("folder", "said"), [("/", "a folder of its own"), ("~nosuchuser/x", "there is no user 'nosuchuser'")]
)
def test_a_folder_that_cannot_be_meant_is_refused(folder, said, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", folder)
    with pytest.raises(EnvironmentFault, match=said):
        Cache()
