"""What Triton does once in a process before it compiles anything, done while a spec is read, planned and written.

It is imported, reads its own files for a key, and has a C compiler make what it asks the driver with: a second in all,
most of it outside Python, so that threads do it beside the planning.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache

from attncc.runtime.loader import lasting


@cache
def begin() -> threading.Thread:
    """Once in a process; the thread that does it."""
    thread = threading.Thread(target=_prepare, name="attncc-headstart", daemon=True)
    thread.start()
    os.register_at_fork(before=wait)  # the copy would wait for an import that no thread there ends
    return thread


def wait() -> None:
    """Until it is done, where it was begun."""
    if begin.cache_info().currsize:
        begin().join()


def _prepare() -> None:
    """What fails here fails again, and is told, where it is needed."""
    with suppress(Exception):
        with lasting():
            from triton.runtime.cache import triton_key
        driver = threading.Thread(target=_driver, name="attncc-headstart-driver", daemon=True)
        driver.start()
        triton_key()
        driver.join()


def _driver() -> None:
    from triton.runtime import driver

    with suppress(Exception):
        driver.active.get_current_target()
