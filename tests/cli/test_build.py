"""`attncc build`: files, listing, the cache behind it, and what a warm build may cost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attncc import pipeline, planner
from attncc.runtime.cache import Cache
from attncc.runtime.keys import toolchain

ROOT = Path(__file__).resolve().parents[2]
CHUNKED = "attention chunked(chunk: const int = 64, bias: f32[h]) { mask q // chunk == k // chunk score s + bias[h] }"
HEAVY = ("torch", "triton", "sympy", "lark", "jinja2", "numpy", "matplotlib", "rich", "filelock")
WARM = f"""
import sys
from attncc import cli
status = cli.run(sys.argv[1:])
heavy = {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY})
print(status, sorted(heavy), file=sys.stderr)
"""


def test_a_file_for_the_cpu(program):
    found = program("build", "causal.attn", "--target", "cpu")
    assert found.status == 0 and found.err == ""
    head, line = found.out.splitlines()
    assert head.split() == ["file", "target", "pass", "registers", "spills", "shared", "(predicted)"]
    assert line.split() == ["causal/causal_forward_cpu.py", "cpu", "forward", "-", "-", "-", "-"]
    text = Path("causal/causal_forward_cpu.py").read_text()
    assert text.startswith("# attention causal {\n#     mask k <= q\n")
    assert "attncc build causal.attn --target cpu" in text and str(Path.cwd()) not in text


def test_a_kernel_for_a_gpu_that_is_not_there(program):
    found = program("build", "causal.attn", "--target", "sm_80", "--shape", "head_dim=16", "--out", "k", "--json")
    assert found.status == 0
    (kernel,) = json.loads(found.out)["kernels"]
    assert kernel["file"] == "k/causal_forward_sm_80.py" and (kernel["target"], kernel["pass"]) == ("sm_80", "forward")
    assert 16 <= kernel["registers"] <= 255 and kernel["spills"] == 0
    assert 0 < kernel["shared_bytes"] <= kernel["predicted_shared_bytes"]
    assert kernel["general"]["registers"] > 0 and not kernel["cached"]
    assert "sm_80" in Path(kernel["file"]).read_text()
    again = program("build", "causal.attn", "--target", "sm_80", "--shape", "head_dim=16", "--out", "k")
    lines = again.out.splitlines()
    assert lines[1].split()[:4] == ["k/causal_forward_sm_80.py", "sm_80", "forward", str(kernel["registers"])]
    assert lines[2].split()[:3] == ["any", "strides", "sm_80"]
    assert lines[3].endswith("spills and shared memory in bytes") and len(lines) == 4 and "warning" not in again.err


@pytest.fixture
def measured(monkeypatch):
    """Stands in for the compiler: what it was asked to compile."""
    from attncc.runtime import compile as compiler

    asked = []

    def compile_kernel(source, spec, plan, aligned=True):
        asked.append((source.name, plan.loads, aligned))
        return compiler.Resources(
            kernel=spec.name, target=plan.target, aligned=aligned, registers=100 + len(asked), spills=8 * (not aligned),
            shared_bytes=plan.shared_bytes, predicted_shared_bytes=plan.shared_bytes, instructions={}, triton="0",
        )  # fmt: skip

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return asked


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_the_kernel_for_any_strides_is_beside_it(program, measured, monkeypatch, loads):
    choose = planner.choose

    def pinned(*args, any_stride=False):
        choice = choose(*args, any_stride=any_stride)
        return choice if any_stride else replace(choice, plan=replace(choice.plan, loads=loads))

    monkeypatch.setattr(planner, "choose", pinned)
    kernels = json.loads(program("build", "causal.attn", "--target", "sm_90", "--out", "k", "--json").out)["kernels"]
    one, other = "causal_forward_sm_90.py", "causal_forward_sm_90_any_stride.py"
    if loads == "pointer":
        assert measured == [(one, "pointer", True), (one, "pointer", False)]
        assert [(k["registers"], k["general"]["registers"]) for k in kernels] == [(101, 102)]
    else:
        assert measured == [(one, "descriptor", True), (other, "pointer", True), (other, "pointer", False)]
        assert [(k["registers"], k["general"] and k["general"]["registers"]) for k in kernels] == [
            (101, None),
            (102, 103),
        ]
    assert sorted(os.listdir("k")) == sorted(Path(k["file"]).name for k in kernels)


def test_a_kernel_that_spills_much_is_warned_of(program, measured, monkeypatch):
    from attncc.runtime import compile as compiler

    few = compiler.compile_kernel
    bytes_of = lambda made: replace(made, spills=256 if made.aligned else 264)
    monkeypatch.setattr(compiler, "compile_kernel", lambda *args, **more: bytes_of(few(*args, **more)))
    for more in ((), ("--json",)):
        found = program("build", "causal.attn", "--target", "sm_80", "--out", "k", *more)
        assert found.status == 0 and found.err.splitlines() == [
            "attncc: warning: k/causal_forward_sm_80.py, any strides: a thread keeps 264 bytes of registers in memory; "
            "more than 256 cost time"
        ]


def test_without_a_target_it_says_which(program, monkeypatch):
    from attncc.runtime import machine

    monkeypatch.setattr(machine, "local_target", lambda: None)
    found = program("build", "causal.attn")
    assert found.status == 0 and "for the CPU" in found.err and "--target" in found.err
    assert Path("causal/causal_forward_cpu.py").exists()
    monkeypatch.setattr(machine, "local_target", lambda: "sm_75")
    assert "sm_75, is not among the targets" in program("build", "causal.attn").err


def test_a_wrong_spec_among_right_ones_writes_nothing(program):
    Path("a.attn").write_text("attention a { mask kk }")
    Path("b.attn").write_text("attention b { } precision { inputs f8e4m3 scales per_block(64) }")
    found = program("build", "causal.attn", "a.attn", "b.attn", "--target", "cpu")
    assert found.status == 1 and not found.out
    assert "a.attn:1:20: error E301" in found.err and "b.attn:1:43: error N108" in found.err
    assert sorted(os.listdir()) == ["a.attn", "b.attn", "causal.attn"]


def test_two_specs_of_one_name_do_not_share_a_file(program):
    Path("other.attn").write_text("attention causal { mask k < q }")
    found = program("build", "causal.attn", "other.attn", "--target", "cpu")
    assert found.status == 2 and "called causal" in found.err
    assert program("build", "causal.attn", "causal.attn", "--target", "cpu").status == 0


def test_no_plan_exits_3(program):
    found = program("build", "causal.attn", "--target", "sm_90", "--shape", "head_dim=4096")
    assert found.status == 3 and "head_dim is 4096" in found.err and os.listdir() == ["causal.attn"]


def test_a_folder_that_cannot_be_written_exits_5(program):
    found = program("build", "causal.attn", "--target", "cpu", "--out", "causal.attn/x")
    assert found.status == 5 and "cannot be written" in found.err


def test_constants_are_baked_in_and_keyed(program):
    Path("c.attn").write_text(CHUNKED)
    texts = []
    for block in ((), ("--set", "chunk=64"), ("--set", "chunk=128")):
        assert program("build", "c.attn", "--target", "cpu", *block).status == 0
        texts.append(Path("chunked/chunked_forward_cpu.py").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert "chunk" not in texts[2].split("attention chunked", 1)[1].splitlines()[1] and "// 128" in texts[2]
    assert json.loads(program("cache", "list", "--json").out)["kernels"][0]["file"] == "chunked_forward_cpu.py"
    for wrong, said in (
        ("chunk=1.5", "is of type int"),
        ("chunkk=3", "did you mean chunk?"),
        ("bias=3", "is a tensor"),
    ):
        found = program("build", "c.attn", "--target", "cpu", "--set", wrong)
        assert found.status == 2 and said in found.err


def test_warnings_are_shown_cold_and_warm(program):
    Path("w.attn").write_text("attention w(unused: int) { mask k <= q }")
    cold, warm = (program("build", "w.attn", "--target", "cpu") for _ in range(2))
    assert cold.status == warm.status == 0
    assert "w.attn:1:13: warning W101" in cold.err and cold.err == warm.err


def test_warnings_are_shown_once_for_all_targets(program):
    Path("w.attn").write_text("attention w(unused: int) { mask k <= q }")
    found = program("build", "w.attn", "w.attn", "--target", "cpu", "--out", "here", "--target", "cpu")
    assert found.status == 0 and found.err.count("warning W101") == 1


def test_a_file_that_was_touched_is_made_again(program):
    path = Path("causal/causal_forward_cpu.py")
    program("build", "causal.attn", "--target", "cpu")
    text = path.read_text()
    path.write_text("# mine\n")
    program("build", "causal.attn", "--target", "cpu")
    assert path.read_text() == text


def test_a_warm_build_imports_nothing_heavy_and_costs_little(program, tmp_path):
    assert program("build", "causal.attn", "--target", "cpu").status == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", WARM, "build", "causal.attn", "--target", "cpu"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == "0 []\n" and "causal_forward_cpu.py" in done.stdout
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5  # the bar, in CPU seconds


@pytest.mark.parametrize("command", [["explain", "--json"], ["show"], ["build"]])
def test_planning_imports_no_torch(program, command):
    Path("c.attn").write_text(CHUNKED)
    done = subprocess.run(
        [sys.executable, "-c", WARM, *command, "c.attn", "--target", "cpu"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    status, _, names = done.stderr.splitlines()[-1].partition(" ")
    assert status == "0" and "torch" not in names and "triton" not in names


def test_a_lost_kernel_is_built_again(program):
    request = pipeline.Request(Path("causal.attn").read_text(), target="cpu")
    cache, tools = Cache(), toolchain()
    first = pipeline.build(request, cache, tools=tools)
    assert pipeline.build(request, cache, tools=tools).kernels[0].cached
    kernel = next(e for e in cache.entries() if e.kind == "kernel")
    (kernel.path / "causal_forward_cpu.py").write_text("import os\n")
    again = pipeline.build(request, cache, tools=tools)
    assert not again.kernels[0].cached and again.kernels[0].source == first.kernels[0].source


def test_two_requests_of_one_plan_share_a_kernel(program):
    assert program("build", "causal.attn", "--target", "cpu").status == 0
    Path("causal.attn").write_text("# a comment\nattention causal { mask k <= q }")
    assert program("build", "causal.attn", "--target", "cpu", "--shape", "batch=3").status == 0
    kinds = [e.kind for e in Cache().entries()]
    assert kinds.count("kernel") == 1 and kinds.count("request") == 2


def test_a_miss_is_explained(program, monkeypatch):
    monkeypatch.setenv("ATTNCC_EXPLAIN_MISS", "1")
    program("build", "causal.attn", "--target", "cpu")
    found = program("build", "causal.attn", "--target", "cpu", "--shape", "head_dim=64")
    assert "sizes.head_dim: (absent) -> 64" in found.err
    assert "plan.head_dim: 128 -> 64" in found.err


def test_an_unwritable_cache_costs_one_warning(program, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", "/proc/attncc")
    found = program("build", "causal.attn", "--target", "cpu")
    assert found.status == 0 and found.err.count("warning") == 1 and "going on without it" in found.err
    assert Path("causal/causal_forward_cpu.py").exists()


def test_files_of_the_other_passes(program):
    found = program("build", "causal.attn", "--target", "cpu", "--pass", "backward", "--pass", "tangent", "--json")
    assert found.status == 0, found.err
    made = {Path(k["file"]).name: k["pass"] for k in json.loads(found.out)["kernels"]}
    stem = "causal"
    assert made == {f"{stem}_backward_cpu.py": "backward", f"{stem}_tangent_cpu.py": "tangent"}
    for name, direction in made.items():
        text = Path(stem, name).read_text(encoding="utf-8")
        assert f"attncc build {stem}.attn --pass {direction} --target cpu" in text


def test_a_pass_that_is_not_built_for_a_spec(program, tmp_path):
    Path("dropped.attn").write_text("attention dropped { dropout 0.1 }", encoding="utf-8")
    found = program("build", "dropped.attn", "--target", "cpu", "--pass", "tangent")
    assert found.status == 1 and "N109" in found.err and "forward-mode derivative of dropout" in found.err


def test_what_a_backward_file_compiles_to(program):
    found = program(
        "build", "causal.attn", "--target", "sm_80", "--shape", "head_dim=64", "--pass", "backward", "--json"
    )
    assert found.status == 0, found.err
    (kernel,) = json.loads(found.out)["kernels"]
    assert kernel["registers"] and 0 < kernel["shared_bytes"] <= kernel["predicted_shared_bytes"]
    assert f"{kernel['registers']} registers" in Path(kernel["file"]).read_text(encoding="utf-8")
    parts = {part["kernel"].rpartition("_")[2]: part for part in kernel["parts"]}
    assert list(parts) == ["delta", "dkdv", "dq"] and all(part["registers"] for part in parts.values())
    assert kernel["registers"] in [part["registers"] for part in parts.values()]
