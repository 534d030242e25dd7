"""A spec beside others: both passes timed in turns over a sweep of lengths, numbers compared with float64 in the same
run, memory looked at. Times are of one call; the backward pass is that of q, k and v alone."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attncc import analysis, pipeline
from attncc.ir import Shape, conjunction, tensors
from attncc.runtime.attention import Attention
from attncc.runtime.draw import DTYPES, ELEMENTS, Draw
from attncc.runtime.gradients import Rounded, dense
from attncc.runtime.peers import Call, Refused, Run, kept_graphs, peer
from attncc.runtime.reference import environment

OURS = "attncc"
PASSES = ("forward", "backward")
ROUNDS, SPAN, MOST = 5, 20.0, 50  # rounds in turns; milliseconds and calls of one of them, at most
ROWS = 16  # at the first and at the last rows of a head, that numbers are compared in
RELATIVE = {"f32": 1e-5, "f64": 1e-12}  # of the l1 of what is right
Timed = Callable[[], Any]
Hear = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One pass of one contender at one length of q and one of k. Milliseconds of a call: the median of rounds, the
    fastest and slowest; TFLOP/s over kept pairs (4 of them times head size forward, 10 backward), None where the mask's
    contents decide.

    `error` is the sum of absolute differences from float64 over the rows that are compared, as a part of the sum of
    absolute values, of the worst of out or the gradients; `bound` is what ours may have. `peak_bytes` is what the GPU
    held beyond inputs and results, None on CPUs. `refused` says why there is nothing else.
    """

    length: int
    k_length: int
    direction: str
    who: str
    ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    tflops: float | None = None
    error: float | None = None
    bound: float | None = None
    peak_bytes: int | None = None
    refused: str | None = None

    @property
    def lengths(self) -> str:
        """`4096`, or where k has another length `1 x 4096`."""
        return _lengths(self.length, self.k_length)

    @property
    def right(self) -> bool:
        return self.error is None or self.bound is None or self.error <= self.bound

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "right": self.right}


def sweep(
    planned: pipeline.Planned, contents: Mapping[str, Any], lengths: Sequence[int], passes: Sequence[str],
    against: Sequence[str], device: str, hear: Hear = lambda text: None, rounds: int = ROUNDS,
) -> Iterator[Row]:  # fmt: skip
    """Rows by length and pass, ours first; `contents` are tensors by name, what else is missing is drawn at random.

    A length stands for q_len and k_len; with none the shape's own are taken. Errors are those of a call.
    """
    attention = Attention(planned.parsed, planned.consts)
    for length in lengths or (0,):
        shape = replace(planned.shape, q_len=length, k_len=length) if length else planned.shape
        call = drawn(attention, planned, shape, contents, device)
        ran: dict[str, Run | Refused] = {OURS: partial(_ours, attention, call.params)}
        for name in against:
            hear(f"{_lengths(shape.q_len, shape.k_len)}: preparing {name}")
            try:
                ran[name] = peer(name, call)
            except Refused as why:
                ran[name] = why
        for direction in passes:
            yield from Meeting(call, direction, hear, rounds).rows(ran)


def _lengths(of_q: int, of_k: int) -> str:
    return str(of_q) if of_q == of_k else f"{of_q} x {of_k}"


