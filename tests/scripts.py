"""Scripts beside tests that run in Triton's interpreter, which has to be turned on before triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreted(script: Path, *arguments: str, given: str = "") -> list[Any]:
    """What the script prints as lines of JSON, from `arguments` and what it reads, `given`."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, input=given, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
