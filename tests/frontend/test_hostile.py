"""Hostile and mutated specs: diagnostics or a result, never a traceback, never more than a second."""

from __future__ import annotations

import contextlib
import time

import pytest

from attncc.errors import SpecError
from attncc.frontend import canonical, format_text, parse, refuse_unbuilt
from attncc.frontend.consts import MAX_TEXT
from tests.frontend.hostile import HOSTILE
from tests.frontend.mutations import mutated

SECONDS = 1.0


def outcome(text: str) -> str:
    """`built`, or the codes; whatever else is raised fails the test. A right spec must survive a round trip."""
    try:
        parsed = parse(text)
    except SpecError as error:
        str(error).encode("utf-8")  # printable anywhere
        assert error.diagnostics
        return " ".join(d.code for d in error.diagnostics)
    assert parse(canonical(parsed.spec)).spec == parsed.spec
    formatted = format_text(text)
    assert parse(formatted).spec == parsed.spec
    assert format_text(formatted) == formatted
    try:
        refuse_unbuilt(parsed)
    except SpecError as error:
        return " ".join(d.code for d in error.diagnostics)
    return "built"


def timed(text: str) -> float:
    """Processor time of one parse; the least of two, so that a busy machine does not matter."""
    times = []
    for _ in range(2):
        start = time.process_time()
        with contextlib.suppress(SpecError):
            parse(text)
        times.append(time.process_time() - start)
        if times[0] < SECONDS / 2:
            break
    return min(times)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    assert name == "too long" or len(HOSTILE[name]) <= MAX_TEXT
    outcome(HOSTILE[name])
    assert timed(HOSTILE[name]) < SECONDS


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("minus signs", "E801"),
        ("deep parentheses", "E801"),
        ("huge int", "E105"),
        ("int of zeros", "built"),
        ("huge exponent", "E105"),
        ("doubling lets", "E802"),
        ("doubling lets under the limit", "E802"),
        ("long sum", "E803"),
        ("NUL within", "E104"),
        ("byte order mark", "E104"),
        ("surrogate", "E104"),
        ("empty", "E201"),
        ("blank", "E201"),
        ("code in a comment", "built"),
        ("too long", "E107"),
    ],
)
def test_hostile_outcomes(name: str, codes: str) -> None:
    assert outcome(HOSTILE[name]) == codes


def test_never_more_than_a_person_reads() -> None:
    with pytest.raises(SpecError) as caught:
        parse(HOSTILE["one misspelt statement"])
    assert len(caught.value.diagnostics) == 101
    assert caught.value.diagnostics[-1].code == "E805"
    assert len(str(caught.value)) < 60_000


def _sweep(count: int, seed: int) -> None:
    outcomes = {"built": 0, "refused": 0}
    slowest = 0.0
    for text in mutated(count, seed):
        start = time.process_time()
        outcomes["built" if outcome(text) == "built" else "refused"] += 1
        if time.process_time() - start > SECONDS:
            slowest = max(slowest, timed(text))
    assert slowest < SECONDS
    assert min(outcomes.values()) > count // 20  # the mutations must reach both sides


def test_mutated() -> None:
    _sweep(1500, seed=2024)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_mutated_long(seed: int) -> None:
    _sweep(2500, seed)
