"""Seconds until the first result: importing attncc beside torch, a spec that nobody built, and one from the cache.

    python benchmarks/start.py [--specs causal,window] [--head-dims 128,64] [--algorithms planned,fa2] [--rounds 5]
        [--out DIR]

Each is measured in new processes, on the GPU where there is one (after it has been woken), else on the CPU: once with
empty caches, Triton's too, and then the median of several from them; the first also says what took how long, from when
on. What Python compiles of attncc's modules and templates is there, as after an installation and a first use: one
process before all others sees to that.
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
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PREPARING = "full"  # the spec of the process before all others
PLANNED = "planned"
NAMES = ("import_s", "first_result_s", "import_cpu_s", "first_result_cpu_s")
PROGRAM = """
import functools, json, sys, time
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 4, 256, int(sys.argv[2]), device=device, dtype=torch.bfloat16) for _ in range(3))
(q + k).sum().item()
spans = []

def timed(place, *names):
    for name in names:
        whole, kind = getattr(place, name), type(vars(place).get(name))
        def run(*args, name=name, whole=whole, **more):
            begun = time.perf_counter()
            try:
                return whole(*args, **more)
            finally:
                spans.append((name, round(begun - start, 3), round(time.perf_counter() - begun, 3)))
        setattr(place, name, kind(run) if kind is staticmethod else run)

def listed(driver):
    spans.append(("triton is imported", round(time.perf_counter() - start, 3), 0.0))
    from triton.compiler import compiler
    from triton.backends.nvidia.compiler import CUDABackend
    timed(compiler.ASTSource, "make_ir")
    timed(CUDABackend, "make_ttir", "make_ttgir", "gluon_to_ttgir", "make_llir", "make_ptx", "make_cubin")
    timed(compiler.CompiledKernel, "_init_handles")
    driver()

start, work = time.perf_counter(), time.process_time()
import attncc
imported, imported_work = time.perf_counter(), time.process_time()
attncc.load
if torch.version.cuda:
    from attncc import frontend, pipeline
    from attncc.runtime import headstart, kernels
    timed(frontend, "parse")
    timed(pipeline, "plan_parsed", "render")
    timed(kernels, "load_module")
    timed(headstart, "_driver", "wait")
    headstart._driver = functools.partial(listed, headstart._driver)
with torch.no_grad():
    attncc.load(sys.argv[1])(q, k, v).sum().item()
seconds = imported - start, time.perf_counter() - start, imported_work - work, time.process_time() - work
print(json.dumps({"seconds": seconds, "stages": spans}))
"""


def measured(spec: Path, head_dim: int, folder: Path) -> dict[str, Any]:
    """Of a new process: importing attncc, that and the first result; both once more in seconds of the processor; and
    each stage's name, begin and seconds."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | {
        "ATTNCC_CACHE_DIR": str(folder / "attncc"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, spec, str(head_dim)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def row(name: str, head_dim: int, algorithm: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        spec, text = folder / f"{name}.attn", (ROOT / "specs" / f"{name}.attn").read_text(encoding="utf-8")
        pinned = f"schedule {{ algorithm {algorithm} }}\n" if algorithm != PLANNED else ""
        spec.write_text(text + pinned, encoding="utf-8")
        cold = measured(spec, head_dim, folder)
        warm = [measured(spec, head_dim, folder)["seconds"] for _ in range(rounds)]
    listed = lambda seconds: {n: round(s, 3) for n, s in zip(NAMES, seconds, strict=True)}
    return {
        "spec": name, "head_dim": head_dim, "algorithm": algorithm, "cold": listed(cold["seconds"]),
        "cached": listed(map(statistics.median, zip(*warm, strict=True))), "stages": cold["stages"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="causal,window")
    parser.add_argument("--head-dims", default="128,64")
    parser.add_argument("--algorithms", default=PLANNED, help="pinned in each spec, such as fa2; planned: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        measured(ROOT / "specs" / f"{PREPARING}.attn", 64, Path(made))
    chosen = (options.specs.split(","), options.algorithms.split(","), map(int, options.head_dims.split(",")))
    for name, algorithm, head_dim in product(*chosen):
        rows.append(row(name, head_dim, algorithm, options.rounds))
        print({n: x for n, x in rows[-1].items() if n != "stages"}, flush=True)
        for stage, begin, seconds in sorted(rows[-1]["stages"], key=lambda s: s[1]):
            print(f"    {begin:7.3f} s  {seconds:6.3f} s  {stage}", flush=True)
        record(Path(options.out) / "start.json", rows)


def record(path: Path, rows: list[dict[str, Any]]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    content = {
        "device": device, "torch": torch.__version__, "triton": version("triton"),
        "date": datetime.date.today().isoformat(), "rows": rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
