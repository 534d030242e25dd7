"""The program as a whole: statuses, help, hostile arguments, pipes, signals, colours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attncc.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
BUILT = ("build", "explain", "check", "show", "fmt", "tune", "bench", "cache")
LATER = ("export",)


def start(args, **options):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-m", "attncc", *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_help_names_every_command(program):
    found = program("--help")
    assert found.status == 0 and not found.err
    assert all(f"\n  {name} " in found.out for name in COMMANDS)
    assert set(COMMANDS) == {*BUILT, *LATER}
    for number in ("0 done", "1 the spec", "2 the command line", "3 no plan", "4 a check", "5 the environment"):
        assert number in " ".join(found.out.split())


@pytest.mark.parametrize("name", BUILT)
def test_help_of_each_command_has_an_example(program, name):
    found = program(name, "--help")
    assert found.status == 0 and f"    attncc {name} " in found.out


@pytest.mark.parametrize("name", LATER)
def test_what_is_not_built_yet_is_refused(program, name):
    found = program(name, "causal.attn", "--shape", "x", "--plot", "y")
    assert found.status == 1 and not found.out
    assert f"`attncc {name}` is not built yet" in found.err
    shown = program(name, "--help").out
    assert "ot built yet" in shown
    (example,) = re.findall(r"^ +attncc (.+)$", shown, re.MULTILINE)
    assert program(*example.replace("sm_90", "cpu").split()).status == 0


def test_version(program):
    import attncc

    assert program("--version").out == f"attncc {attncc.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Usage"),
        (["buidl"], "Did you mean 'build'?"),
        (["build"], "Missing argument"),
        (["build", "nix.attn"], "does not exist"),
        (["build", "."], "is a directory"),
        (["build", "causal.attn", "--frobnicate"], "No such option"),
        (["build", "causal.attn", "--target", "sm_91"], "unknown target 'sm_91'; there are: cpu, sm_80"),
        (["build", "causal.attn", "--target", "../../x"], "unknown target"),
        (["build", "causal.attn", "--dtype", "f8"], "'f8' is not one of"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads"], "a size is a whole number"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=0"], "a size is a whole number"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=-1"], "a size is a whole number"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=9" + "9" * 5000], "a size is a whole number"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=9999999999"], "sizes are from 1 to"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=²"], "a size is a whole number"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "head=3"], "the sizes are batch, heads"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=3,heads=3"], "heads is given twice"),
        (["build", "causal.attn", "--target", "cpu", "--shape", "heads=6,kv_heads=4"], "not a multiple of kv_heads=4"),
        (["build", "causal.attn", "--target", "cpu", "--set", "window"], "as name=value"),
        (["build", "causal.attn", "--target", "cpu", "--set", "a b=1"], "as name=value"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=__import__('os')"], "a value is a number"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=1e999"], "a value is a number"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=" + "(" * 9000], "a value is a number"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=" + "9" * 5000], "a value is a number"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=1"], "no scalar parameter 'w'"),
        (["build", "causal.attn", "--target", "cpu", "--set", "w=1", "--set", "w=2"], "gives w twice"),
        (["build", "causal.attn", "--target", "cpu", "--out", "causal.attn"], "is a file"),
        (["cache"], "Usage"),
        (["cache", "burn"], "No such command"),
        (["fmt"], "Missing argument"),
        (["show", "causal.attn", "--rows", "1"], "a range as"),
        (["show", "causal.attn", "--rows", "9:3"], "nothing between"),
        (["show", "causal.attn", "--tile", "100,64"], "two powers of two"),
        (["show", "causal.attn", "--batch", "1"], "there are 1"),
        (["show", "causal.attn", "--head", "-1"], "not in the range"),
        (["show", "causal.attn", "--example", str(2**63)], "not in the range"),
        (["tune", "causal.attn", "--seconds", "nan"], "nan is not in the range 1<=x<=3600"),
        (["tune", "causal.attn", "--seconds", "inf"], "not in the range"),
        (["tune", "causal.attn", "--seconds", "-1"], "not in the range"),
        (["bench", "causal.attn", "--lengths", ","], "lengths are whole numbers from 1"),
        (["bench", "causal.attn", "--rounds", "nan"], "not a valid integer"),
        (["check", "causal.attn", "--seeds", "0"], "not in the range"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_exits_2(program, args, said):
    found = program(*args)
    assert found.status == 2, found.err
    assert said in found.err and "Traceback" not in found.err
    assert os.listdir() == ["causal.attn"]


@pytest.mark.parametrize("command", ["build", "explain", "check", "show", "fmt"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "E201"),
        (b"attention caf\xe9 {}", "x.attn:1:14: error E101: byte 0xe9"),
        (b"\xff\xfe", "x.attn:1:1: error E101: byte 0xff"),
        (b"attention a {\n  mask kk <= q\n  softmax sink(z)\n}", "x.attn:2:8: error E301"),
        (b"\0" * 100, "x.attn:1:1: error"),
        (b"attention a { mask " + b"(" * 30_000, "x.attn:1:"),
        (b"# " + b"x" * 100_000, "error E107"),
    ],
    ids=["empty", "latin1", "utf16", "two faults", "nul", "deep", "long"],
)
def test_a_wrong_spec_exits_1_and_writes_nothing(program, command, data, said):
    Path("x.attn").write_bytes(data)
    extra = [] if command in ("fmt", "check") else ["--target", "cpu"]
    found = program(command, "x.attn", *extra)
    assert found.status == 1 and not found.out, found
    assert said in found.err and "Traceback" not in found.err
    assert sorted(os.listdir()) == ["causal.attn", "x.attn"] and Path("x.attn").read_bytes() == data


def test_an_endless_file_is_refused(program):
    found = program("build", "/dev/zero", "--target", "cpu")
    assert found.status == 1 and "E107" in found.err


def test_names_that_are_no_text_are_shown_escaped(program):
    name = os.fsdecode(b"caf\xe9.attn")
    Path(name).write_text("attention a {")
    found = program("build", name, "--target", "cpu")
    assert found.status == 1 and "caf" in found.err


def test_an_unsafe_cache_exits_5_and_says_what_mends_it(program, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    for args in (("build", "causal.attn", "--target", "cpu"), ("cache", "list")):
        found = program(*args)
        assert found.status == 5 and f"chmod go-w {tmp_path / 'cache'}" in found.err
    assert os.listdir() == ["causal.attn"]


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    (tmp_path / "causal.attn").write_text("attention causal { mask k <= q }")
    process = start(["show", "causal.attn", "--target", "cpu"], cwd=tmp_path)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141 and err == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed_from_the_start_change_no_status(tmp_path, closed):
    (tmp_path / "causal.attn").write_text("attention causal { mask k <= q }")
    (tmp_path / "wrong.attn").write_text("attention wrong { mask k <= qq }")
    for args, status in (("explain causal.attn --target cpu", 0), ("fmt --check wrong.attn", 1)):
        line = f"{sys.executable} -m attncc {args} {closed}"
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status and "Traceback" not in done.stdout + done.stderr


def test_an_interrupt_ends_it_in_a_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = start(["build", "pipe", "--target", "cpu"], cwd=tmp_path)
    with open(tmp_path / "pipe", "wb"):  # opens when the program does, which then waits for what never comes
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b""
    assert b"interrupted" in err and b"Traceback" not in err


def test_no_colours_in_a_pipe(tmp_path):
    (tmp_path / "causal.attn").write_text("attention causal { mask k <= q }")
    process = start(["show", "causal.attn", "--target", "cpu"], cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"\x1b" not in out and b"\x1b" not in err
    assert b"#" in out and out.isascii()


def test_a_fault_of_ours_is_not_taken_for_the_users(program, monkeypatch):
    from attncc import frontend

    monkeypatch.setattr(frontend, "format_text", lambda *_: 1 // 0)
    found = program("fmt", "causal.attn")
    assert found.status == 70 and "ZeroDivisionError" in found.err and "fault of attncc" in found.err


@pytest.mark.parametrize(
    ("no", "force", "colored"), [("", "", False), ("", "1", True), ("1", "", False), ("1", "1", False)]
)
def test_colours_by_environment(program, monkeypatch, no, force, colored):
    monkeypatch.setenv("NO_COLOR", no)
    monkeypatch.setenv("FORCE_COLOR", force)
    for args in (("show", "causal.attn", "--target", "cpu"), ("build", "causal.attn", "--target", "sm_1")):
        found = program(*args)
        assert ("\x1b[" in found.out + found.err) == colored


def test_it_is_the_same_program_as_a_module(tmp_path):
    process = start(["--version"], cwd=tmp_path)
    assert process.communicate(timeout=60)[0].startswith(b"attncc ") and process.returncode == 0


def test_progress_is_told_once_it_takes_long(monkeypatch, capsys):
    from attncc.commands import console

    monkeypatch.setattr(console, "PATIENCE", 0.0)
    with console.progress() as line:
        line.stage("counting")
        line._timer.join()
        monkeypatch.setattr(console, "PATIENCE", 60.0)
        line.stage("compiling")
        line.note("a remark")
    assert capsys.readouterr().err == "attncc: counting ...\na remark\n"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (67_371_008, "67.4 MB"), (2.5e18, "2,500 PB")]
)
def test_amounts(number, text):
    from attncc.commands.console import amount

    assert amount(number, "B") == text


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0755, "75.5 us"), (0.9999, "1,000 us"), (1.5, "1.5 ms"), (1370, "1.37 s"), (5e6, "5,000 s")]
)
def test_durations(ms, text):
    from attncc.commands.console import duration

    assert duration(ms) == text
