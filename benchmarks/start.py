"""Seconds until the first result: importing attncc beside torch, a spec that nobody built, and one from the cache.

    python benchmarks/start.py [--specs causal,window] [--rounds 5] [--out DIR]

Each is measured in new processes, on the GPU where there is one (after it has been woken), else on the CPU: once with
empty caches, Triton's too, and then the median of several from them. What Python compiles of attncc's modules and
templates is there, as after an installation and a first use: one process before all others sees to that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PREPARING = "full"  # the spec of the process before all others
PROGRAM = """
import sys, time
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
(q + k).sum().item()
start, work = time.perf_counter(), time.process_time()
import attncc
imported, imported_work = time.perf_counter(), time.process_time()
with torch.no_grad():
    attncc.load(sys.argv[1])(q, k, v).sum().item()
print(imported - start, time.perf_counter() - start, imported_work - work, time.process_time() - work)
"""


def seconds(spec: Path, folder: Path) -> list[float]:
    """Of a new process: importing attncc, that and the first result; both once more in seconds of the processor."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {
        "ATTNCC_CACHE_DIR": str(folder / "attncc"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM, spec], env=env, check=True, capture_output=True, text=True)
    return [float(x) for x in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="causal,window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        seconds(ROOT / "specs" / f"{PREPARING}.attn", Path(made))
    for name in options.specs.split(","):
        with tempfile.TemporaryDirectory() as made:
            spec, folder = ROOT / "specs" / f"{name}.attn", Path(made)
            cold = seconds(spec, folder)
            warm = [
                statistics.median(x) for x in zip(*(seconds(spec, folder) for _ in range(options.rounds)), strict=True)
            ]
        names = ("import_s", "first_result_s", "import_cpu_s", "first_result_cpu_s")
        row = {"spec": name, "cold": dict(zip(names, cold, strict=True)), "cached": dict(zip(names, warm, strict=True))}
        rows.append({k: {n: round(s, 3) for n, s in x.items()} if isinstance(x, dict) else x for k, x in row.items()})
        print(rows[-1], flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"device": device, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "rows": rows}
    Path(options.out).mkdir(parents=True, exist_ok=True)
    (Path(options.out) / "start.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
