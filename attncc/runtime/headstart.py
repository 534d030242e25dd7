"""What Triton does once in a process or a kernel beside compiling it, done while something else is.

It has a C compiler make what it asks the driver with, and in some versions what it launches each kernel with: a third
of a second each, outside Python, so that threads do it beside planning and compiling.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

from attncc.runtime.loader import lasting

# What a launcher is made for of a kernel that is not compiled yet: Triton's text of it depends on the arguments alone.
UNKNOWN = {
    "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
    "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False,
}  # fmt: skip


@cache
def begin() -> threading.Thread:
    """Once in a process: imports Triton, which all is waiting for, and has a thread go on; gives that."""
    with lasting(), suppress(Exception):  # what fails here fails again, and is told, where it is needed
        import triton.runtime  # noqa: F401
    thread = threading.Thread(target=_driver, name="attncc-headstart", daemon=True)
    thread.start()
    os.register_at_fork(before=wait)  # the copy would wait for what no thread there ends
    return thread


def wait() -> None:
    """Until it is done, where it was begun."""
    if begin.cache_info().currsize:
        begin().join()


def _driver() -> None:
    with suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_target()


def launcher(src: Any) -> Callable[[], None]:
    """Begins to make what launches the kernel of this source, which is being compiled; gives what waits for it.

    Triton keeps it by its text, and finds it there when the kernel is loaded.
    """
    thread = threading.Thread(target=_launcher, args=(src,), name="attncc-launcher", daemon=True)
    thread.start()
    return thread.join


def _launcher(src: Any) -> None:
    with suppress(Exception):
        from triton.runtime import driver

        described = sum(str(type_).startswith("tensordesc") for type_ in src.signature.values())
        driver.active.launcher_cls(src, SimpleNamespace(**UNKNOWN, tensordesc_meta=[{}] * described))
