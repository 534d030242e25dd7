"""The pages say what there is: specs, targets, versions, make targets."""

import json
import pydoc
import re
import runpy

import pytest
from click.testing import CliRunner

import attncc
from attncc import cli, frontend
from attncc.cli import COMMANDS
from attncc.errors import SpecError
from attncc.targets import TARGETS
from tests.house.tree import ROOT, files, read

SPECS = [p for p in files() if p.startswith("specs/") and p.endswith(".attn")]
PAGES = [p for p in files() if p.endswith(".md")]
STEMS = [p.removeprefix("specs/").removesuffix(".attn") for p in SPECS]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of any level."""
    return re.split(r"\n#+ ", text.split(f" {heading}\n", 1)[1], maxsplit=1)[0]


def fenced(text: str) -> list[str]:
    """The blocks between fences, without them."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def body(spec: str) -> str:
    """A spec without the comment on top."""
    return re.sub(r"\A(#[^\n]*\n)+", "", spec)


def test_the_index_of_specs_is_complete():
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.attn\) \| .+ \| .+ \|$", read("specs/README.md"), re.MULTILINE)
    assert [a for a, b in rows if a != b] == []
    assert sorted(a for a, _ in rows) == STEMS
    assert len(STEMS) >= 18


def test_the_readme_names_each_spec_and_no_other():
    listed = section(read("README.md"), "The language").split("([what each is](specs/README.md)):")[1]
    assert sorted(re.findall(r"\w+", listed.split(".")[0])) == STEMS


def test_the_changelog_counts_the_specs():
    assert f"A library of {len(STEMS)} specs" in read("CHANGELOG.md")


@pytest.mark.parametrize("path", SPECS)
def test_a_spec_is_named_by_its_file_and_says_what_it_is(path):
    text = read(path)
    comment = text[: len(text) - len(body(text))]
    assert re.match(r"attention (\w+)", body(text)).group(1) == path.removeprefix("specs/").removesuffix(".attn")
    assert re.search(r"arXiv\s|doi\s|Sources:|PyTorch", comment.replace("\n#", "")), "say who uses it, and the source"


def test_the_readme_shows_a_spec_as_it_is():
    (shown,) = [b for b in fenced(read("README.md")) if b.startswith("# specs/")]
    first, rest = shown.split("\n", 1)
    assert body(read(first.removeprefix("# "))) == rest


def test_the_readme_shows_diagnostics_as_they_are():
    blocks = fenced(read("README.md"))
    (wrong,) = [b for b in blocks if b.startswith("attention local")]
    (said,) = [b for b in blocks if b.startswith("local.attn:")]
    with pytest.raises(SpecError) as caught:
        frontend.parse(wrong, "local.attn")
    assert f"{caught.value}\n" == said


def test_the_readme_shows_what_explain_says(monkeypatch):
    (shown,) = [b for b in fenced(read("README.md")) if b.startswith("$ attncc explain")]
    command, *lines = shown.splitlines()
    program, *arguments = command.removeprefix("$ ").split()
    monkeypatch.chdir(ROOT)
    told = CliRunner().invoke(cli.program, arguments, prog_name=program, catch_exceptions=False)
    assert told.exit_code == 0 and set(lines) <= set(told.stdout.splitlines())


def test_the_readme_names_each_target():
    assert set(re.findall(r"`(\w+)`", section(read("README.md"), "Targets"))) == set(TARGETS)


def test_the_version_stands_in_one_place():
    project = read("pyproject.toml")
    assert 'dynamic = ["version"]' in project and 'path = "attncc/__init__.py"' in project
    assert [p for p in files() if p.startswith("attncc/") and "__version__ = " in read(p)] == ["attncc/__init__.py"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", attncc.__version__)
    changes = re.findall(r"^## \[([^\]]+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert changes[0] == "Unreleased" or changes[0] == attncc.__version__


def test_the_python_versions_are_the_same_everywhere():
    assert 'requires-python = ">=3.10,<3.14"' in read("pyproject.toml")
    for page in ("README.md", "Makefile"):
        assert "3.10 to 3.13" in read(page), page


def test_the_pages_name_make_targets_that_exist():
    made = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", read(page), re.MULTILINE))
        assert named <= made, f"{page}: {sorted(named - made)}"


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_is_there(page):
    text = read(page)
    links = {t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t} - {""}
    gone = [t for t in links if not ((ROOT / page).parent / t).exists()]
    named = re.findall(r"`((?:attncc|templates|specs|tests|docs|examples|generated|benchmarks)/[\w./-]*)`", text)
    gone += [t for t in named if "NAME" not in t and not (ROOT / t).exists()]
    assert not gone


def test_the_pages_name_each_command():
    for page in ("README.md", "CHANGELOG.md"):
        missing = [c for c in COMMANDS if not re.search(rf"(`|attncc ){c}\b", read(page))]
        assert not missing, f"{page} does not name {missing}"
    named = set(re.findall(r"(?:^|`)attncc ([a-z]+)", read("README.md"), re.MULTILINE))
    assert named - {"compiles", "works"} <= set(COMMANDS)


def test_what_the_frontend_lists_is_what_there_is():
    from attncc.frontend.consts import TARGETS as NAMES

    assert set(NAMES) == set(TARGETS)


def test_the_figures_of_the_readme_are_the_recorded_ones():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["tables"]()
    measured = section(read("README.md"), "Measured")
    backward = {"backward_fa3.json", "backward.json"}
    assert set(tables) == {"forward_fa3.json", "forward.json", "masks.json", "host.json", "start.json"} | backward
    assert [line for line in measured.splitlines() if line.startswith("|")] == [
        line for _, *lines in tables.values() for line in lines
    ]
    assert all(f"{lines[0]}." in measured for lines in tables.values())


def test_the_figures_beside_flex_are_the_recorded_ones():
    record = json.loads(read("benchmarks/results/forward.json"))
    times = [r["tflops"]["attncc"] / r["tflops"]["flex"] for r in record["rows"] if r["part"] == "dense"]
    assert len(times) == 10
    assert f"at {min(times):.2f} to {max(times):.2f} times its rate" in " ".join(read("README.md").split())


def test_the_help_on_the_package_shows_what_there_is_to_call():
    shown = pydoc.plain(pydoc.render_doc(attncc))
    assert "load(path" in shown and "compile(text" in shown and "[B, H_kv, K, D_v]" in shown
