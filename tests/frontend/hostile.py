"""Texts made to break a compiler: each must give diagnostics or a spec, quickly."""

from __future__ import annotations

from attncc.frontend.consts import MAX_TEXT


def _spec(body: str, params: str = "") -> str:
    return f"attention x{f'({params})' if params else ''} {{\n{body}\n}}\n"


def _fill(unit: str) -> str:
    """`unit`, as often as a spec has room for it."""
    return unit * ((MAX_TEXT - 200) // len(unit))


def _doubling(count: int, use: str = "mask a{last} > 0") -> str:
    lets = ["let a0 = k + q"] + [f"let a{i} = a{i - 1} + a{i - 1}" for i in range(1, count)]
    return _spec("\n".join(lets) + "\n" + use.format(last=count - 1))


HOSTILE: dict[str, str] = {
    "minus signs": _spec("score " + "-" * 5000 + "s"),
    "spaced minus signs": _spec("score " + _fill("- ") + "s"),
    "nots": _spec("mask " + _fill("not ") + "(k <= q)"),
    "deep parentheses": _spec("mask " + "(" * 5000 + "k" + ")" * 5000 + " <= q"),
    "open parentheses": _spec("mask " + _fill("(")),
    "deep calls": _spec("score " + "abs(" * 5000 + "s" + ")" * 5000),
    "deep indices": _spec("mask " + "t[" * 5000 + "k" + "]" * 5000 + " <= q", "t: i32[k]"),
    "huge int": _spec("mask k < " + "9" * 5000),
    "int of zeros": _spec("mask k < " + "0" * 5000 + "1"),
    "huge float": _spec("score s + " + "9" * 5000 + ".5"),
    "huge exponent": _spec("score s + 1e999999999"),
    "tiny exponent": _spec("score s + 1e-999999999"),
    "huge axis": _spec("mask t[k] > 0", "t: i32[" + "9" * 5000 + "]"),
    "huge tile": _spec("") + "schedule { tile q = " + "9" * 5000 + " }",
    "doubling lets": _doubling(200),
    "doubling lets unused": _doubling(256, "mask k <= q"),
    "doubling lets under the limit": _doubling(11),
    "many large lets": _spec("\n".join(f"let a{i} = {' + '.join(['k'] * 90)}" for i in range(88))),
    "uses of a large let": _spec(f"let a0 = {' + '.join(['k'] * 90)}\nmask {' < '.join(['a0'] * 4000)}"),
    "long sum": _spec("score s" + _fill(" + 1")),
    "long chain": _spec("mask k" + _fill(" < k")),
    "long or": _spec("mask k == 0" + _fill(" or k == 1")),
    "many masks": _spec(_fill("mask k <= q\n")),
    "many scores": _spec(_fill("score s * s\n")),
    "doubling scores": _spec("score s * s\n" * 30),
    "many lets": _spec("".join(f"let a{i} = k\n" for i in range(2400))),
    "many parameters": _spec("", ", ".join(f"a{i}: int" for i in range(2300))),
    "many axes": _spec("", "t: f32[" + ", ".join(f"a{i}" for i in range(2300)) + "]"),
    "many misspelt names": _spec("mask " + " and ".join(f"windw{i} > k" for i in range(1500)), "window: int"),
    "one misspelt statement": _spec(_fill("maks k <= q\n")),
    "many attentions": _fill(_spec("mask k <= q")),
    "many schedules": _spec("") + _fill("schedule sm_90 { warps 4 }"),
    "long name": _spec("mask k <= " + _fill("a")),
    "long attention name": "attention " + _fill("a") + " { }",
    "words on one line": "attention x { " + _fill("mask k <= q and ") + "}",
    "NUL": "\0" * 1000,
    "NUL within": _spec("mask k <= q\0"),
    "byte order mark": "\ufeff" + _spec("mask k <= q"),
    "lone carriage returns": "# comment\rattention x {\rmask k <= q\r}\r",
    "line separators": _spec("mask k <= q # \u2028 import os"),
    "bidirectional": _spec("mask k <= q # \u202e"),
    "surrogate": _spec("mask k <= \ud800"),
    "unicode operators": _spec("mask k ≤ q ∧ q − k < 5"),
    "unicode digits": _spec("mask k < ٣ and k < ９ and k < ²"),
    "unicode names": _spec("let ﬁ = k\nmask ﬁ <= q and к <= q"),
    "escape sequences": _spec("mask k <= \x1b[31mq"),
    "empty": "",
    "blank": " \n\t\n",
    "comment only": "# nothing",
    "comment without end": _spec("mask k <= q") + _fill("#"),
    "braces": _fill("{}"),
    "open braces": "attention x " + "{" * 20000,
    "closed braces": "}" * 20000,
    "commas": "attention x(" + "," * 20000 + ") { }",
    "strings": _fill('"'),
    "python": 'import os\nos.system("true")\n',
    "code in a name": "attention x(a: int = __import__('os').system('true')) { mask k <= q }",
    "code in a comment": _spec("mask k <= q # \"\"\" ''' \\n import os {{ 7 * 7 }} {% raw %}"),
    "template": "{{ config }} {% for x in y %}",
    "too long": "# " + "x" * 200_000,
    "too many signs": _fill("$ "),
    "bad numbers": _spec("mask k < " + _fill("1_0 ")),
    "long setting": _spec("") + "layout { kv " + "paged(" * 3000 + " }",
    "values": _spec("") + "schedule { tile " + ", ".join(["q = 16"] * 4000) + " }",
}
