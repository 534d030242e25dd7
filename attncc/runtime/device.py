"""Which target a torch device is."""

from __future__ import annotations

from functools import cache

import torch

from attncc import targets
from attncc.errors import EnvironmentFault
from attncc.runtime.machine import SAME_CODE

INTERPRETER = "interpreter"  # the Triton kernel on CPU tensors, through Triton's interpreter
INTERPRETED_AS = "sm_90"  # whose plans it runs


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
