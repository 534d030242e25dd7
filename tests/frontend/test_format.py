"""`fmt`: comments kept, aligned, idempotent; and the grammar as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc.errors import SpecError
from attncc.frontend import canonical, format_text, parse
from attncc.frontend.lexer import language

DATA = Path(__file__).parent.parent / "data" / "variants"

UGLY = """

# A heading


#!a second line
attention   window_alibi(window:int=1024,slopes:f32[ h ],
   sinks : f32[h]   grad)   {   # opens

    let distance=q-k
    # why the window


    mask 0<=distance<window   # in the window
    score s-slopes[h]*distance# the slope
    softmax sink( sinks[h] )


    # last words
}  # closes
precision{inputs bf16   # as stored
products ieee
}
schedule sm_90{algorithm fa2}
layout { kv dense }  # plain
# the end"""
NICE = """# A heading

#!a second line
attention window_alibi(window: int = 1024, slopes: f32[h], sinks: f32[h] grad) {  # opens
    let distance = q - k
    # why the window

    mask    0 <= distance < window    # in the window
    score   s - slopes[h] * distance  # the slope
    softmax sink(sinks[h])
    # last words
}  # closes
precision {
    inputs   bf16  # as stored
    products ieee
}
schedule sm_90 { algorithm fa2 }
layout { kv dense }  # plain
# the end
"""


def test_nice() -> None:
    assert format_text(UGLY) == NICE
    assert format_text(NICE) == format_text(UGLY)
    assert parse(NICE).spec == parse(UGLY).spec


def test_comments_within_move_above() -> None:
    text = "attention x {\n    mask k <= # first\n        q # second\n        and k < 8 # third\n}\n"
    assert format_text(text) == ("attention x {\n    # first\n    # second\n    mask k <= q and k < 8  # third\n}\n")


def test_commented_parameters() -> None:
    text = (
        "attention x(a: int, # width\n  # of heads\n  t: f32[h] # slope\n  # no more\n) { mask k < a score t[h] + s }\n"
    )
    assert format_text(text) == (
        "attention x(\n    a: int,  # width\n    # of heads\n    t: f32[h],  # slope\n    # no more\n) {\n"
        "    mask  k < a\n    score t[h] + s\n}\n"
    )


def test_long_lines_are_broken_outside_brackets() -> None:
    text = "attention x {\n    mask " + " or ".join(f"(k == {i} and q == {i})" for i in range(12)) + "\n}\n"
    formatted = format_text(text)
    assert max(map(len, formatted.splitlines())) <= 110
    assert all(line.strip().startswith(("mask (", "or (")) for line in formatted.splitlines()[1:-1])
    assert format_text(formatted) == formatted
    assert parse(formatted).spec == parse(text).spec


@pytest.mark.parametrize(
    "text", ["attention x {}\n", "# c\nattention x {}  # d\n", "attention x {\n    # nothing\n}\n"]
)
def test_empty_bodies(text: str) -> None:
    assert format_text(text) == text


def test_every_comment_is_kept() -> None:
    """A comment after each token in turn: none is lost, the meaning stays, and a second pass changes nothing."""
    text = (
        "attention x(a: int, t: i32[b, k]) {\n let c = t[b, k]\n mask a < -c and not (k == 2)\n softmax sink(a)\n}\n"
        "schedule { tile q = 64, k = 32 }\n"
    )
    spec = parse(text).spec
    ends = [t.end_pos for t in language().lex(text) if t.type != "WS"]
    for end in ends:
        commented = f"{text[:end]} # note\n{text[end:]}"
        formatted = format_text(commented)
        assert formatted.count("# note") == 1
        assert parse(formatted).spec == spec
        assert format_text(formatted) == formatted


def test_wrong_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="E301"):
        format_text("attention x { mask k <= qq }")


def test_crlf() -> None:
    assert format_text("attention x {\r\n    mask k <= q  # c\r\n}\r\n") == "attention x {\n    mask k <= q  # c\n}\n"


def test_canonical_leaves_defaults_out() -> None:
    text = "attention x { align end softmax online mask k <= q }\nprecision { products ieee }\nlayout { kv dense }"
    assert canonical(parse(text).spec) == "attention x {\n    mask k <= q\n}\n"


def test_canonical_of_everything() -> None:
    text = """attention all(
    width: const int = 7,
    window: int = -1,
    cap: float = 2.5,
    gain: float grad,
    doc: i64[b, k] sorted,
    table: bf16[h_kv, buckets, 3] grad,
) {
    let d = q - k
    scale   cap / sqrt(192)
    mask    doc[b, q] == doc[b, k]
    mask    0 <= d < window
    score   s + table[h_kv, d // width, 2]
    score   cap * tanh(s / cap)
    softmax custom(weight = exp(s), divide = gain)
    weight  sigmoid(gain)
    dropout 0.1
    align   start
}
precision {
    inputs   f8e4m3
    products tf32
    scales   per_block(128)
    rotate   hadamard
}
layout {
    q  ragged
    kv paged(page = 16), int8(scales = token)
    v  shared(columns = 512)
}
schedule {
    algorithm split_kv
    loop      kv_outer
    tile      q = 128, k = 64
    stages    3
    warps     8
}
schedule sm_90 { tile k = 32 }
schedule gfx942 {}
"""
    spec = parse(text).spec
    assert canonical(spec) == text
    assert spec.schedule("sm_90").tile_k == 32 and spec.schedule("sm_90").tile_q == 128


@pytest.mark.parametrize("path", sorted(DATA.glob("*.attn")), ids=lambda p: p.stem)
def test_the_whole_grammar_agrees(path: Path) -> None:
    """The reader parses piece by piece; what it accepts is what `start` of grammar.lark describes."""
    parser = language().parse_interactive(start="start")
    for token in language().lex(path.read_text(encoding="utf-8")):
        if token.type not in ("WS", "COMMENT"):
            parser.feed_token(token)
    assert parser.feed_eof().data == "start"
