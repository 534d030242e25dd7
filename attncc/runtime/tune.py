"""Tuning on this machine's GPU: candidates compiled side by side, judged against float64, timed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncc import pipeline, planner
from attncc.errors import EnvironmentFault
from attncc.ir import Shape
from attncc.planner import Candidate
from attncc.planner.hopper_backward import ADDED
from attncc.runtime import arguments, autograd, check, winners
from attncc.runtime.dropout import seed_of
from attncc.runtime.poison import poisoned
from attncc.runtime.precompile import Job, Workers
from attncc.runtime.search import BUDGET, Found, Late, OutOfMemory, Unsteady, search
from attncc.runtime.timing import Call, Events, Timer

if TYPE_CHECKING:
    from attncc.runtime.attention import Attention

COMPILING = 0.5  # of the budget, after which what is not compiled is left out
ALIKE = 4  # roundings by which a candidate may be off the first right one, as a part of the norm
JUDGED = {"heads": 4, "kv_heads": 2, "q_len": 300, "k_len": 530}  # the call that is compared with float64
SEED = 1

Tell = Callable[[str, int, int, Found], None]


@dataclass(frozen=True)
class Tuning:
    """What tuning one call found, by pass."""

    name: str
    device: str
    shape: Shape
    found: Mapping[str, Found]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "device": self.device, "shape": pipeline.plain(self.shape),
            "passes": {n: _summary(f) | {"trials": [t.to_json() for t in f.trials]} for n, f in self.found.items()},
        }  # fmt: skip


def _summary(found: Found) -> dict[str, Any]:
    best, first = found.best, found.first
    return {
        "choices": best.candidate.choices if best else None, "ms": best.ms if best else None,
        "planner_ms": first.ms if first else None, "measured": sum(t.ms is not None for t in found.trials),
        "seconds": round(found.seconds, 2), "stopped": found.stopped, "interrupted": found.interrupted,
    }  # fmt: skip


def tune(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], *,
    passes: Sequence[str] | None = None, cold: bool = False, budget: float = BUDGET, tell: Tell | None = None,
    timer: Timer | None = None, workers: Workers | None = None, contests: Mapping[str, Contest] | None = None,
) -> Tuning:  # fmt: skip
    """See Attention.tune. `timer` stands in for the device's own events, `workers` compile and are left running.

    `contests`, by pass, are those of an earlier search of the same bucket."""
    attention._check(q, k, v, given)
    if not budget > 0:
        raise ValueError(f"budget is seconds above 0, and is {budget}")
    if attention.spec.dropout is not None:  # equal calls shall give equal bits
        given = {**given, "seed": given.get("seed") or SEED}
    ready = attention.ready(q, k, v, given)
    device = winners.device_of(q.device)
    if device is None:
        raise EnvironmentFault("there is nothing to tune on a CPU: pass tensors that are on a GPU")
    if passes is None:
        recorded = autograd.is_recorded(attention.spec, q, k, v, given)
        passes = winners.PASSES if recorded else winners.PASSES[:1]
    unknown = set(passes) - set(winners.PASSES)
    if unknown or not passes:
        raise ValueError(f"passes are some of {', '.join(winners.PASSES)}, and are {list(passes)}")
    plain = {n: _plain(attention, n, x) for n, x in given.items() if n != "seed"}
    if attention.spec.dropout is not None:  # one for all candidates, whose results are compared
        plain["seed"] = seed_of(given)
    call = Measured(attention, q.detach(), k.detach(), v.detach(), plain)
    if not ready.aligned and call.planned.choice.plan.loads == "descriptor":
        raise ValueError("k and v have strides that TMA cannot take: tune with tensors whose rows are contiguous")
    found: dict[str, Found] = {}
    own = workers or Workers()
    try:
        for i, name in enumerate(passes):
            share = max(0.0, budget - sum(f.seconds for f in found.values())) / (len(passes) - i)
            contest = contests[name] if contests is not None else Contest.of(call.planned, name)
            subject = OnDevice(call, contest, timer or Events(cold), share, own)
            hear = None if tell is None else lambda done, whole, f, name=name: tell(name, done, whole, f)
            found[name] = search(contest.candidates, subject, budget=share, tell=hear)
            _keep(call, device, name, found[name])
            if found[name].interrupted:
                break
    finally:
        if workers is None:
            own.close()
    return Tuning(attention.name, device.name, call.shape, found)


def _plain(attention: Attention, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach() if name in {p.name for p in attention.spec.tensors} else value.item()


def _keep(call: Measured, device: winners.Device, name: str, found: Found) -> None:
    if found.best is None:
        return
    import triton

    import attncc

    measured = _summary(found) | {
        "shape": pipeline.plain(call.shape), "torch": torch.__version__, "triton": triton.__version__,
        "attncc": attncc.__version__, "trials": [t.to_json() for t in found.trials if t.ms is not None],
    }  # fmt: skip
    where = winners.key(call.attention.text, device, call.shape, name)
    winners.keep(call.attention.kernels.cache, where, found.best.candidate.choices, measured)


@dataclass(frozen=True)
class Measured:
    """The call that is tuned for: nothing in it requires a gradient, and floats are Python's."""

    attention: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    given: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        (b, h, q_len, d), (h_kv, k_len) = self.q.shape, self.k.shape[1:3]
        return Shape(b, h, h_kv, q_len, k_len, d, self.v.shape[3], arguments.DTYPES[self.q.dtype])

    @property
    def planned(self) -> pipeline.Planned:
        """By the model, as if nothing had been measured."""
        a, target = self.attention, winners.target_of(self.q.device)
        return pipeline.plan_parsed(a.parsed, a.consts, {}, planner.bucket_of(self.shape), target)


