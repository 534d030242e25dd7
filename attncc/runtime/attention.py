"""A compiled spec that PyTorch calls: finds or builds the kernel for a call's shapes, checks arguments, launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from attncc import analysis, codegen, frontend, pipeline, planner
from attncc.analysis.normaliser import normaliser
from attncc.ir import LEAST_INT, MOST_INT, AttentionSpec, Shape
from attncc.runtime import arguments, autograd, derivatives, dropout, operator, rows, winners
from attncc.runtime.device import INTERPRETER, target_for
from attncc.runtime.kernels import Kernels, Place
from attncc.runtime.ready import Kind, Launch, Ready
from attncc.runtime.search import BUDGET

if TYPE_CHECKING:
    from attncc.frontend import Parsed
    from attncc.runtime.tune import Tell, Tuning

dispatch_modes = torch._C._len_torch_dispatch_stack
autocast_is_on = torch._C._is_any_autocast_enabled
KNOWN_CALLS = 4096  # signatures of calls kept, so that lengths that always change do not fill the memory


class Attention:
    """One spec, its constants baked in; call it with tensors. Kernels come from the cache or are built."""

    _promises: tuple[str, ...] = ()  # numbers of a call that say what its lengths can be
    quantised = arguments.refuse_quantised  # of 8-bit inputs: see EightBit

    def __init__(
        self, parsed: Parsed, consts: Mapping[str, int], target: str | None = None, tuned: pipeline.Tuned | None = None
    ) -> None:
        """`tuned` are choices by pass that take the place of what was kept for the device."""
        self.parsed, self.consts, self.target = parsed, dict(consts), target
        self.spec: AttentionSpec = frontend.bind(parsed, self.consts)
        self.text = frontend.canonical(self.spec)  # with the constants baked in
        self.bare = frontend.canonical(self.spec.reporting(())) if self.spec.reports else self.text  # asks for no rows
        self.kernels = Kernels(parsed, self.consts, self.text, tuned)
        rule = normaliser(self.spec)
        self.has_lse, self.has_statistic = rule.has_lse, rule.statistic
        self._reports = bool(self.spec.reports)
        self.statistic = rule.statistic or self._reports  # whether a call has a second result
        self.reporting: dict[frozenset[str], Attention] = {}  # the same with more of each row
        self._widths = analysis.widths(self.spec)
        spelled = codegen.parameter_names(self.spec)
        divisors, clamped = analysis.divisors(self.spec), self._widths.clamped
        self._check_values = arguments.value_check(self.spec)
        self._scalars = tuple(  # name, name in the file, whether any int will do, parameter, divides, is clamped
            (p.name, spelled[p.name], p.type == "int" and p.name not in divisors, p, p.name in divisors,
             p.name in clamped)
            for p in self.spec.scalars
        )  # fmt: skip
        self._ints = tuple(p.name for p in self.spec.scalars if p.type == "int")
        self._declared = arguments.declared(self.spec)
        self._fits = lru_cache(KNOWN_CALLS)(self._narrow)
        self._tensors = {p.name: spelled[p.name] for p in self.spec.tensors}
        self._same_names = all(name == file_name for name, file_name in self._tensors.items())
        self._ready: dict[tuple[Any, ...], Ready] = {}
        self._kinds: dict[tuple[Place, Shape], Kind] = {}
        self._derived: dict[tuple[Any, ...], Any] = {}

    @property
    def name(self) -> str:
        return self.spec.name

    def tune(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Mapping[str, Any] | None = None, *,
        passes: Sequence[str] | None = None, cold: bool = False, budget: float = BUDGET, tell: Tell | None = None,
        **given: Any,
    ) -> Tuning:  # fmt: skip
        """Search for the fastest plan for calls like this one on its GPU, and keep it for good.

        Arguments are those of a call, parameters by name or, those that are called as an argument here, in the mapping
        `params`; the winner serves every call of its bucket (docs/tuning.md). `passes` are forward and backward; left
        out: forward, and backward where an argument requires a gradient. `cold` empties the GPU's cache before each
        run, `budget` is the seconds for all, `tell` hears (pass, done, all, found).
        Candidates are compared with float64 before they win; results change by nothing but the plan. TypeError and
        ValueError as for a call, also for no budget and strides that TMA cannot take; EnvironmentFault without a GPU.
        """
        from attncc.runtime import tune

        given = {**(params or {}), **given}
        found = tune.tune(self, q, k, v, given, passes=passes, cold=cold, budget=budget, tell=tell)
        for known in (self._ready, self._kinds, self._derived):
            known.clear()
        self.kernels.forget()
        return found

    def having(self, tuned: pipeline.Tuned, planned: pipeline.Planned) -> Attention:
        """The same attention with these choices in place of what was kept, by pass; `planned` is their plan."""
        made = Attention(self.parsed, self.consts, self.target, tuned)
        made.kernels = self.kernels.having(tuned, planned)
        return made

    def __repr__(self) -> str:
        return f"<attncc.Attention {self.name}({', '.join(p.name for p in self.spec.params)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the text: kernels are found again, in the cache, where the copy is called."""
        return _restored, (self.parsed.text, self.parsed.filename, self.consts, self.target)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, return_max: bool = False,
        return_entropy: bool = False, return_pairs: bool = False, validate: bool = False,
        deterministic: bool | None = None, **given: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        """q [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v] of one dtype, any strides; parameters by name.

        Returns out [B, H, Q, D_v] in q's dtype, then what is asked for, [B, H, Q] in float32: the natural lse,
        where weights are divided by a sum; a row's greatest score; its weights' entropy; its pairs' number, int64.
        `seed`, of a spec with dropout, says which weights are dropped; left out, it is the next of torch's generator on
        the CPU. `validate` checks what the spec promises of tensors (`sorted`), which waits for the device. Equal calls
        give equal bits, with `deterministic` their gradients too, for which a backward pass that adds in any order
        gives way; left out, torch.use_deterministic_algorithms says so. Differentiable once by q, k, v and parameters
        marked `grad`: out, lse, entropy. TypeError or ValueError name what is wrong, gradients not given among it.
        """
        flags = return_lse, return_max, return_entropy, return_pairs
        bools = type(return_lse) is type(return_max) is type(return_entropy) is type(return_pairs) is type(validate)
        if not bools or type(validate) is not bool or deterministic is not None:
            arguments.check_flags(*flags, validate, deterministic)
        if return_lse and not self.has_lse:
            rows.refuse_lse(self)
        if return_max or return_entropy or return_pairs or self._reports:
            return rows.call(self, (q, k, v), given, flags, validate, deterministic)
        out, lse = self.both(q, k, v, given, validate, deterministic)
        return (out, lse) if return_lse else out

    def both(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any], validate: bool = False,
        deterministic: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """out and lse of a call; the lse is empty where the normaliser has none."""
        compiling = torch.compiler.is_compiling()
        if compiling or autocast_is_on():
            q, k, v = arguments.autocast(q, k, v, self.spec.precision.inputs)
        if compiling or dispatch_modes():  # selective checkpoints see one operator, not its parts
            return self.in_graph(q, k, v, given, validate, deterministic)
        if self.spec.dropout is not None:
            given = {**given, "seed": dropout.seed_of(given)}
        try:
            signature = (  # devices whole: the index alone takes a meta tensor for one on the CPU
                q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.layout, q.dtype, k.dtype, v.dtype,
                q.device, k.device, v.device, *given,
            )  # fmt: skip
            if self._tensors:
                signature += (*[(x.shape, x.layout, x.dtype, x.device) for x in [given[n] for n in self._tensors]],)
            for name in self._promises:
                signature += (type(given.get(name)), given.get(name))
            ready = self._ready.get(signature)
        except (AttributeError, KeyError, TypeError, RuntimeError):  # the last of tensors without strides
            signature, ready = (), None
        if ready is None:
            ready = self._prepare(signature, q, k, v, given)
        if self.spec.dropout is not None:
            dropout.check_probability(self.spec, q, k, given)
        if validate:
            self._validate(q, k, given)
        if autograd.is_recorded(self.spec, q, k, v, given):
            return autograd.record(self, q, k, v, given, deterministic)
        return self._launch(ready, q, k, v, given)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, checked, and nothing for derivatives, graphs or modes."""
        if self.spec.dropout is not None:
            given = {**given, "seed": dropout.seed_of(given)}
            dropout.check_probability(self.spec, q, k, given)
        return self._launch(self.ready(q, k, v, given), q, k, v, given)

    def _launch(
        self, ready: Ready, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, narrow = self._values(ready, given)
        pointers = k.data_ptr() | v.data_ptr() | (q.data_ptr() if ready.kind.whole else 0)
        aligned = ready.aligned and pointers % arguments.TMA_BYTES == 0
        launch = ready.launches.get((narrow, aligned)) or ready.kind.build(narrow, aligned)
        if ready.device is None or ready.device == torch.cuda.current_device():
            return launch(q, k, v, **values)
        with torch.cuda.device(ready.device):
            return launch(q, k, v, **values)

    def varlen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor | None = None, *, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        return_lse: bool = False, validate: bool = False, deterministic: bool | None = None, **given: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        """Sequences of different lengths, packed one behind another: q [total_q, H, D], k [total_k, H_kv, D],
        v [total_k, H_kv, D_v] of one dtype, any strides; parameters by name.
        Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys cu_seqlens_k[i] to
        cu_seqlens_k[i + 1]: int32 [B + 1], on q's device, from 0 to total_q and total_k, never falling. Left out,
        cu_seqlens_k is cu_seqlens_q. Positions, lengths, masks and alignment are each sequence's own, `b` is its
        number, and a tensor with the axes b and row (or k) comes packed along total_q (total_k), without b.

        `max_seqlen_q` and `max_seqlen_k`, promises that no sequence is longer, choose a kernel for short sequences and
        are never needed. Nothing waits for the device, unless `validate` asks to check these and what the spec
        promises; on the CPU it is always checked.

        Returns out [total_q, H, D_v], and with `return_lse` the lse [H, total_q]; the rest is as for a call of dense
        tensors. SpecError where a tensor of the spec has no packed form.
        """
        given["cu_seqlens_q"] = cu_seqlens_q
        given["cu_seqlens_k"] = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        given |= {n: x for n, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)) if x is not None}
        if torch.compiler.is_compiling():
            return operator.packed(self, (q, k, v), given, return_lse, validate, deterministic)
        return self.packed(q, k, v, return_lse=return_lse, validate=validate, deterministic=deterministic, **given)

    @cached_property
    def packed(self) -> Attention:
        """The same attention of packed sequences: `cu_seqlens_q` and the rest are parameters by name there."""
        from attncc.runtime.packed import Packed

        parsed = frontend.packed(self.parsed)
        pipeline.refuse(parsed)
        return Packed(parsed, self.consts, self.target)

    def _validate(self, q: torch.Tensor, k: torch.Tensor, given: Mapping[str, Any]) -> None:
        """What only the elements of tensors can tell; waits for the device."""
        arguments.check_sorted(self.spec, given)

    def in_graph(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any], validate: bool,
        deterministic: bool | None, text: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The call as one operator, for a graph or a mode that looks at operators; arguments are checked in it."""
        if not text:
            self._check_layout()
        if validate:
            raise ValueError("validate=True reads tensors, which a graph or a dispatch mode may not have yet")
        autograd.refuse(self.spec, q, given)
        if self.spec.dropout is not None and given.get("seed") is None:
            given = {**given, "seed": torch.randint(dropout.SEEDS - 1, (), dtype=torch.int64, device="cpu")}
        return operator.call(self, q, k, v, derivatives.asking(given, deterministic), text)

    def ready(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]) -> Ready:
        """What these arguments lead to, checked."""
        several = (q, k, v, *(given[n] for n in self._tensors))
        promised = ((type(given.get(n)), given.get(n)) for n in self._promises)
        signature = ("ready", *given, *((x.shape, x.stride(), x.dtype, x.device) for x in several), *promised)
        return self._ready.get(signature) or self._prepare(signature, q, k, v, given)

    def _values(self, ready: Ready, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """Parameters by their names in the generated file, and whether 32-bit integers are wide enough for them."""
        numbers, narrow = ready.usual, ready.narrow
        if numbers is None:
            numbers, ints = self._numbers(ready.reach, ready.lengths, given)
            narrow = narrow and (not ints or self._fits(ready.longest, ints))
        elif self._same_names:
            return ({**numbers, **given} if numbers else given), narrow
        tensors = {spelled: given[name] for name, spelled in self._tensors.items()} if self._tensors else {}
        values = {**numbers, **tensors}
        if "seed" in given:
            values["seed"] = given["seed"]
        return values, narrow

    def _numbers(
        self, reach: int, lengths: arguments.Lengths, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Scalars by their names in the generated file, and the ints among them in order."""
        values, exact, ints = {}, [], []
        for name, spelled, plain, p, divides, clamped in self._scalars:
            value = given.get(name, p.default)
            if not plain or type(value) is not int or not LEAST_INT <= value <= MOST_INT:
                value = arguments.scalar(p, value, divides)
            exact.append(value)
            if type(value) is int:
                value = min(max(value, -reach), reach) if clamped else value
                ints.append(value)
            values[spelled] = value
        if self._check_values is not None:
            self._check_values(tuple(exact), lengths)
        return values, tuple(ints)

    def _prepare(self, signature: tuple[Any, ...], q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> Ready:
        """The slow way, once for a signature: every check, and the kernel found or built."""
        sizes = self._check(q, k, v, given)
        target = target_for(self.target, q)
        longest = max(sizes.q_len, sizes.k_len, sizes.b_len, sizes.h_len, *sizes.free.values())
        shape = planner.bucket_of(sizes.shape(arguments.NAMES[q.dtype]))
        place = target, None if target == INTERPRETER else winners.device_of(q.device)
        kind = self._kinds.get((place, shape)) or self._kind(place, shape)
        aligned = target != INTERPRETER and self._addressable((q, k, v) if kind.whole else (k, v))
        if (True, aligned) not in kind.launches:
            kind.build(True, aligned)
        usual, narrow, reach = None, True, sizes.q_len + sizes.k_len
        lengths = sizes.named() if self._check_values else ()
        if not any(name in given for name, *_ in self._scalars):
            usual, ints = self._numbers(reach, lengths, {})
            narrow = self._fits(longest, ints)
        elif not self._ints:
            narrow = self._fits(longest, ())
        device = q.device.index if q.is_cuda and torch.cuda.device_count() > 1 else None
        ready = Ready(kind, kind.launches, aligned, longest, reach, usual, narrow, device, lengths)
        if len(self._ready) >= KNOWN_CALLS:
            self._ready.clear()
        if signature:
            self._ready[signature] = ready
        return ready

    def _addressable(self, loaded: Sequence[torch.Tensor]) -> bool:
        return arguments.addressable(loaded)

    def _check(self, q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> arguments.Sizes:
        """The sizes of a call whose arguments are right. TypeError or ValueError."""
        self._check_layout()
        arguments.check_qkv(q, k, v, self.spec.precision)
        arguments.check_names(self.spec, given)
        return arguments.check_tensors(self._declared, q, k, v, given)

    def _check_layout(self) -> None:
        if self.spec.ragged:
            raise TypeError(f"{self.name} has the layout ragged: call its varlen(q, k, v, cu_seqlens_q, ...)")

    def _narrow(self, longest: int, ints: tuple[int, ...]) -> bool:
        """Whether 32-bit integers are exact: by the limit that holds for all at once, else for these values."""
        within = max(longest, *map(abs, ints), 0) <= self._widths.limit
        return within or self._widths.fits(longest, dict(zip(self._ints, ints, strict=True)))

    def _kind(self, place: Place, shape: Shape) -> Kind:
        """What calls of a place and a bucket of shapes share, once for them."""
        launches: dict[tuple[bool, bool], Launch] = {}

        def build(narrow: bool, aligned: bool) -> Launch:
            """The launcher of the generated file, found or built, and loaded."""
            made = launches[narrow, aligned] = self._load(place, shape, 32 if narrow else 64, aligned)
            return made

        whole = place[0] != INTERPRETER and self.kernels.route(place, shape, 32).algorithm == "fa3"
        derived = partial(self._backward, place, shape), partial(self._derivative, pipeline.tangent, place, shape)
        made = self._kinds[place, shape] = Kind(launches, build, whole, *derived)
        return made

    def launchers(self) -> tuple[Launch, ...]:
        """Those of the forward pass that calls have led to so far, each once."""
        return tuple(dict.fromkeys(launch for kind in self._kinds.values() for launch in kind.launches.values()))

    def gradients(
        self, ready: Ready, call: tuple[torch.Tensor | None, ...], given: Mapping[str, Any],
        deterministic: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """d_q, d_k, d_v, and those of `grad` parameters by name, of `call`: (q, k, v, out, lse, d_out, d_lse or None).

        `ready` is that of the same q, k, v and parameters, which `given` has by name; `deterministic` as for a call.
        """
        if self.spec.dropout is not None:
            given = {**given, "seed": dropout.seed_of(given)}
        values, narrow = self._values(ready, given)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        launch = ready.kind.backward(narrow, deterministic)
        with torch.cuda.device(ready.device) if ready.device is not None else nullcontext():
            return launch(*call, **values)

    def tangents(
        self, ready: Ready, call: tuple[torch.Tensor | None, ...], given: Mapping[str, Any], moves: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of out and lse of `call`: (q, k, v, out, lse, and the tangents of q, k and v, None for zero).

        `moves` are the tangents of `grad` parameters by name, 0-d for a float; `ready` and `given` as for `gradients`.
        """
        values, narrow = self._values(ready, given)
        moved = codegen.tangent_names(self.spec)
        named = {moved[n]: x if n in self._tensors else float(x) for n, x in moves.items()}
        launch = ready.kind.tangent(narrow)
        with torch.cuda.device(ready.device) if ready.device is not None else nullcontext():
            return launch(*call, **values, **named)

    def _backward(self, place: Place, shape: Shape, narrow: bool, deterministic: bool = False) -> Any:
        make = pipeline.repeatable if deterministic else pipeline.backward
        return self._derivative(make, place, shape, narrow)

    def _derivative(self, make: Callable[..., pipeline.Planned], place: Place, shape: Shape, narrow: bool) -> Any:
        """The launcher of a file of derivatives, which `make` plans; it is named after the plan's direction."""
        key = (make, place, shape, narrow)
        if key not in self._derived:
            planned = make(self.kernels.planned(place, shape, 32 if narrow else 64))
            self._derived[key] = getattr(self.kernels.other(place, planned), planned.choice.plan.direction)
        return self._derived[key]

    def _load(self, place: Place, shape: Shape, int_bits: int, aligned: bool) -> Any:
        if not aligned and self.kernels.route(place, shape, int_bits).algorithm == "fa3":
            warnings.warn(
                f"{self.name}: TMA takes rows at 16-byte-aligned addresses and strides, and these tensors lie otherwise"
                " (or there are no keys): the kernel for any strides runs, which is slower",
                stacklevel=2,
            )
        return self.kernels.forward(place, shape, int_bits, aligned).forward


def _restored(text: str, filename: str, consts: Mapping[str, int], target: str | None) -> Attention:
    """What a pickle leads to."""
    return Attention(frontend.parse(text, filename), consts, target)
