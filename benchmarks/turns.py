"""Benchmarks that run side by side compile together, and have the GPU one by one while they check and time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from filelock import FileLock

# PyTorch needs filelock itself. Reentrant within a process.
GPU = FileLock(Path(tempfile.gettempdir()) / "attncc_benchmark_gpu.lock")
RECORDS = FileLock(Path(tempfile.gettempdir()) / "attncc_benchmark_records.lock")
