"""Launches of a generated file's kernels without what Triton looks up anew for each.

Triton binds, specialises and names every argument to find the kernel that it compiled, which takes longer than the
launch. Here that is done once for arguments that lead to the same kernel; a launch after it looks at those alone which
Triton would specialise by. Each kernel is changed through its own object: nothing of Triton is changed for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from operator import itemgetter
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ALIGNED = 16  # bytes of an address, and what a size is divided by: Triton's specialisations
KNOWN = 1024  # of one kernel's classes of arguments, so that odd sizes do not fill the memory
SWITCHES = [  # of Triton's, some in newer ones alone: what changes a kernel that is compiled already
    (place, name)
    for place, names in (
        (knobs.runtime, ("debug", "add_stages_inspection_hook")),
        (knobs.compilation, ("instrumentation_mode", "fpsan_homomorphic_casts")),
    )
    for name in names
    if hasattr(place, name)
]


class Launcher:
    """Stands where `run` of one JITFunction stands.

    Of its parameters, those with a type are numbers, and specialised or not; constants are passed by name.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self._kernel, self._run = kernel, kernel.run
        places = [(i, p) for i, p in enumerate(kernel.params) if not p.is_constexpr]
        self._sizes = _getter([i for i, p in places if p.annotation_type and not p.do_not_specialize])
        self._others = _getter([i for i, p in places if not p.annotation_type])
        self._constants = itemgetter(*names) if (names := [p.name for p in kernel.params if p.is_constexpr]) else None
        self._known: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def takes(backend: str) -> bool:
        """Whether Triton specialises pointers by their alignment alone there."""
        return backend == "cuda"

    def attach(self) -> None:
        self._kernel.run = self.run

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """As JITFunction.run: launches the kernel and returns it, or compiles it (`warmup`)."""
        if warmup or self._kernel.pre_run_hooks or any(starmap(getattr, SWITCHES)):
            return self._run(*args, grid=grid, warmup=warmup, **options)
        active: Any = driver.active
        device = active.get_current_device()
        key = (
            device, *options.values(), *[(x == 1, x % ALIGNED == 0) for x in self._sizes(args)],
            *[(x.dtype, x.data_ptr() % ALIGNED) if type(x) is Tensor else _class(x) for x in self._others(args)],
        )  # fmt: skip
        compiled = self._known.get(key)
        if compiled is None:
            compiled = self._run(*args, grid=grid, warmup=warmup, **options)
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = compiled
            return compiled
        stream = active.get_current_stream(device)
        constants = self._constants(options) if self._constants else ()
        whole = (*grid, 1, 1)
        compiled[whole](*args, *constants, stream=stream)
        return compiled


def _getter(places: Sequence[int]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """What stands at these places of a tuple; always a sequence."""
    if not places:
        return lambda args: ()
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def _class(x: Any) -> Any:
    """What Triton specialises by: of a size its range too, of a descriptor no layout, which stands in the file."""
    kind = type(x)
    if kind is int:
        return x == 1, x % ALIGNED == 0, -(2**31) <= x < 2**31, x < 2**63
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % ALIGNED
    return (kind, x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else kind
