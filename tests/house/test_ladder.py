"""docs/ladder.md: what its commands print."""

import re
import runpy

import pytest

from attncc import cli, frontend
from attncc.planner import choose
from attncc.targets import TARGETS
from tests.house.tree import ROOT, read

PAGE = read("docs/ladder.md")
BLOCKS = [b for b in re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if b.startswith("$ ")]


def told(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    cli.run(command.removeprefix("$ attncc ").split())
    found = capsys.readouterr()
    return [*found.out.splitlines(), *found.err.splitlines()]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.splitlines()[0].removeprefix("$ attncc "))
def test_a_command_prints_what_the_page_shows(block, monkeypatch, capsys, tmp_path):
    command, *lines = block.splitlines()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    printed = told(command, capsys)
    assert lines and [line for line in lines if line not in printed] == []


def test_every_spec_beside_the_page_is_used():
    names = {p.name for p in (ROOT / "docs" / "ladder").glob("*.attn")}
    assert names == set(re.findall(r"ladder/(\w+\.attn)", PAGE))


def test_the_table_of_tiles_is_what_the_planner_chooses():
    spec = frontend.parse(read("docs/ladder/fa2.attn")).spec
    from attncc import analysis
    from attncc.ir import Shape

    rows = []
    for name in ("sm_80", "sm_90", "sm_100", "gfx942"):
        goal = TARGETS[name]
        plan = choose(spec, Shape(), goal, analysis.kernel_visits(spec, forward=True)).plan
        rows.append(
            f"| {goal.product} ({name}) | {goal.shared_bytes:,} bytes | {goal.registers_sm:,} | "
            f"{plan.tile_q} x {plan.tile_k}, {plan.stages} stages | {plan.shared_bytes:,} bytes |"
        )
    assert [row for row in rows if row not in PAGE] == []


def test_the_measured_tables_are_the_recorded_ones():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    measured = PAGE[PAGE.index("## Measured") :]
    assert measured.endswith("\n".join(tables["ladder_page"]()) + "\n")
    assert tables["predictions"](tables["_read"]("predict.json")) in measured
    assert tables["made_with"](tables["_read"]("io.json")) in measured
