"""Plans compiled in processes of their own, several at a time; what they make a launch finds in the cache.

Each process reads jobs, a line of JSON each, and answers each with a line. It is started by its own command line rather
than forked or spawned from the caller's, so that a script needs no guard around it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from attncc import pipeline
from attncc.ir import Shape
from attncc.runtime import headstart
from attncc.runtime.cache import Cache

MOST = 16


@dataclass(frozen=True)
class Job:
    """One plan of one spec: what pipeline.plan_parsed takes, and which pass of it."""

    text: str
    consts: Mapping[str, int]
    shape: Shape
    target: str
    int_bits: int
    tuned: pipeline.Tuned
    direction: str
    root: str  # of the cache


def compile_job(job: Job) -> None:
    """Render and compile the kernels of a job for calls that are aligned. Raises what planning and Triton raise."""
    from attncc import analysis, frontend
    from attncc.runtime.binaries import Binaries
    from attncc.runtime.compile import compiled
    from attncc.runtime.compile_backward import compiled_backward

    parsed = frontend.parse(job.text)
    planned = pipeline.plan_parsed(parsed, job.consts, {}, job.shape, job.target, job.int_bits, job.tuned)
    backward = job.direction == pipeline.BACKWARD
    planned = pipeline.backward(planned) if backward else planned
    cache = Cache(job.root)
    entry = pipeline.kernel(planned, cache, resources=False)
    name = next(n for n in entry.files if n.endswith(".py"))
    # the launcher too, where there is a GPU: whoever launches would wait for a C compiler
    compile = partial(Binaries(cache, sha256(entry.files[name]).hexdigest()).compile, beside=headstart.launcher)
    if backward:
        spec, plan = planned.spec, planned.choice.plan
        by_rows, by_keys = (analysis.kernel_visits(spec, outer) for outer in ("q", "k"))
        for _ in compiled_backward(entry.path / name, spec, by_rows, by_keys, plan, True, compile):
            pass
    else:
        compiled(entry.path / name, planned.spec, planned.choice.plan, True, compile)


class Workers:
    """Processes that compile jobs; close() ends them and drops what they have not begun."""

    def __init__(self, count: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[str]] = []
        self._jobs: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(count or min(MOST, cores), thread_name_prefix="attncc-compile")

    def submit(self, job: Job) -> Future[None]:
        """Its result is None; it raises RuntimeError with what the process said. A job is done once if it succeeds."""
        line = json.dumps(asdict(job), sort_keys=True)
        known = self._jobs.get(line)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = self._jobs[line] = self._threads.submit(self._run, line)
        return known

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._started:
            process.kill()
        for process in self._started:
            process.communicate()

    def _run(self, line: str) -> None:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            raise RuntimeError(f"the compiling process ended with status {process.poll()}") from None
        self._idle.put(process)
        if answer["error"]:
            raise RuntimeError(answer["error"])

    def _start(self) -> subprocess.Popen[str]:
        here = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "attncc.runtime.precompile"], env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,  # Ctrl-C is the caller's
        )  # fmt: skip
        self._started.append(process)
        return process


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        content = json.loads(line)
        try:
            compile_job(Job(**{**content, "shape": Shape(**content["shape"])}))
            error = ""
        except Exception as fault:
            error = str(fault) or type(fault).__name__
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
