"""Generated files of the backward pass: equal bytes, fit to be read, and able to check themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attncc.analysis import kernel_visits
from attncc.codegen import file_name, render_backward
from attncc.codegen.backward_sites import sites, unbuilt
from attncc.frontend import parse
from attncc.ir import AttentionSpec, Shape
from attncc.planner import choose_backward
from attncc.targets import target

SPECS = sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.attn"))


def text_of(spec: AttentionSpec, name: str = "sm_90", **shape) -> tuple[str, str]:
    plan = choose_backward(spec, Shape(**shape), target(name), algorithm="fa2")
    visits = kernel_visits(spec, "q"), kernel_visits(spec, "k")
    return file_name(spec.name, plan), render_backward(spec, *visits, plan, "attention x {}")


def spec_of(path: Path) -> AttentionSpec:
    return parse(path.read_text(), path.name).spec.bind({})


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_files_are_the_same_to_the_byte_and_fit_to_be_read(path):
    name, text = text_of(spec_of(path))
    assert (name, text) == text_of(spec_of(path))
    compile(text, name, "exec")
    assert "atomic" not in text.replace("tl.atomic_or(", "")  # bits are the same in any order, sums are not
    assert text.endswith("\n") and not text.endswith("\n\n") and "\n\n\n\n" not in text
    assert not [n for n, line in enumerate(text.splitlines(), 1) if line != line.rstrip()]


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_files_check_themselves(path, tmp_path):
    name, text = text_of(spec_of(path), dtype="f32", head_dim=32, head_dim_v=32)
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "-I", name], cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("gradient of") == 3 + len([p for p in spec_of(path).params if p.grad])


def test_a_file_says_that_its_hardware_is_not_there(tmp_path):
    name, text = text_of(spec_of(SPECS[0]), "gfx942")
    (tmp_path / name).write_text(text, encoding="utf-8")
    kept = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-I", name], cwd=tmp_path, env=kept, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "gfx942" in done.stdout


@pytest.mark.parametrize(
    ("params", "read", "kind"),
    [
        ("t: f32[h] grad", "t[h]", "program"),
        ("t: float grad", "t", "program"),
        ("t: f32[h_kv, b] grad", "t[h_kv, b]", "program"),
        ("t: f32[b, h, row] grad", "t[b, h, row]", "row"),
        ("t: f32[b, k] grad", "t[b, q]", "row"),
        ("t: f32[b, k] grad", "t[b, k]", "key"),
        ("t: f32[row, k] grad", "t[row, k]", "cells"),
        ("t: f32[n] grad", "t[q - k]", "table"),
        ("t: f32[n, b] grad", "t[k % 3, b]", "table"),
        ("t: f32[row, n] grad", "t[row, k % 3]", "row_table"),
        ("t: f32[k, n] grad", "t[k, q % 3]", "key_table"),
    ],
)
def test_what_is_summed_where(params, read, kind):
    spec = parse(f"attention x({params}) {{ score s + {read} }}").spec
    assert [s.kind for s in sites(spec)] == [kind]
    assert bool(unbuilt(spec)) == (kind == "unbuilt")


def test_what_has_no_gradient_is_not_summed():
    assert sites(parse("attention x(t: f32[h], u: f32[k] grad) { score s + t[h] mask u[k] > 0 }").spec) == ()


@pytest.mark.parametrize("mask", ["abs(d[b, k]) == abs(d[b, q])", "max(d[b, k], 0) <= max(d[b, q], 0)"])
def test_a_file_whose_keys_need_nothing_before_the_loop_is_python(mask):
    spec = parse(f"attention x(d: i32[b, k]) {{ mask {mask} }}").spec.bind({})
    compile(text_of(spec, head_dim=64, head_dim_v=64)[1], "x", "exec")
