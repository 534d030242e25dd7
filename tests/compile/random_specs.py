"""Random specs that read tensors of every element at every kind of index, as text."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

NUMBERS = ("i8", "u8", "i16", "i32", "i64", "f16", "bf16", "f32")
INDICES = ("i8", "i16", "i32", "i64")
MASKS = ("", "", "k <= q", "k <= q", "0 <= q - k < window", "k < window", "k % 3 != 1")
SCORES = ("s + {}", "s + 0.1 * {}", "s * {}", "10.0 * tanh(s / 10.0) + {}", "where({} > 0, s, s - 1.0)")
PLACES = ("pair", "pair", "positions", "distance", "key", "row", "position", "head", "at", "at", "at_key", "at_both")


class _Writer:
    """One spec: its parameters as they come to be read."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.params = ["window: int = 100"]

    def tensor(self, kind: str) -> str:
        name = f"t{len(self.params)}"
        self.params.append(f"{name}: {kind}")
        return name

    def read(self, element: str, place: str) -> str:
        axes, indices = {
            "pair": ("h, row, k", "h, row, k"), "positions": ("n1, n2", "q, k"), "distance": ("h, n", "h, q - k"),
            "key": ("b, k", "b, k"), "row": ("b, row", "b, row"), "position": ("b, k", "b, q"), "head": ("h", "h"),
            "at": ("m, h", "{}[q - k], h"), "at_key": ("m, h", "{}[b, k], h"),
            "at_both": ("m, o", "{0}[b, q], {0}[b, k]"), "back": ("m, h", "{}[k - q], h"),
        }[place]  # fmt: skip
        if "{" in indices:
            inner = self.tensor(f"{self.random.choice(INDICES)}[{'n' if place in ('at', 'back') else 'b, k'}]")
            indices = indices.format(inner)
        return f"{self.tensor(f'{element}[{axes}]')}[{indices}]"


def random_spec(random: Random) -> str:
    """The text of a spec with up to two reads in masks and scores each, most with one in all."""
    writer, pick = _Writer(random), random.choice
    in_mask, few = random.random() < 0.3, random.random() < 0.7
    masks = [pick(MASKS)]
    for _ in range(int(in_mask) if few else pick((0, 1))):
        element = pick(("bool", "bool", "bit", "i8", "i32"))
        read = writer.read(element, pick(PLACES))
        masks.append(read if element in ("bool", "bit") else f"{read} > 0")
    scores = [
        pick(SCORES).format(writer.read(pick(NUMBERS), pick(PLACES)))
        for _ in range(int(not in_mask) if few else pick((0, 1, 2)))
    ]
    body = [f"mask {m}" for m in masks if m] + [f"score {s}" for s in scores]
    body.append(pick(("", "", "softmax off_by_one", "softmax sink(0.5)")))
    return f"attention drawn({', '.join(writer.params)}) {{ {' '.join(body)} }}"


def random_calls(seed: int) -> Iterator[tuple[str, str, int, int, int, str]]:
    """(text, dtype, head size, head size of v, rows, target), without end."""
    random = Random(seed)
    while True:
        d = random.choice((16, 31, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256))
        dv = d if random.random() < 0.7 else random.choice((16, 32, 64, 96, 128, 256))
        dtype, rows = random.choice(("bf16", "bf16", "f16", "f32")), random.choice((1, 17, 4096))
        yield random_spec(random), dtype, d, dv, rows, random.choice(("sm_80", "sm_90", "sm_90", "sm_100", "gfx942"))
