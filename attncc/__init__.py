"""attncc: short attention specs become fast, exact, readable kernels. See `attncc.load` and `attncc.compile`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    """`attncc.load` and `attncc.compile` import torch, which a warm build on the command line does without."""
    if name in ("compile", "load"):
        from attncc import api

        return getattr(api, name)
    raise AttributeError(f"module 'attncc' has no attribute {name!r}")
