"""Gradients of the generated kernels in Triton's interpreter against dense autograd in float64.

The interpreter has to be chosen before triton is imported: the tests start such a process, which runs these again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.backward import cases
    from tests.backward.interpreted import faults

    @pytest.mark.parametrize("case", cases.QUICK, ids=lambda c: c.name)
    def test_gradients(case):
        assert faults(case) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases.MORE, ids=lambda c: c.name)
    def test_more_gradients(case):
        assert faults(case) == []

else:

    def run(marks: str) -> None:
        kept = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "tests/backward/test_gradients.py", "-q", "-m", marks]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"], cwd=ROOT, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True,
            text=True, check=False, timeout=580,
        )  # fmt: skip
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]

    def test_gradients_in_the_interpreter():
        run("not slow")

    @pytest.mark.slow
    def test_more_gradients_in_the_interpreter():
        run("slow")
