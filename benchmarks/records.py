"""Records of runs in results/: rows that a run measured take the place of the same rows of earlier ones."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import turns

import attncc


def write(path: Path, rows: Sequence[dict[str, Any]], order: Sequence[str] = (), **told: Any) -> None:
    """`rows`, each with its day, and what an earlier record with the same device, versions and `told` has beside them.

    Every row has "part" and "row", which name it; they are kept in the `order` of the latter.
    """
    head = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, **told,
    }  # fmt: skip
    day = datetime.date.today().isoformat()
    found = {(row["part"], row["row"]): {**row, "date": day} for row in rows}
    with turns.RECORDS:
        _merge(path, head, day, found, order)


def rows(path: Path) -> list[dict[str, Any]]:
    """Those of a record, none where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def _merge(
    path: Path, head: dict[str, Any], day: str, found: dict[tuple[str, str], dict[str, Any]], order: Sequence[str]
) -> None:
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    if all(earlier.get(name) == value for name, value in head.items()):
        found = {(row["part"], row["row"]): row for row in earlier["rows"]} | found
    path.parent.mkdir(parents=True, exist_ok=True)
    places = {name: i for i, name in enumerate(order)}
    kept = sorted(found.values(), key=lambda row: places.get(row["row"], len(places)))
    text = json.dumps({**head, "date": day, "rows": kept}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
