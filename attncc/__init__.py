"""attncc: short attention specs become fast, exact, readable kernels.

    attn = attncc.load("specs/causal.attn")  # or attncc.compile(text)
    out, lse = attn(q, k, v, return_lse=True)
    out, lse = attncc.merge([out_1, out_2], [lse_1, lse_2])  # of disjoint sets of keys

q is [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v], of one dtype: bfloat16, float16 or float32, and float64 on
the CPU; out is [B, H, Q, D_v] in that dtype, lse [B, H, Q] in float32, the natural logarithm.
attncc.api.Attention.__call__ says more. A wrong spec raises attncc.SpecError, which carries every diagnostic; all
that attncc raises of its own is an attncc.AttnError (attncc.NotBuilt where a call asks for what is not built yet), and
wrong arguments are a TypeError or a ValueError.

A program that torch.export saved finds the operator where attncc was imported after torch, or `attncc.ops` at any time.
"""

from __future__ import annotations

import sys
from typing import Any

from attncc.errors import AttnError, EnvironmentFault, NotBuilt, PlanError, SpecError

__version__ = "0.1.0"
__all__ = [
    "AttnError",
    "EnvironmentFault",
    "NotBuilt",
    "PlanError",
    "SpecError",
    "__version__",
    "compile",
    "load",
    "merge",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """What imports torch, which a warm build on the command line does without, is imported when it is asked for."""
    if name in ("compile", "load", "merge", "quantize"):
        from attncc.runtime.loader import lasting

        with lasting():
            from attncc import api
        return getattr(api, name)
    raise AttributeError(f"module 'attncc' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What pydoc and completion show: what is imported when it is asked for, too."""
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # a program that was exported looks for the operator, and calls nothing else of this
    from attncc import ops as ops
