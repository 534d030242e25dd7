"""Long lines of generated files: broken where a reader would, with the meaning that they had."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from attncc.codegen.layout import WIDTH, broken, provenance

GENERATED = sorted((Path(__file__).parents[2] / "generated").glob("*.py"))

CASES = """\
    x = load(a + b * c, mask=(a < b) & (c < d), other=0)
    x = load(
        a + b * c,
        mask=(a < b) & (c < d),
        other=0,
    )

    x = minimum(alpha * beta, gamma // delta)
    x = minimum(
        alpha * beta, gamma // delta
    )

    keep = (a < b) & (c < d) & ((e < f) | (g < h) | (i < j))
    keep = (
        (a < b) & (c < d)
        & ((e < f) | (g < h) | (i < j))
    )

    if first and second and (third or fourth or fifth):
    if (
        first and second
        and (third or fourth or fifth)
    ):

    return first if isinstance(first, str) else second
    return (
        first if isinstance(first, str)
        else second
    )

    y = x  # why it is that y should be x at all, and why not
    # why it is that y should be x at all,
    # and why not
    y = x

    a[b, c] = minimum(-alpha, beta).to(gamma.dtype.element)
    a[b, c] = minimum(-alpha, beta).to(
        gamma.dtype.element
    )

    z = 'a & b, c' + other("d | e, (f") + more - less * 2
    z = (
        'a & b, c' + other("d | e, (f")
        + more - less * 2
    )

    flag = (load(words + place, mask=place < end) >> bit) & 1
    flag = (
        (
            load(
                words + place,
                mask=place < end,
            )
            >> bit
        )
        & 1
    )
"""
LINES = [tuple(case.split("\n", 1)) for case in CASES.rstrip("\n").split("\n\n")]


def tree(line: str) -> str:
    rest = "        pass\n" if line.rstrip().endswith(":") else ""
    return ast.dump(ast.parse(f"def f():\n{line}\n{rest}"))


@pytest.mark.parametrize(("line", "want"), LINES, ids=[line.strip() for line, _ in LINES])
def test_a_line_is_broken_at_its_brackets_and_operators(line, want):
    assert broken(line, 44) == want
    assert tree(want) == tree(line)


def test_what_fits_stays_and_what_cannot_be_broken_too():
    name = "a" * 50
    for text in (
        "x = f(a, b)\n",
        f"x = {name}\n",
        f"# {name} {name}\n",
        f'def f():\n    """{name} {name}\n    {name}"""\n',
    ):
        assert broken(text, 44) == text
    assert broken(f"x = f(\n    {name}, {name},\n)\n", 44) == f"x = f(\n    {name}, {name},\n)\n"


def test_breaking_twice_changes_nothing():
    once = broken("".join(f"{line}\n" for line, _ in LINES), 44)
    assert broken(once, 44) == once


@pytest.mark.parametrize("narrow", [40, 60, 90])
@pytest.mark.parametrize("path", GENERATED, ids=lambda p: p.stem)
def test_the_meaning_stays_however_narrow(path, narrow):
    text = path.read_text(encoding="utf-8")
    assert ast.dump(ast.parse(broken(text, narrow))) == ast.dump(ast.parse(text))


@pytest.mark.parametrize("path", GENERATED, ids=lambda p: p.stem)
def test_no_line_is_longer_than_the_house_has_them(path):
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > WIDTH] == []


def test_the_commands_take_a_line_each_where_they_are_long():
    assert provenance("make x", "python x.py") == ("# made by: make x     checked by: python x.py",)
    assert provenance("make " + "x" * 90, "python x.py")[1] == "# checked by: python x.py"