def _ours(attention: Attention, params: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Any = attention(q, k, v, **params)
    return out


def drawn(
    attention: Attention, planned: pipeline.Planned, shape: Shape, contents: Mapping[str, Any], device: str
) -> Call:
    """Normal q, k and v, the given parameters, and random ones where none is given."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((shape.batch, shape.heads, shape.q_len, shape.head_dim),
             (shape.batch, shape.kv_heads, shape.k_len, shape.head_dim),
             (shape.batch, shape.kv_heads, shape.k_len, shape.head_dim_v))  # fmt: skip
    q, k, v = (torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype]) for size in sizes)
    params = Draw(planned.spec, 0, planned.values).params(shape, device)
    params |= {n: x for n, x in planned.values.items() if n not in planned.spec.free_axes}
    for name, array in contents.items():
        params[name] = torch.as_tensor(array).to(device, ELEMENTS[planned.spec.param(name).element or ""])
    return Call(attention, q, k, v, params)


@dataclass(frozen=True)
class Meeting:
    """All contenders in one pass of one call."""

    call: Call
    direction: str
    hear: Hear
    rounds: int

    @property
    def _where(self) -> str:
        return _lengths(self.call.shape.q_len, self.call.shape.k_len)

    def rows(self, ran: Mapping[str, Run | Refused]) -> list[Row]:
        with kept_graphs():
            return list(self._rows(ran))

    def _rows(self, ran: Mapping[str, Run | Refused]) -> Iterator[Row]:
        found, ready = {}, {}
        for name, run in ran.items():
            self.hear(f"{self._where}: {name}, {self.direction}, first call")
            found[name] = row = self._first(name, run)
            if row.refused is None and not isinstance(run, Refused):
                ready[name] = partial(self._timed, run)
        self.hear(f"{self._where}: timing, {self.direction}")
        times, failed = in_turns(ready, self.call.q.device, self.rounds)
        flops = self._flops
        for name, row in found.items():
            if name in failed:
                row = replace(row, refused=failed[name])
            if name in times:
                ms = statistics.median(times[name])
                rate = None if flops is None else flops / ms / 1e9
                row = replace(row, ms=ms, least_ms=min(times[name]), most_ms=max(times[name]), tflops=rate)
            yield row

    def _first(self, name: str, run: Run | Refused) -> Row:
        """Numbers and memory of a first call, or why there is none."""
        row = Row(self.call.shape.q_len, self.call.shape.k_len, self.direction, name)
        if isinstance(run, Refused):
            return replace(row, refused=str(run))
        try:
            with warnings.catch_warnings():  # by which PyTorch says why a backend has no kernel
                warnings.simplefilter("ignore")
                error, bound = self._error(run)
            return replace(row, error=error, bound=bound if name == OURS else None, peak_bytes=self._peak(run))
        except Refused as why:
            return replace(row, refused=str(why))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return replace(row, refused="out of memory")
        except Exception as fault:
            if name == OURS:
                raise
            return replace(row, refused=_failure(fault))

    @property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        want = self.direction != "forward"
        q, k, v = (x.detach().requires_grad_(want) for x in (self.call.q, self.call.k, self.call.v))
        return q, k, v

    def _timed(self, run: Run) -> Timed:
        """What is timed: the call, or its backward pass alone."""
        inputs = self._inputs
        out = run(*inputs)
        if self.direction == "forward":
            return lambda: run(*inputs)
        d_out = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)

    def _peak(self, run: Run) -> int | None:
        """Bytes beyond the inputs and results of a call, its backward pass included where that is timed."""
        if not self.call.q.is_cuda:
            return None
        inputs = self._inputs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(*inputs)
        made = [out]
        if self.direction != "forward":
            made += torch.autograd.grad(out, inputs, out)
        torch.cuda.synchronize()
        own = sum(x.numel() * x.element_size() for x in made)
        return max(0, torch.cuda.max_memory_allocated() - before - own)

    @property
    def _flops(self) -> float | None:
        """Of what the mask keeps."""
        spec, shape = self.call.attention.spec, self.call.shape
        mask = conjunction(spec.masks)
        read = frozenset() if mask is None else tensors(mask)
        given = self.call.params.items()
        values = {n: x.cpu().numpy() if n in read else x for n, x in given if n in read or not isinstance(x, Tensor)}
        pairs = analysis.kept_pairs(spec, shape, values)
        columns = shape.head_dim + shape.head_dim_v
        products = 2 * columns if self.direction == "forward" else 2 * (3 * shape.head_dim + 2 * shape.head_dim_v)
        return None if pairs is None else float(products * pairs)

    # ---- numbers

    @cached_property
    def _part(self) -> Part:
        return Part(self.call)

    def _error(self, run: Run) -> tuple[float, float]:
        """The worst error of out, or of the gradients of a d_out that is 0 beside the rows that are compared."""
        part, inputs = self._part, self._inputs
        out = run(*inputs)
        if self.direction == "forward":
            return part.verdict({"out": part.of_rows(out)})
        d_out = torch.zeros_like(out)
        d_out[0, part.heads[:, None], part.rows] = part.d_out.to(out)
        d_q, d_k, d_v = torch.autograd.grad(out, inputs, d_out)
        return part.verdict({"q": part.of_rows(d_q), "k": part.of_keys(d_k), "v": part.of_keys(d_v)})


class Part:
    """Some rows of some heads of the first batch entry, and what float64 has for them."""

    def __init__(self, call: Call) -> None:
        self.call, shape = call, call.shape
        group = shape.heads // shape.kv_heads
        ends = sorted({0, shape.heads - 1})
        self.heads = torch.tensor(ends if len({h // group for h in ends}) == len(ends) else ends[-1:])
        self.kv_heads = self.heads // group
        n = shape.q_len
        self.rows = torch.tensor(sorted({*range(min(n, ROWS)), *range(max(0, n - ROWS), n)}))
        generator = torch.Generator().manual_seed(1)
        size = (len(self.heads), len(self.rows), shape.head_dim_v)
        self.d_out = torch.randn(size, generator=generator).to(call.q.dtype)

    def of_rows(self, x: Tensor) -> Tensor:
        """Of [B, H, Q, columns], in float64 on the CPU, [heads, rows, columns]."""
        return x.detach()[0, self.heads[:, None].to(x.device), self.rows.to(x.device)].to("cpu", torch.float64)

    def of_keys(self, x: Tensor) -> Tensor:
        """Of [B, H_kv, K, columns], those of the heads."""
        return x.detach()[0, self.kv_heads.to(x.device)].to("cpu", torch.float64)

    def _dense(self, rounded: torch.dtype | None) -> dict[str, Tensor]:
        """out and the gradients of q, k and v of these rows, by name; every intermediate rounded to that type."""
        call, spec = self.call, self.call.attention.spec
        params = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in call.params.items()}
        whole = environment(spec, call.q, call.k, params, "cpu")
        shift = call.shape.k_len - call.shape.q_len if spec.align == "end" else 0
        here = whole.having(
            b=torch.zeros(1, 1, 1, 1, dtype=torch.int64), h=self.heads.view(-1, 1, 1), row=self.rows.view(-1, 1),
            h_kv=self.kv_heads.view(-1, 1, 1), q=self.rows.view(-1, 1) + shift,
        )  # fmt: skip
        taken = (self.of_rows(call.q), self.of_keys(call.k), self.of_keys(call.v))
        q, k, v = (x[None].requires_grad_() for x in taken)
        to = (lambda x: x) if rounded is None else (lambda x: Rounded.apply(x, rounded))
        out = dense(spec, q, k, v, params, to, here)[0]
        grads = torch.autograd.grad(
            out, (q, k, v), self.d_out.double()[None], materialize_grads=True, allow_unused=True
        )
        return {n: x.detach()[0] for n, x in zip(("out", "q", "k", "v"), (out, *grads), strict=True)}

    @cached_property
    def want(self) -> dict[str, Tensor]:
        return self._dense(None)

    @cached_property
    def unfused(self) -> dict[str, Tensor]:
        return self._dense(self.call.q.dtype)

    def verdict(self, have: Mapping[str, Tensor]) -> tuple[float, float]:
        """Error and bound of the one that is nearest to its bound, or beyond it by most, as parts of the l1."""
        worst = (0.0, 1.0)
        kind = next(n for n, t in DTYPES.items() if t == self.call.q.dtype)
        for name, x in have.items():
            want = self.want[name]
            l1 = max(float(want.abs().sum()), 1e-300)
            error = float((x - want).abs().nan_to_num(torch.inf).sum()) / l1
            if kind in RELATIVE:
                bound = RELATIVE[kind] * (1 if name == "out" else 4)  # gradients add up what cancels
            else:
                own = float((self.unfused[name] - want).abs().sum()) / l1
                bound = 2 * own + torch.finfo(self.call.q.dtype).eps / 2
            if error / bound > worst[0] / worst[1] or not error / bound < torch.inf:
                worst = (error, bound)
        return worst


def machine(device: str) -> dict[str, Any]:
    """What was measured on, and with which versions."""
    import triton

    import attncc

    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads of a CPU"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "attncc": attncc.__version__}


def _failure(fault: Exception) -> str:
    said = str(fault).strip() or type(fault).__name__
    return f"fails: {said.splitlines()[0][:120]}"


def in_turns(
    prepared: Mapping[str, Callable[[], Timed]], device: torch.device, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of a call in each round, by name; and why others than ours fail, or find no memory beside them."""
    clock = _events if device.type == "cuda" else _wall
    calls, counts, failed = {}, {}, {}
    for name, prepare in prepared.items():
        try:
            call = prepare()
            clock(call, 1)
            counts[name] = max(1, min(MOST, int(SPAN / max(clock(call, 1), 1e-3))))
            calls[name] = call
        except torch.OutOfMemoryError:
            call = None
            torch.cuda.empty_cache()
            failed[name] = "out of memory beside the others"
        except Exception as fault:
            if name == OURS:
                raise
            failed[name] = _failure(fault)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(clock(call, counts[name]))
    return found, failed


def _events(call: Timed, runs: int) -> float:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def _wall(call: Timed, runs: int) -> float:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)
