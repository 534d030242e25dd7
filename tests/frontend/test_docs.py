"""The pages about the language: every example does what its page says, every code is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attncc.analysis import prove
from attncc.errors import SpecError
from attncc.frontend import format_text, parse, refuse_unbuilt
from attncc.frontend.codes import CODES
from attncc.frontend.consts import ALGORITHMS, BUILTIN_NAMES, FUNCTION_NAMES, LOOPS, SETTINGS, STATEMENTS, TARGETS
from attncc.ir import ELEMENTS, POLICIES

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")
DIAGNOSTICS = (DOCS / "diagnostics.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```attn\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^### (\w+): ([^\n]*)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
EXAMPLES = _FENCE.findall(LANGUAGE)
SECTIONS = {code: (title, body) for code, title, body in _SECTION.findall(DIAGNOSTICS)}
UNSHOWN = {"E104", "E107", "E805", "N109"}  # invisible, too long for a page, or not about a text


def codes(text: str) -> set[str]:
    try:
        parsed = parse(text)
        found = parsed.warnings or prove(parsed.spec).warnings
        refuse_unbuilt(parsed)
        return {w.code for w in found}
    except SpecError as error:
        return {d.code for d in error.diagnostics}


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda t: re.sub(r"(?s).*attention (\w+).*", r"\1", t))
def test_examples_of_the_reference(text: str) -> None:
    wrong = re.match(r"# wrong: (\w+)\n", text)
    if wrong:
        assert codes(text) == {wrong.group(1)}
    else:
        parsed = parse(text)
        assert not parsed.warnings and not prove(parsed.spec).warnings
        assert format_text(text) == text


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 15
    assert sum(t.startswith("# wrong") for t in EXAMPLES) >= 5


@pytest.mark.parametrize(
    "word", sorted({*STATEMENTS, *BUILTIN_NAMES, *FUNCTION_NAMES, *ELEMENTS, *POLICIES, *TARGETS, *ALGORITHMS, *LOOPS})
)
def test_the_reference_names_every_word(word: str) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]+)`", LANGUAGE))
    assert re.search(rf"\b{word}\b", quoted)


@pytest.mark.parametrize("section", SETTINGS)
def test_the_reference_names_every_setting(section: str) -> None:
    body = LANGUAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    assert {f"`{name}`" for name in SETTINGS[section]} <= set(re.findall(r"^\| (`\w+`) \|", body, re.MULTILINE))


def test_every_code_is_explained_once() -> None:
    assert len(_SECTION.findall(DIAGNOSTICS)) == len(SECTIONS)
    assert {code: title for code, (title, _) in SECTIONS.items()} == CODES


def test_every_code_is_given_somewhere_and_no_other() -> None:
    """By the frontend, the road, or a proof, which may not import the registry."""
    house = (p for p in (DOCS.parent / "attncc").rglob("*.py") if p.name != "codes.py")
    assert {c for p in house for c in re.findall(r'"([ENW]\d{3})"', p.read_text(encoding="utf-8"))} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_each_explanation_has_cause_example_and_cure(code: str) -> None:
    body = SECTIONS[code][1]
    cause, _, cure = body.partition("**Cure.**")
    assert len(cause.split("```")[0].strip()) > 8 and len(cure.strip()) > 8
    examples = _FENCE.findall(body)
    assert len(examples) == (code not in UNSHOWN)
    for text in examples:
        assert code in codes(text)
        assert len(codes(text)) == 1


def test_links_between_the_pages() -> None:
    for target in re.findall(r"\(language\.md#(\w+)\)", DIAGNOSTICS) + re.findall(r"\(#([\w-]+)\)", LANGUAGE):
        assert re.search(rf"^## {target.replace('-', ' ')}$", LANGUAGE, re.MULTILINE | re.IGNORECASE), target
