"""What `import attncc` offers: the road from a spec to something that PyTorch calls, one line a stage."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from attncc import frontend, pipeline
from attncc.errors import SpecError
from attncc.runtime import specs
from attncc.runtime.attention import Attention
from attncc.runtime.device import INTERPRETER
from attncc.runtime.merge import merge
from attncc.runtime.quantise import Quantised, quantize
from attncc.source import decode


def compile(text: str, filename: str = "<spec>", *, target: str | None = None, **consts: int) -> Attention:
    """Compile a spec given as text; `consts` are its `const` parameters.

    `target` is left out (the device of the tensors decides), or "interpreter": then the Triton kernel runs on CPU
    tensors in Triton's interpreter, which TRITON_INTERPRET=1 must have turned on before triton is imported.
    The Attention takes q, k, v and the spec's other parameters: see Attention.__call__ for shapes, dtypes and errors.
    Raises SpecError with every fault of the spec, TypeError for a text that is no str and for constants that are
    missing, unknown or no ints, and ValueError for another target.
    """
    if not isinstance(text, str):
        raise TypeError(f"the text of a spec must be a str, and is of type {type(text).__name__}")
    if target not in (None, INTERPRETER):
        raise ValueError(f"target is left out or {INTERPRETER!r}, and is {target!r}: the tensors' device decides")
    reading = specs.read(text, filename)
    pipeline.refuse(reading.parsed)
    kind: type[Attention] = Attention
    if reading.parsed.spec.precision.is_eight_bit:
        from attncc.runtime.eight import EightBit  # which takes a second: PyTorch's compiler comes with it

        kind = EightBit
    attention = kind(reading.parsed, _consts(reading.parsed, consts), target)
    attention.kernels.begin(reading)
    return attention


def load(path: str | PathLike[str], *, target: str | None = None, **consts: int) -> Attention:
    """Compile the spec in a file; see `compile`. Raises OSError where it cannot be read, SpecError for no UTF-8."""
    return compile(decode(Path(path).read_bytes(), str(path)), str(path), target=target, **consts)


def _consts(parsed: frontend.Parsed, consts: Mapping[str, Any]) -> dict[str, int]:
    """The values of `const` parameters as Python ints, checked."""
    known = {p.name: p for p in parsed.spec.consts}
    unknown = [name for name in consts if name not in known]
    if unknown:
        listed = ", ".join(known) or "none"
        raise TypeError(f"{parsed.spec.name} has no const parameter {', '.join(map(repr, unknown))}: it has {listed}")
    for name, value in consts.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an int, and is {value!r}")
    missing = [n for n, p in known.items() if p.default is None and n not in consts]
    if missing:
        asked, several = ", ".join(f"{n}=..." for n in missing), "s" if len(missing) > 1 else ""
        raise TypeError(f"{parsed.spec.name} needs its const parameter{several}: attncc.load(..., {asked})")
    return {name: int(value) for name, value in consts.items()}


__all__ = ["Attention", "Quantised", "SpecError", "compile", "load", "merge", "quantize"]
