"""Specs that were read, kept: a process that only calls what is in the cache builds no parser."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attncc import frontend
from attncc.errors import EnvironmentFault
from attncc.runtime import headstart
from attncc.runtime.cache import Cache
from attncc.runtime.keys import SpecKey, Toolchain, toolchain
from attncc.runtime.loader import lasting

if TYPE_CHECKING:
    from attncc.frontend import Parsed

FILE = "spec.pickle"  # of our own data; the cache runs kernels from its folder, which nobody else can write to
READER = "attncc.frontend.meaning"  # once it is there, reading a text takes no longer than finding it


@dataclass(frozen=True)
class Reading:
    """A text's meaning; the cache and the toolchain, where it was looked for; whether it is not known to be kept."""

    parsed: Parsed
    cache: Cache | None = None
    tools: Toolchain | None = None
    fresh: bool = True


def read(text: str, filename: str) -> Reading:
    """By the cache in a process that has not read any text yet, else as frontend.parse. SpecError as that raises."""
    if READER in sys.modules:
        return Reading(frontend.parse(text, filename))
    try:
        cache = Cache()
    except EnvironmentFault:  # said where a call needs it
        return Reading(frontend.parse(text, filename))
    tools = toolchain()
    known = _find(cache, tools, text)
    if known is not None:
        return Reading(replace(known, filename=filename), cache, tools, fresh=False)
    if torch.cuda.is_initialized():  # what is new will be compiled, and most likely for the GPU that is in use
        headstart.begin()
    with lasting():  # the parser, and the imports that make it
        return Reading(frontend.parse(text, filename), cache, tools)


def keep(cache: Cache, tools: Toolchain, parsed: Parsed) -> None:
    """For the next process."""
    cache.get_or_build(SpecKey(parsed.text, tools), partial(_write, replace(parsed, filename="<spec>")))


def _find(cache: Cache, tools: Toolchain, text: str) -> Parsed | None:
    entry = cache.get(SpecKey(text, tools))
    try:
        return pickle.loads(entry.files[FILE]) if entry is not None else None
    except Exception:  # whatever does not come back is read anew
        return None


def _write(parsed: Parsed, folder: Path) -> None:
    (folder / FILE).write_bytes(pickle.dumps(parsed))
