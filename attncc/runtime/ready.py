"""What the shapes, strides, types and devices of a call lead to, kept for the next call that has the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Launch = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
Tangent = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """What calls of one place and bucket of shapes share: kernels."""

    launches: dict[tuple[bool, bool], Launch]  # by: 32-bit integers do, TMA can address K and V
    build: Callable[[bool, bool], Launch]  # one that is missing
    whole: bool  # TMA loads q too, not k and v alone
    backward: Callable[..., Backward]  # found or built when asked for, by: 32-bit integers do, deterministic
    tangent: Callable[[bool], Tangent]  # likewise, by the first


@dataclass(frozen=True)
class Ready:
    """What a signature (shapes, strides, dtypes, devices) leads to."""

    kind: Kind
    launches: dict[tuple[bool, bool], Launch]  # the kind's: a call looks here first
    aligned: bool  # strides that TMA takes
    longest: int  # of all extents that an index can reach
    reach: int  # q_len + k_len: an int parameter that is clamped changes nothing beyond
    usual: Mapping[str, int | float] | None  # the numbers by their names in the file, where the call gives none of them
    narrow: bool  # 32-bit integers are exact, where no int parameter that is given has a say in it
    device: int | None  # index of the GPU, where there are several
    lengths: tuple[tuple[str, int], ...]  # by their names in a spec, where it makes ints of what a call settles
