"""A generated file as a Python module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: Path, name: str) -> ModuleType:
    """Execute the file under a module name of its own. Triton reads its source meanwhile, so it must be there."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks its kernels' globals up there
    spec.loader.exec_module(module)
    return module
