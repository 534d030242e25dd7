"""Kernels by the GPU's counters: a script run under Nsight Compute, and what that prints read again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

BYTES = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}  # metrics, and their names here
MARK = "spin_kernel"  # of torch.cuda._sleep, which stands before each case
GRACE = 12.0  # seconds for what was begun


def counted(
    script: str, wanted: list[int], seconds: float, metrics: Mapping[str, str] = BYTES, options: Sequence[str] = ()
) -> dict[int, list[dict[str, Any]]]:
    """Kernels of each case with the metrics by their names here, in the order in which they ran: `script` runs them
    with its `options` and `--count [[case, ...], time]`, begins none after that time, and what it has begun has time to
    end."""
    command = [
        "ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv", "--page",
        "raw", "--print-units", "base", "--metrics", ",".join(metrics), sys.executable, script, *options, "--count",
        json.dumps([wanted, time.time() + seconds]),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the script under ncu too
            out, err = process.communicate()
    found = read_counters(out, wanted, metrics)
    if len(found) < len(wanted):
        print(f"counted {len(found)} of {len(wanted)} cases; ncu ended with {process.returncode}", flush=True)
        print(out[-600:], err[-600:], sep="\n", flush=True)
    return found


def read_counters(text: str, wanted: list[int], metrics: Mapping[str, str] = BYTES) -> dict[int, list[dict[str, Any]]]:
    """Kernels by case from what ncu printed: a table of its own among the lines of the program, units in its first row,
    a kernel called MARK before each case."""
    found: dict[int, list[dict[str, Any]]] = {}
    at = -1
    for line in csv.DictReader(x for x in text.splitlines() if x.startswith('"')):
        if not line.get("ID"):
            continue
        if MARK in line["Kernel Name"]:
            at += 1
            continue
        values = {name: number(line[metric]) for metric, name in metrics.items()}
        found.setdefault(wanted[at], []).append({"kernel": line["Kernel Name"], **values})
    return found


def number(text: str) -> float:
    value = float(text.replace(",", ""))
    return int(value) if value.is_integer() else value
