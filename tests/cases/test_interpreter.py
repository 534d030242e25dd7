"""The same cases with the Triton kernel in Triton's interpreter, which has to be chosen before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.parametrize("files", [["cases"], ["gradients", "reads", "random_calls"]], ids="_".join)
def test_every_case_in_the_interpreter(files):
    paths = [f"tests/cases/test_{name}.py" for name in files]
    kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *paths, "-q", "-m", "not slow", "-p", "no:cacheprovider"],
        cwd=ROOT, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "[interpreter" not in done.stdout and " passed" in done.stdout
