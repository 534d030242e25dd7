"""Calls of an Attention on sequences that are packed one behind another, as its `varlen` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attncc import frontend
from attncc.errors import NotBuilt
from attncc.runtime import arguments
from attncc.runtime.attention import Attention, dispatch_modes

if TYPE_CHECKING:
    from attncc.frontend import Parsed

STARTS = {"cu_seqlens_q": "q", "cu_seqlens_k": "k"}
LONGEST = {"max_seqlen_q": "cu_seqlens_q", "max_seqlen_k": "cu_seqlens_k"}


class Packed(Attention):
    """Takes q [total_q, H, D] and so on; `cu_seqlens_q` and `cu_seqlens_k` are parameters by name."""

    _promises = tuple(LONGEST)

    def __init__(self, parsed: Parsed, consts: Mapping[str, int], target: str | None = None, tuned: Any = None) -> None:
        """`parsed` is what frontend.packed gives."""
        super().__init__(parsed, consts, target, tuned)
        self._tensors = {**{name: name for name in STARTS}, **self._tensors}
        self._check_sequence = arguments.value_check(self.spec, of_sequence=True)
        self._same_names = False  # a call has arguments that the generated file does not take

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.parsed.text, self.parsed.filename, self.consts, self.target)

    def both(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any], validate: bool = False,
        deterministic: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        seen_later = torch.compiler.is_compiling() or dispatch_modes()
        checked = validate or (not seen_later and isinstance(q, torch.Tensor) and q.device.type == "cpu")
        return super().both(q, k, v, _contiguous(given), checked, deterministic)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = _contiguous(given)
        if q.device.type == "cpu":
            self._validate(q, k, given)
        return super().run(q, k, v, given)

    def tune(self, *args: Any, **given: Any) -> Any:
        """NotBuilt: what is measured is dense, and its winners hold for dense calls."""
        raise NotBuilt(f"{self.name}: calls of packed sequences are not tuned yet; they take the planner's plan")

    def _check_layout(self) -> None:
        pass

    def _check(self, q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> arguments.Sizes:
        """The sizes of a call; lengths are the longest that a sequence can have."""
        arguments.check_qkv(q, k, v, self.spec.precision, packed=True)
        for name in STARTS:
            _check_starts(name, given.get(name), q)
        sequences = given["cu_seqlens_q"].shape[0] - 1
        if given["cu_seqlens_k"].shape[0] - 1 != sequences:
            found = given["cu_seqlens_k"].shape[0]
            raise ValueError(f"cu_seqlens_k must have the length of cu_seqlens_q, {sequences + 1}, and has {found}")
        mine = {n: x for n, x in given.items() if n not in STARTS and n not in LONGEST}
        arguments.check_names(self.spec, mine)
        sizes = arguments.check_tensors(self._declared, q, k, v, mine, sequences)
        rows = _longest("max_seqlen_q", given.get("max_seqlen_q"), sizes.q_len)
        return replace(sizes, q_len=rows, k_len=_longest("max_seqlen_k", given.get("max_seqlen_k"), sizes.k_len))

    def _validate(self, q: torch.Tensor, k: torch.Tensor, given: Mapping[str, Any]) -> None:
        ends = {"cu_seqlens_q": ("total_q", q.shape[0]), "cu_seqlens_k": ("total_k", k.shape[0])}
        for name, (total, last) in ends.items():
            starts = given[name].tolist()
            if starts[0] != 0:
                raise ValueError(f"{name} must start at 0, and starts at {starts[0]}")
            falls = next((i for i in range(1, len(starts)) if starts[i] < starts[i - 1]), None)
            if falls is not None:
                before, here = starts[falls - 1 : falls + 1]
                raise ValueError(f"{name} must not fall, and goes from {before} to {here} at index {falls}")
            if starts[-1] != last:
                raise ValueError(f"{name} must end at {total}, {last}, and ends at {starts[-1]}")
        for name, of in LONGEST.items():
            longest = int(given[of].diff().max()) if given[of].shape[0] > 1 else 0
            if given.get(name) is not None and given[name] < longest:
                raise ValueError(f"{name} is {given[name]}, and {of} has a sequence of {longest}")
        if self.spec.scale_blocks is not None and len(given["cu_seqlens_k"]) > 1:
            free = {self.spec.scale_blocks[0]: given["k_scales"].shape[-1]}
            arguments.check_scales(self.spec.scale_blocks, free, int(given["cu_seqlens_k"].diff().max()))
        arguments.check_sorted(self.spec, given, {"row": given["cu_seqlens_q"], "k": given["cu_seqlens_k"]})
        if self._check_sequence is not None:
            sizes = arguments.check_tensors(self._declared, q, k, k, given, given["cu_seqlens_q"].shape[0] - 1)
            values = tuple(
                arguments.scalar(p, given.get(p.name, p.default), divides) for *_, p, divides, _ in self._scalars
            )
            for q_len, k_len in dict.fromkeys(zip(*(given[name].diff().tolist() for name in STARTS), strict=True)):
                self._check_sequence(values, replace(sizes, q_len=q_len, k_len=k_len).named())


def _restored(text: str, filename: str, consts: Mapping[str, int], target: str | None) -> Packed:
    """What a pickle leads to."""
    return Packed(frontend.packed(frontend.parse(text, filename)), consts, target)


def _contiguous(given: Mapping[str, Any]) -> dict[str, Any]:
    starts = ((n, given.get(n)) for n in STARTS)
    dense = {n: x for n, x in starts if isinstance(x, torch.Tensor) and x.layout == torch.strided}
    return {**given, **{n: x.contiguous() for n, x in dense.items()}}


def _check_starts(name: str, x: Any, q: torch.Tensor) -> None:
    """What can be told of where sequences start without waiting for the device. TypeError or ValueError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be an int32 tensor [B + 1], and is {arguments.kind_of(x)}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, and has the layout {x.layout}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, and is {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, and is on {x.device}")
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} must be [B + 1], and has shape {list(x.shape)}")


def _longest(name: str, given: Any, total: int) -> int:
    """How long a sequence can be: what the call promises, else all together."""
    if given is None:
        return total
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} must be an int, and is {arguments.kind_of(given)}")
    if given < 0:
        raise ValueError(f"{name} must be at least 0, and is {given}")
    return min(given, total)
