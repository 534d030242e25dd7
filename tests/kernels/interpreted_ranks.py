"""Run by test_ranks.py with TRITON_INTERPRET=1: the kernels that rank tiles of rows, on given flags.

Reads {text, side, flags} from standard input, prints the sizes of a tile and, for each list of flags, the tiles of rows
in their order and how many tiles of keys each sees.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from attncc import pipeline
from attncc.runtime.loader import load_module


def main() -> None:
    given = json.load(sys.stdin)
    flags, side = torch.tensor(given["flags"]), given["side"]
    planned = pipeline.plan(pipeline.Request(text=given["text"], target="sm_90"))
    plan, (slabs, length) = planned.choice.plan, flags.shape
    assert plan.algorithm == "fa3" and plan.tables == ("Tables", "Ranked")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.py"
        path.write_text(pipeline.render(planned), encoding="utf-8")
        module = load_module(path, path.read_bytes(), "ranks")
    q_tiles, k_tiles = -(-length // plan.tile_q), -(-length // plan.tile_k)
    tables, ranked = (torch.empty(slabs * 2 * n, dtype=torch.int32) for n in (k_tiles, q_tiles))
    heads = (slabs, 3) if planned.spec.param("is_global").axes[0] == "b" else (2, slabs)
    kernels = {"tables": k_tiles, "scans": q_tiles, "ranks": q_tiles}
    for name, count in kernels.items():
        getattr(module, f"{planned.spec.name}_forward_{name}")[(slabs * count,)](
            flags, tables, ranked, *flags.stride(), length, length, *heads, 1, q_tiles, k_tiles, side,
            TILE_Q=plan.tile_q, TILE_K=plan.tile_k,
        )  # fmt: skip
    print(json.dumps([plan.tile_q, plan.tile_k, ranked.view(slabs, 2, q_tiles).tolist()]))


if __name__ == "__main__":
    main()
