"""What Triton does once in a process before it compiles anything, done while a kernel is planned and written.

It is imported, reads its own files for a key, and has a C compiler make what it asks the driver with: half a second and
more, most of it outside Python, so that another thread does it beside the planning.
"""

from __future__ import annotations

import threading
from functools import cache

from attncc.runtime.loader import lasting


@cache
def begin() -> threading.Thread:
    """Once in a process; the thread that does it."""
    thread = threading.Thread(target=_prepare, name="attncc-headstart", daemon=True)
    thread.start()
    return thread


def wait() -> None:
    """Until it is done, where it was begun: nobody forks a process that has half of it."""
    if begin.cache_info().currsize:
        begin().join()


def _prepare() -> None:
    """What fails here fails again, and is told, where it is needed."""
    try:
        with lasting():
            from triton.runtime import driver
            from triton.runtime.cache import triton_key
        driver.active.get_current_target()
        triton_key()
    except Exception:
        return
