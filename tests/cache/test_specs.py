"""Specs that were read are kept with their first kernel; whatever is wrong with what was kept, the text is read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import attncc
from attncc import frontend
from attncc.runtime import specs
from attncc.runtime.cache import Cache
from attncc.runtime.keys import toolchain
from tests.house.tree import ROOT

TEXT = "attention kept(window: int = 7) {  # whose comment counts\n    mask 0 <= q - k < window\n}"
PROGRAM = """
import sys, torch, attncc
attention = attncc.compile(sys.argv[1], "here.attn")
print(attention.parsed.filename, attention.spec.name, "lark" in sys.modules)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The entry of TEXT, after a call of it."""
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    attention = attncc.compile(TEXT)
    assert not [e for e in Cache().entries() if e.kind == "spec"]  # nothing is written for what is not called
    with torch.no_grad():
        attention(*(torch.zeros(1, 1, 8, 16) for _ in range(3)))
    (entry,) = [e for e in Cache().entries() if e.kind == "spec"]
    return entry


def new_process(text=TEXT):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, text], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True, timeout=120,
    ).stdout.split()  # fmt: skip


def test_a_new_process_reads_no_text(kept):
    assert new_process() == ["here.attn", "kept", "False"]
    assert new_process(TEXT.replace("counts", "counts too")) == ["here.attn", "kept", "True"]  # places differ


def test_what_comes_back_is_what_was_read(kept):
    found = specs._find(Cache(), toolchain(), TEXT)
    assert found == frontend.parse(TEXT) and found.spans and found.spec is not None
    assert specs._find(Cache(), toolchain({"flag": "1"}), TEXT) is None


@pytest.mark.parametrize("damage", ["altered", "of another class"])
def test_what_does_not_come_back_is_read_anew(kept, monkeypatch, damage):
    content = b"\0" if damage == "altered" else pickle.dumps(frontend.parse).replace(b"parse", b"prase")
    monkeypatch.setattr(Cache, "get", lambda self, key: replace(kept, files={specs.FILE: content}))
    assert specs._find(Cache(), toolchain(), TEXT) is None
