"""A compiled spec that PyTorch calls: finds or builds the kernel for a call's shapes, checks the arguments, launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from attncc import analysis, pipeline
from attncc.ir import AttentionSpec, Param, Shape
from attncc.runtime import arguments
from attncc.runtime.cache import Cache
from attncc.runtime.device import INTERPRETED_AS, INTERPRETER, target_of
from attncc.runtime.loader import load_module

if TYPE_CHECKING:
    from attncc.frontend import Parsed

KNOWN_CALLS = 4096  # signatures of calls kept, so that lengths that always change do not fill the memory
Q_CLASSES, Q_LONG, K_LONG = (16, 64), 4096, 4096  # row counts that have plans of their own; what longer ones are planned for
WIDTHS = (32, 64)


@dataclass(frozen=True)
class Ready:
    """What a signature (shapes, dtypes, devices) leads to: the launchers for 32-bit and for 64-bit integers."""

    narrow: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    wide: Callable[[], Callable[..., tuple[torch.Tensor, torch.Tensor]]]
    clamps: tuple[tuple[int, int] | None, ...]  # for each scalar, the bounds that it may be clamped to
    limit: int  # up to which int parameters are safe in 32 bits; -1 where the lengths already are not


class Attention:
    """One spec, its constants baked in. Call it with tensors; see `__call__`. Kernels come from the cache or are built."""

    def __init__(self, parsed: Parsed, consts: Mapping[str, int], target: str | None = None) -> None:
        self.parsed = parsed
        self.consts = dict(consts)
        self.spec: AttentionSpec = parsed.spec.bind(self.consts)
        self.target = target
        self._scalars = tuple((p, p.name in arguments.divisors(self.spec)) for p in self.spec.scalars)
        self._tensors = tuple(p.name for p in self.spec.tensors)
        self._params: tuple[Param, ...] = self.spec.params
        self._ready: dict[tuple[Any, ...], Ready] = {}
        self._modules: dict[tuple[Any, ...], ModuleType] = {}
        self._widths = analysis.widths(self.spec)
        self._cache: Cache | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def __repr__(self) -> str:
        return f"<attncc.Attention {self.name}({', '.join(p.name for p in self._params)})>"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, validate: bool = False,
        deterministic: bool | None = None, **given: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """q [B, H, Q, D], k [B, H_kv, K, D], v [B, H_kv, K, D_v] of one dtype, any strides; parameters by name.

        Returns out [B, H, Q, D_v] in q's dtype, and with `return_lse` the lse [B, H, Q] in float32, natural logarithm.
        `validate` checks what the spec promises of tensors (`sorted`), which waits for the device. `deterministic` is
        accepted: the forward pass always is. TypeError or ValueError name the argument that is wrong; NotImplementedError
        where a gradient would be needed.
        """
        try:
            signature = (
                q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, len(given),
                *[(x.shape, x.dtype, x.device) for x in [given[n] for n in self._tensors]],
            )  # fmt: skip
            ready = self._ready.get(signature)
        except (AttributeError, KeyError, TypeError):
            signature, ready = (), None
        if ready is None:
            ready = self._prepare(signature, q, k, v, given)
        if validate:
            arguments.check_sorted(self.spec, given)
        if torch.is_grad_enabled():
            self._refuse_gradients(q, k, v, given)
        values, launch = self._values(ready, given)
        if q.is_cuda and q.device.index != torch.cuda.current_device():
            with torch.cuda.device(q.device):
                out, lse = launch(q, k, v, *values)
        else:
            out, lse = launch(q, k, v, *values)
        return (out, lse) if return_lse else out

    def _values(self, ready: Ready, given: Mapping[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
        """Parameters in the spec's order, and the launcher whose integers are wide enough for them."""
        scalars: dict[str, int | float] = {}
        safe = ready.limit >= 0
        for (p, divides), clamp in zip(self._scalars, ready.clamps, strict=True):
            value = arguments.scalar(p, given.get(p.name, p.default), divides)
            if p.type == "int":
                if clamp is not None:
                    value = min(max(value, clamp[0]), clamp[1])
                safe = safe and -ready.limit <= value <= ready.limit
            scalars[p.name] = value
        values = [scalars[p.name] if p.name in scalars else given[p.name] for p in self._params]
        return values, ready.narrow if safe else ready.wide()

    def _prepare(self, signature: tuple[Any, ...], q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> Ready:
        """The slow way, once for a signature: every check, and the kernel found or built."""
        arguments.check_qkv(q, k, v, self.spec.precision.inputs)
        arguments.check_names(self.spec, given)
        sizes = arguments.check_tensors(self.spec, q, k, v, given)
        target = self.target or target_of(q.device)
        longest = max(sizes.q_len, sizes.k_len, sizes.b_len, sizes.h_len, *sizes.free.values())
        limit = self._widths.limit if longest <= self._widths.limit else -1
        clamps = tuple(self._clamp(p, sizes) for p, _ in self._scalars)
        ready = Ready(
            self._launcher(target, q, sizes, 32), lambda: self._launcher(target, q, sizes, 64), clamps, limit
        )
        if len(self._ready) >= KNOWN_CALLS:
            self._ready.clear()
        if signature:
            self._ready[signature] = ready
        return ready

    def _clamp(self, p: Param, sizes: arguments.Sizes) -> tuple[int, int] | None:
        """Bounds beyond which this int parameter changes nothing at these lengths."""
        if p.name not in self._widths.clamps:
            return None
        farthest = sizes.q_len + sizes.k_len
        return -farthest, farthest

    def _launcher(self, target: str, q: torch.Tensor, sizes: arguments.Sizes, int_bits: int) -> Callable[..., Any]:
        rows = next((c for c in Q_CLASSES if sizes.q_len <= c), Q_LONG)
        key = (target, q.dtype, sizes.head_dim, sizes.head_dim_v, rows, int_bits)
        if key not in self._modules:
            self._modules[key] = self._module(target, replace(
                Shape(), heads=sizes.h_len or 1, kv_heads=sizes.h_kv_len or 1, batch=sizes.b_len or 1, q_len=rows, k_len=K_LONG,
                head_dim=sizes.head_dim, head_dim_v=sizes.head_dim_v, dtype=arguments.DTYPES[q.dtype],
            ), int_bits)  # fmt: skip
        return self._modules[key].forward

    def _module(self, target: str, shape: Shape, int_bits: int) -> ModuleType:
        """The generated file for a target and shape class, loaded."""
        self._cache = self._cache or Cache()
        planned = pipeline.plan_parsed(
            self.parsed, self.consts, INTERPRETED_AS if target == INTERPRETER else target, shape, int_bits=int_bits
        )
        entry = pipeline.kernel(planned, self._cache, resources=False)
        file = next(name for name in entry.files if name.endswith(".py"))
        module = load_module(entry.path / file, f"attncc_generated_{entry.digest[:16]}_{target}")
        module.__attncc_entry__ = entry  # type: ignore[attr-defined]  # holds the folder of an uncached build
        return module

    def _refuse_gradients(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]) -> None:
        for name, x in (("q", q), ("k", k), ("v", v), *given.items()):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, and the backward pass is not built yet: call under torch.no_grad() or detach it"
                )
