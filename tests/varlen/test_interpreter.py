"""The packed cases with the Triton kernels in Triton's interpreter, which is chosen before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.parametrize("file", ["test_cases.py", "test_gradients.py"])
def test_every_case_in_the_interpreter(file):
    kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", f"tests/varlen/{file}", "-q", "-m", "not slow"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
