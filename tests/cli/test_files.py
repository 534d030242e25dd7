"""`attncc fmt` and `attncc cache`."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

UGLY = "attention   causal{mask k<=q  # down\n}"
TIDY = "attention causal {\n    mask k <= q  # down\n}\n"


def test_fmt_writes_in_place_and_once(program):
    Path("a.attn").write_text(UGLY)
    first = program("fmt", "a.attn", "causal.attn")
    assert (first.status, first.out) == (0, "changed a.attn\n")
    assert first.err == "2 files: 1 changed, 1 as they should be\n"
    assert Path("a.attn").read_text() == TIDY
    assert program("fmt", "a.attn").out == ""


def test_fmt_check_changes_nothing(program):
    Path("a.attn").write_text(UGLY)
    found = program("fmt", "--check", "a.attn", "causal.attn")
    assert (found.status, found.out) == (1, "would change a.attn\n")
    assert Path("a.attn").read_text() == UGLY
    assert program("fmt", "--check", "causal.attn").status == 0


def test_fmt_leaves_a_wrong_file_alone(program):
    Path("a.attn").write_text(UGLY)
    Path("b.attn").write_text("attention b { mask }")
    found = program("fmt", "b.attn", "a.attn")
    assert found.status == 1 and "b.attn:1:" in found.err and "1 with faults" in found.err
    assert Path("b.attn").read_text() == "attention b { mask }" and Path("a.attn").read_text() == TIDY


def test_fmt_of_standard_input(program, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(UGLY.encode())))
    found = program("fmt", "-")
    assert (found.status, found.out) == (0, TIDY)


def test_fmt_of_a_file_that_cannot_be_written(program, monkeypatch):
    from attncc.runtime import publish

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    Path("a.attn").write_text(UGLY)
    monkeypatch.setattr(publish, "replace_file", refuse)
    found = program("fmt", "a.attn")
    assert found.status == 5 and "a.attn cannot be written: Permission denied" in found.err


def test_cache_lists_verifies_and_clears(program, tmp_path):
    root = tmp_path / "cache"
    assert program("cache", "list").out == f"0 kernels, 0 B, in {root}\n"
    program("build", "causal.attn", "--target", "cpu")
    listed = program("cache", "list")
    assert listed.out.splitlines()[1].startswith("causal_forward_cpu.py  fa2 ") and "1 kernel," in listed.out
    (kernel,) = json.loads(program("cache", "list", "--json").out)["kernels"]
    assert Path(kernel["path"]).is_dir() and kernel["digest"] in kernel["path"]
    assert program("cache", "verify").out == f"2 whole, 0 broken, in {root}\n"
    Path(kernel["path"], "causal_forward_cpu.py").write_text("import os\n")
    broken = program("cache", "verify")
    assert broken.status == 5 and "causal_forward_cpu.py has 10 bytes" in broken.out and "1 broken" in broken.err
    facts = json.loads(program("cache", "verify", "--json").out)
    assert facts["whole"] == 1 and facts["broken"][0]["entry"] == kernel["path"]
    cleared = program("cache", "clear")
    assert cleared.status == 0 and cleared.out.startswith("removed 2 entries, ")
    assert program("cache", "list").out.startswith("0 kernels")
    assert os.listdir(root) == ["v1"]
