"""Which target a torch device is."""

from __future__ import annotations

from functools import cache

import torch

from attncc import targets
from attncc.errors import EnvironmentFault
from attncc.runtime.machine import SAME_CODE

INTERPRETER = "interpreter"  # the Triton kernel on CPU tensors, through Triton's interpreter
INTERPRETED_AS = "sm_90"  # whose plans it runs


INTERPRETED = (torch.float16, torch.float32)  # of bfloat16 the interpreter multiplies the bit patterns


def target_for(asked: str | None, q: torch.Tensor) -> str:
    """The target of a call: `asked`, else that of q's device.

    TypeError or ValueError for a q that the interpreter does not compute rightly, EnvironmentFault where Triton does
    not interpret, and for a device as in `target_of`.
    """
    if asked != INTERPRETER:
        return asked or target_of(q.device)
    if q.dtype not in INTERPRETED:
        raise TypeError(f"q must be float16 or float32 in Triton's interpreter, and is {q.dtype}")
    if q.device.type != "cpu":
        raise ValueError(f"q must be on the CPU for Triton's interpreter, and is on {q.device}")
    import triton

    if not triton.knobs.runtime.interpret:
        raise EnvironmentFault("Triton does not interpret: set TRITON_INTERPRET=1 before triton is imported")
    return asked


@cache
def target_of(device: torch.device) -> str:
    """The name in targets.TARGETS. Raises EnvironmentFault for hardware that attncc does not know."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise EnvironmentFault(f"tensors on {device} are not supported: cpu and cuda (CUDA or ROCm) are")
    properties = torch.cuda.get_device_properties(device)
    name = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    name = SAME_CODE.get(name, name)
    if name not in targets.TARGETS:
        raise EnvironmentFault(
            f"{properties.name} is {name}, which attncc has no description of: it knows {', '.join(targets.TARGETS)}"
        )
    return name
