"""Wrong specs: each file says in its first line which codes it must give, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc.analysis import prove
from attncc.errors import Diagnostic, SpecError
from attncc.frontend import parse, refuse_unbuilt
from attncc.frontend.codes import CODES

FOLDER = Path(__file__).parent.parent / "invalid"
FILES = sorted(FOLDER.glob("*.attn"))


def diagnostics(text: str) -> list[Diagnostic]:
    """All that is said about a spec: errors, else warnings of its text or of proofs, and what is not built yet."""
    try:
        parsed = parse(text)
    except SpecError as error:
        return list(error.diagnostics)
    found = list(parsed.warnings or prove(parsed.spec).warnings)
    try:
        refuse_unbuilt(parsed)
    except SpecError as error:
        found += error.diagnostics
    return found


def place(d: Diagnostic) -> str:
    return f"{d.code} {d.span.line}:{d.span.column}" if d.span else d.code


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_codes_and_places(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    expected = text.splitlines()[0].removeprefix("# expect ").split(", ")
    found = [place(d) for d in diagnostics(text)]
    if expected[-1].startswith("…"):  # so many that the line gives the first ones and their number
        assert len(found) == int(expected.pop()[1:])
        found = found[: len(expected)]
    assert found == expected


def test_size_of_the_corpus() -> None:
    assert len(FILES) >= 250


def test_every_code_is_met() -> None:
    """Each code has a wrong spec; two need what a spec's text cannot have."""
    met = {word[:4] for path in FILES for word in path.read_text(encoding="utf-8").splitlines()[0][9:].split(", ")}
    assert set(CODES) - met == {"E805", "N109"}  # see test_reader and test_unbuilt


def test_rendered() -> None:
    text = "attention x {\n    mask k <= qq\n}\n"
    with pytest.raises(SpecError) as caught:
        parse(text, "a.attn")
    assert str(caught.value) == (
        "a.attn:2:15: error E301: unknown name 'qq'\n"
        "        mask k <= qq\n"
        "                  ^^\n"
        "    hint: did you mean 'q'?"
    )
    assert caught.value.exit_code == 1
