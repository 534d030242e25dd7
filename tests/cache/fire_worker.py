"""One of several processes that want the same entries, and that may die at any touch of the cache's folder.

    python fire_worker.py ROOT LOG SEED DIE_AT

Dies as by kill -9 at its DIE_AT-th file operation below ROOT; 0 for never.
"""

from __future__ import annotations

import os
import random
import signal
import sys

from attncc.runtime.cache import Cache
from tests.cache.cache_samples import other

KEYS = 8


def key(i: int):
    return other(spec=f"attention number_{i} {{ }}")


def content(i: int) -> str:
    return f"kernel = {i}\n" * 50


def say(log: str, text: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def die_at(root: str, count: int) -> None:
    left = count

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or (event.startswith("os.") and event != "os.kill"):
            left -= any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(root) for a in args)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    root, log, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    order = random.Random(seed).sample(range(KEYS), KEYS)
    if count:
        die_at(root, count)
    cache = Cache(root, note=lambda text: None)
    for i in order:

        def builder(folder, i=i):
            say(log, f"began {i}")
            text = content(i)
            (folder / "kernel.py").write_text(text[: len(text) // 2])
            (folder / "kernel.py").write_text(text)
            (folder / "resources.json").write_text("{}\n")

        entry = cache.get_or_build(key(i), builder)
        if entry.text("kernel.py") != content(i):
            say(log, f"broken {i}")
        if entry.fresh:
            say(log, f"built {i}")


if __name__ == "__main__":
    main()
