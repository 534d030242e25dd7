"""A generated file as a Python module, made of the very bytes that were compared with the manifest."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import io
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import InspectLoader
from pathlib import Path
from types import ModuleType


class Held(InspectLoader):
    """Loads a source that is in memory already: the file may change or go, and no compiled copy is left beside it."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.text = str(path), source.decode("utf-8")

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(self.text, self.path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return False


@contextmanager
def lasting() -> Iterator[None]:
    """For what is made once and stays, as imports: a collection of garbage meanwhile would go through all of torch."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def load_module(path: Path, source: bytes, name: str) -> ModuleType:
    """Execute `source`, the content of the file at `path`, under a module name of its own.

    Triton reads the text of its kernels through the interpreter's cache of source lines, which gets the same text.
    """
    loader = Held(path, source)
    spec = importlib.machinery.ModuleSpec(name, loader, origin=loader.path)
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    lines = list(io.StringIO(loader.text))
    linecache.cache[loader.path] = (len(loader.text), None, lines, loader.path)  # None: never compared with the file
    sys.modules[name] = module  # Triton looks its kernels' globals up there
    with lasting():  # of triton, the first time
        loader.exec_module(module)
    return module