@dataclass
class Contest:
    """The plans of a pass that compete for a bucket, the planner's choice first, and what is known of them already."""

    planned: pipeline.Planned
    direction: str
    candidates: tuple[Candidate, ...]
    right: dict[str, Any] = field(default_factory=dict)  # results of the small call, in float64
    faults: dict[Candidate, Sequence[str]] = field(default_factory=dict)  # of plans that were compared with them

    @classmethod
    def of(cls, planned: pipeline.Planned, direction: str) -> Contest:
        """`planned` is the model's plan of the forward pass, as if nothing had been measured."""
        return cls(planned, direction, candidates_of(planned, direction))


def candidates_of(planned: pipeline.Planned, direction: str) -> tuple[Candidate, ...]:
    """What is measured of a pass. NotImplementedError for a backward pass that is not built."""
    if direction == pipeline.BACKWARD:
        pipeline.backward(planned)
        return planner.backward_candidates(planned.spec, planned.shape, planned.target)
    return planner.candidates(planned.spec, planned.shape, planned.target, planned.visits)


def job_of(attention: Attention, planned: pipeline.Planned, direction: str, candidate: Candidate) -> Job:
    """What compiles a candidate ahead."""
    return Job(
        text=attention.parsed.text, consts=attention.consts, shape=planned.shape, target=planned.target.name,
        int_bits=planned.choice.plan.int_bits, tuned={direction: candidate.choices}, direction=direction,
        root=str(attention.kernels.cache.root),
    )  # fmt: skip


def beside(attention: Attention, contest: Contest) -> tuple[Job, ...]:
    """What compiles ahead the kernel that a contest's calls run beside each candidate: that of the forward pass, whose
    results the backward pass takes."""
    if contest.direction == pipeline.FORWARD:
        return ()
    choice = contest.planned.choice
    return (job_of(attention, contest.planned, pipeline.FORWARD, Candidate(choice.plan, None)),)


def having(attention: Attention, planned: pipeline.Planned, direction: str, candidate: Candidate) -> Attention:
    """The attention with a candidate in the place of the planner's choice."""
    tuned = {direction: candidate.choices}
    planned = replace(planned, tuned=tuned)
    if direction == pipeline.FORWARD:
        plan = planner.with_choices(planned.choice.plan, candidate.choices, planned.target)
        assert plan is not None  # candidates are legal
        planned = replace(planned, choice=replace(planned.choice, plan=plan))
    return attention.having(tuned, planned)


