"""attncc: short attention specs become fast, exact, readable kernels.

    attn = attncc.load("specs/causal.attn")  # or attncc.compile(text)
    out, lse = attn(q, k, v, return_lse=True)

q is [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v], of one dtype: bfloat16, float16 or float32, and float64 on
the CPU; out is [B, H, Q, D_v] in that dtype, lse [B, H, Q] in float32, the natural logarithm.
attncc.api.Attention.__call__ says more.
"""

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


def __dir__() -> list[str]:
    """What pydoc and completion show: `load` and `compile` too, which are not there before they are asked for."""
    return sorted({*globals(), *__all__})
