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
WIDE = 2**31  # from here on a size takes 64 bits
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
    """Stands where `run` of one JITFunction of a generated file stands.

    The file is for tensors of certain types, and says how each tile is described: of what it launches with, only the
    alignment of addresses and the kinds of sizes differ.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self._kernel, self._run = kernel, kernel.run
        fixed = {
            i for i, p in enumerate(kernel.params) if p.is_constexpr or (p.annotation_type and p.do_not_specialize)
        }
        self._places = [i for i in range(len(kernel.params)) if i not in fixed]  # what Triton specialises by
        self._constants = _getter([p.name for p in kernel.params if p.is_constexpr])
        self._tensors = self._sizes = _getter([])  # until a launch shows which they are
        self._known: dict[tuple[Any, ...], Any] = {}
        self._again: dict[tuple[Any, ...], Any] = {}  # the same by the very sizes, which are compared faster

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
        call = (device, *options.values(), *[x.data_ptr() % ALIGNED for x in self._tensors(args)], *self._sizes(args))
        compiled = self._again.get(call)
        if compiled is None:
            compiled = self._known.get(self._class(device, args, options))
            if compiled is None:
                return self._find(args, grid, options)
            if len(self._again) >= KNOWN:
                self._again.clear()
            self._again[call] = compiled
        constants = self._constants(options)
        stream = active.get_current_stream(device)
        compiled.run(
            *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata,
            compiled.launch_metadata(grid, stream, *args, *constants), knobs.runtime.launch_enter_hook,
            knobs.runtime.launch_exit_hook, *args, *constants,
        )  # fmt: skip
        return compiled

    def _find(self, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> Any:
        """By Triton's own way, and kept for the next that are alike."""
        self._tensors = _getter([i for i in self._places if isinstance(args[i], Tensor)])
        self._sizes = _getter([i for i in self._places if isinstance(args[i], int)])
        compiled = self._run(*args, grid=grid, warmup=False, **options)
        if len(self._known) >= KNOWN:
            self._known.clear()
        if compiled is not None:  # a hook of Triton's may keep it from compiling
            active: Any = driver.active
            self._known[self._class(active.get_current_device(), args, options)] = compiled
        return compiled

    def _class(self, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments of the same class are the same to Triton."""
        return (
            device, *options.values(), *[x.data_ptr() % ALIGNED for x in self._tensors(args)],
            *[(x == 1, x % ALIGNED == 0, -WIDE <= x < WIDE) for x in self._sizes(args)],
        )  # fmt: skip


def _getter(places: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What a tuple or dict has at these places; always a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda whole: [whole[place] for place in places]