class OnDevice:
    """A `search.Subject`: one pass of a call on the GPU that its tensors are on."""

    def __init__(self, call: Measured, contest: Contest, timer: Timer, budget: float, workers: Workers) -> None:
        self.call, self.contest, self.timer = call, contest, timer
        self.planned, self.direction = contest.planned, contest.direction
        self._patience = COMPILING * budget
        self._workers = workers
        self._beside = [workers.submit(job) for job in beside(call.attention, contest)]
        self._jobs = {c: self._submit(c) for c in contest.candidates}
        self._waited = False
        self._first: list[Tensor] | None = None
        self._runs: dict[Candidate, Call] = {}

    def _submit(self, candidate: Candidate) -> Future[None]:
        return self._workers.submit(job_of(self.call.attention, self.planned, self.direction, candidate))

    def prepare(self, candidate: Candidate) -> None:
        """All are compiled before the first is timed, so that timing has the machine to itself. The planner's choice is
        waited for however long it takes: without it nothing is known."""
        if not self._waited:
            wait((*self._beside, *self._jobs.values()), self._patience)
            self._waited = True
        job = self._jobs[candidate]
        if not job.done() and candidate != self.contest.candidates[0]:
            raise Late("not compiled in time")
        job.result()

    def more(self, measured: Mapping[Candidate, float]) -> Sequence[Candidate]:
        """The kernels of the backward pass are tried one by one: last, the best of each together."""
        if self.direction != pipeline.BACKWARD:
            return ()
        plan = planner.crossed({c.plan: ms for c, ms in measured.items()}, self.planned.target)
        if plan is None:
            return ()
        made = Candidate(plan, None)
        self._jobs[made] = self._submit(made)
        wait([self._jobs[made]], self._patience)
        return (made,)

    def judge(self, candidate: Candidate) -> Sequence[str]:
        """A small call against float64; the call itself twice, and against the first candidate that was right."""
        tuned = having(self.call.attention, self.planned, self.direction, candidate)
        with self._memory():
            known = self.contest.faults
            if candidate not in known:
                known[candidate] = list(self._small(tuned))
            if known[candidate]:
                return known[candidate]
            run = self._runs[candidate] = self._run(tuned)
            with poisoned():
                results = [_tensors(run()) for _ in range(2)]
            loose = {0} if candidate.plan.sums in ADDED else set()  # dQ, added up in any order
            unlike = {i for i, (a, b) in enumerate(zip(*results, strict=True)) if not _same(a, b)}
            if unlike - loose or _differences(results[0], results[1], self.call.q.dtype):
                raise Unsteady("equal calls gave different bits")
            if self._first is None:
                self._first = results[0]
            return _differences(results[0], self._first, self.call.q.dtype)

    def _small(self, tuned: Attention) -> Sequence[str]:
        s = self.call.shape
        shape = Shape(batch=1, **JUDGED, head_dim=s.head_dim, head_dim_v=s.head_dim_v, dtype=s.dtype)
        run = lambda q, k, v, **params: tuned.both(q, k, v, params, deterministic=False)  # in no other plan's place
        backward = self.direction == pipeline.BACKWARD
        place = self.call.q.device.type
        with torch.device("cpu"):  # of what is drawn and of references, whatever torch's default is
            row = check.call(tuned.spec, run, place, shape, s.dtype, "contiguous", SEED, {}, backward, once=self._once)
        return row.faults

    def _once(self, name: str, make: Call) -> Any:
        """What is right is the same for every candidate."""
        right = self.contest.right
        if name not in right:
            right[name] = make()
        return right[name]

    def _run(self, tuned: Attention) -> Call:
        c = self.call
        if self.direction == pipeline.FORWARD:
            return lambda: tuned.both(c.q, c.k, c.v, c.given)
        out, lse = tuned.both(c.q, c.k, c.v, c.given)
        d_out = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(SEED), device=out.device)
        whole = (c.q, c.k, c.v, out, lse, d_out.to(out.dtype), torch.zeros_like(lse))
        ready = tuned.ready(c.q, c.k, c.v, c.given)
        return lambda: tuned.gradients(ready, whole, c.given, deterministic=False)

    def time(self, candidate: Candidate) -> float:
        with self._memory():
            return self.timer.time(self._runs[candidate])

    def duel(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        with self._memory():
            return self.timer.in_turns([self._runs[c] for c in candidates])

    @contextmanager
    def _memory(self) -> Iterator[None]:
        try:
            with torch.no_grad() if self.direction == pipeline.FORWARD else torch.enable_grad():
                yield
        except torch.cuda.OutOfMemoryError as fault:
            torch.cuda.empty_cache()
            raise OutOfMemory(str(fault)) from None


def _tensors(result: Any) -> list[Tensor]:
    """Every tensor of a call's result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in (result.values() if isinstance(result, dict) else result) for x in _tensors(part)]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _differences(have: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype) -> list[str]:
    """Tensors that are off those of another right plan by more than roundings."""
    faults = []
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if not torch.equal(a.isfinite(), b.isfinite()):
            faults.append(f"result {i} has other places without a finite number")
            continue
        x, y = (t.nan_to_num(0.0, 0.0, 0.0).float() for t in (a, b))
        if (x - y).norm() > ALIKE * torch.finfo(dtype).eps * max(float(y.norm()), torch.finfo(dtype).tiny):
            faults.append(f"result {i} is not that of the other plans")
    return faults
