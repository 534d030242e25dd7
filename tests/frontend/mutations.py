"""Right specs made wrong at random: bytes, tokens and lines changed, by a seeded generator."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

SEEDS = sorted((Path(__file__).parent.parent / "data" / "variants").glob("*.attn"))
_TOKEN = re.compile(r"\w+|\s+|[<>=!]=|//|.", re.DOTALL)
_PLAIN = """
let mask score scale weight dropout align softmax attention precision schedule layout const sorted grad not
and or true false b h h_kv k q row s b_len h_len q_len k_len int float bool bit i32 f32 bf16 window online
sink none custom relu entmax min max abs floor where exp ( ) [ ] { } , : = == != < <= > >= + - * / // % && ||
** ! ^ . ; 0 1 -1 0.5 1e999 1_000 .5 1. " ' # lambda _x é ≤ − 99999999999999999999 paged page ragged tile q=1
sm_90 algorithm fa2 warps
"""
_WORDS = (*_PLAIN.split(), "\x00", "\ufeff", "\r", "\u2028", "\n", "\t")


def _bytes(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    sign = chr(rng.choice((rng.randrange(128), rng.randrange(128), rng.randrange(0x3000))))
    return rng.choice((text[:at] + sign + text[at:], text[:at] + text[at + 1 :], text[:at] + sign + text[at + 1 :]))


def _tokens(text: str, rng: random.Random) -> str:
    tokens = _TOKEN.findall(text)
    i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    kind = rng.randrange(6)
    if kind == 0:
        del tokens[i]
    elif kind == 1:
        tokens.insert(i, " " + rng.choice(_WORDS) + " ")
    elif kind == 2:
        tokens[i] = rng.choice(_WORDS)
    elif kind == 3:
        tokens[i], tokens[j] = tokens[j], tokens[i]
    elif kind == 4:
        tokens[i:i] = tokens[min(i, j) : min(i, j) + rng.randrange(1, 12)]
    else:
        tokens[i:i] = [rng.choice(("(", "-", "not ", "abs(", "[", "s + ", "{"))] * rng.choice((2, 40, 400))
    return "".join(tokens)


def _lines(text: str, rng: random.Random, other: str) -> str:
    lines, others = text.splitlines(keepends=True), other.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        del lines[i]
    elif kind == 1:
        lines.insert(i, lines[rng.randrange(len(lines))])
    elif kind == 2:
        lines.insert(i, rng.choice(others))
    elif kind == 3:
        rng.shuffle(lines)
    else:
        lines = lines[: i + 1] + others[rng.randrange(len(others)) :]
    return "".join(lines)


def mutated(count: int, seed: int) -> Iterator[str]:
    """`count` texts, each one to four changes away from a right spec."""
    rng = random.Random(seed)
    texts = [p.read_text(encoding="utf-8") for p in SEEDS]
    for _ in range(count):
        text = rng.choice(texts)
        for _ in range(rng.choice((1, 1, 2, 4))):
            if not text.strip():
                break
            change = rng.randrange(3)
            if change == 0:
                text = _bytes(text, rng)
            else:
                text = _tokens(text, rng) if change == 1 else _lines(text, rng, rng.choice(texts))
        yield text
