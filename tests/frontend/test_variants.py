"""39 variants of the literature, in the language: built, or refused with the right code."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc.errors import SpecError
from attncc.frontend import canonical, format_text, parse, refuse_unbuilt

FOLDER = Path(__file__).parent.parent / "data" / "variants"
FILES = sorted(FOLDER.glob("*.attn"))
NOT_YET = {
    "20_mla": "N103 N103",
    "37_paged_int8": "N103 N104",
}
WARNED = {"04_gemma3": "W103", "08_longformer": "W103", "09_bigbird": "W103", "10_swin": "W103", "27_graph": "W105"}


def test_all_there() -> None:
    assert len(FILES) == 39
    assert set(NOT_YET) | set(WARNED) <= {p.stem for p in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_variant(path: Path) -> None:
    parsed = parse(path.read_text(encoding="utf-8"), path.name)
    refused = ""
    try:
        refuse_unbuilt(parsed)
    except SpecError as error:
        refused = " ".join(d.code for d in error.diagnostics)
    assert refused == NOT_YET.get(path.stem, "")
    assert " ".join(dict.fromkeys(w.code for w in parsed.warnings)) == WARNED.get(path.stem, "")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_round_trip(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spec = parse(text).spec
    printed = canonical(spec)
    assert parse(printed).spec == spec
    assert canonical(parse(printed).spec) == printed == format_text(printed)
    assert format_text(text) == text  # they are kept in the form that fmt gives


def test_canonical_keeps_the_authors_words() -> None:
    """Lets, chains and brackets come back; the variants' own text, less comments and order, is what is printed."""
    kept = 0
    for path in FILES:
        text = path.read_text(encoding="utf-8").split("\n", 1)[1]
        kept += sorted(canonical(parse(text).spec).split()) == sorted(text.split())
    assert kept >= 34
