"""Run by test_same_entry.py with TRITON_INTERPRET=1: texts from standard input, a line of JSON for each call of one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from attncc import frontend
from attncc.ir import Schedule, Shape
from attncc.runtime import check

SHAPES = [
    Shape(1, 4, 2, 97, 97, 16, 16, "f32"),
    Shape(2, 2, 1, 33, 120, 16, 16, "f32"),
    Shape(1, 1, 1, 90, 40, 16, 16, "f32"),
]


def main() -> None:
    own = Schedule(None, algorithm="fa2", tile_q=16, tile_k=16)
    for text in json.load(sys.stdin):
        spec = replace(frontend.parse(text).spec, schedules=(own,))
        run = check.compiled(spec, "interpreter")
        for seed, shape in enumerate(SHAPES):
            row = check.call(spec, run, "interpreter", shape, "f32", "contiguous", seed, {}, gradients=False)
            print(json.dumps({"text": text, "shape": str(shape), "faults": row.faults}), flush=True)


if __name__ == "__main__":
    main()
