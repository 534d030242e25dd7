"""What was found to be fastest, kept by device, spec, bucket of shapes and pass, and found again by a call.

First what this user measured on this very device and driver, then the table that comes with attncc, which holds for any
driver of the device that it was measured on. A winner is the choices of a plan (planner.choices_of); whether they are
legal today the planner judges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from attncc import planner
from attncc.ir import Shape
from attncc.runtime import keys
from attncc.runtime.cache import Cache, Entry
from attncc.runtime.device import target_of
from attncc.runtime.machine import driver_version

FILE = "winner.json"
TABLES = Path(__file__).resolve().parent.parent / "tuned"
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Device:
    """What a measurement is of."""

    name: str  # NVIDIA H200
    capability: str  # a target: sm_90
    driver: str


@cache
def device_of(device: torch.device) -> Device | None:
    """None for the CPU, which nothing is measured on. Asked of the driver once: a call of a new length asks again."""
    if device.type != "cuda":
        return None
    return Device(torch.cuda.get_device_name(device), target_of(device), driver_version())


def key(text: str, device: Device, shape: Shape, direction: str) -> keys.WinnerKey:
    """Where a winner for `shape` holds; `text` is the canonical spec with its constants."""
    s = planner.bucket_of(shape)
    return keys.WinnerKey(
        spec=text, device=device.name, capability=device.capability, driver=device.driver, q_len=s.q_len,
        head_dim=s.head_dim, head_dim_v=s.head_dim_v, dtype=s.dtype, direction=direction,
    )  # fmt: skip


def keep(cache: Cache, where: keys.WinnerKey, choices: Mapping[str, Any], measured: Mapping[str, Any]) -> Entry:
    """Write a winner down, beside its measurements, instead of an earlier one."""
    return cache.replace(where, partial(_write, {"choices": dict(choices), "measured": dict(measured)}))


def _write(content: Mapping[str, Any], folder: Path) -> None:
    (folder / FILE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def find(cache: Cache, text: str, device: Device | None, shape: Shape) -> dict[str, dict[str, Any]]:
    """The choices that hold for a call, by pass; none where nothing was measured."""
    found: dict[str, dict[str, Any]] = {}
    for direction in PASSES if device is not None else ():
        assert device is not None
        where = key(text, device, shape, direction)
        kept = cache.get(where)
        choices = json.loads(kept.text(FILE))["choices"] if kept else shipped(device).get(row_of(where))
        if choices is not None:
            found[direction] = choices
    return found


def row_of(where: keys.WinnerKey) -> str:
    """A winner's name in a shipped table, which holds for any driver."""
    spec = sha256(where.spec.encode()).hexdigest()[:16]
    return f"{spec} {where.direction} q{where.q_len} d{where.head_dim}/{where.head_dim_v} {where.dtype}"


def shipped(device: Device) -> Mapping[str, dict[str, Any]]:
    """The table that comes with attncc for a device: choices by `row_of`."""
    return _table(device.name, device.capability)


@lru_cache(16)
def _table(name: str, capability: str) -> dict[str, dict[str, Any]]:
    path = TABLES / f"{name.replace(' ', '_')}.json"
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content["device"], content["capability"]) != (name, capability):
        return {}
    return {row["key"]: row["choices"] for row in content["winners"]}
