"""Contents of a spec's tensors as the command line gives them, and what the names in its expressions then mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attncc.errors import EnvironmentFault
from attncc.pipeline import Number, RequestError

if TYPE_CHECKING:
    from attncc.analysis import Env
    from attncc.ir import AttentionSpec, Param, Shape

Array = np.ndarray[Any, Any]
WORD = 32  # bits in one element of a packed `bit` tensor


@dataclass(frozen=True)
class Contents:
    """Numbers and arrays by parameter, extents of free axes; `missing` names the parameters that nothing is known of.

    A `bit` tensor that came as booleans is not packed; those in `packed` hold 32 bits to an i32, the lowest first.
    """

    scalars: Mapping[str, Number]
    tensors: Mapping[str, Array]
    free: Mapping[str, int]
    packed: frozenset[str] = field(default_factory=frozenset)
    missing: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        return {**self.scalars, **self.free, **self.tensors}


def contents(spec: AttentionSpec, shape: Shape, scalars: Mapping[str, Number], given: Mapping[str, Any]) -> Contents:
    """Check what --set gave against the axes of the spec. Raises RequestError that names the parameter and the axis."""
    params = {p.name: p for p in spec.tensors}
    for name in given:
        if name not in params:
            raise RequestError(f"{spec.name} has no tensor parameter {name!r}: it has {', '.join(params) or 'none'}")
    free = {axis: int(scalars[axis]) for axis in spec.free_axes if axis in scalars}
    tensors: dict[str, Array] = {}
    packed = set()
    for name, value in given.items():
        array = _array(params[name], value)
        if params[name].element == "bit" and array.dtype != bool:
            packed.add(name)
        _check_axes(params[name], array, name in packed, shape, free)
        tensors[name] = array
    known = {p.name: scalars[p.name] for p in spec.scalars if p.name in scalars}
    missing = [p.name for p in spec.params if p.name not in tensors and p.name not in known]
    return Contents(known, tensors, free, frozenset(packed), tuple(missing))


def _array(param: Param, value: Any) -> Array:
    if isinstance(value, Path):
        try:
            value = np.load(value, allow_pickle=False)
        except OSError as fault:
            raise EnvironmentFault(f"{value} cannot be read: {fault.strerror or fault}") from None
        except (ValueError, EOFError):
            raise RequestError(f"{value} is no .npy file") from None
    try:
        array = np.asarray(value)
    except ValueError:
        raise RequestError(f"{param.name}: the lists are of different lengths") from None
    kind = {"bool": "b", "int": "iu", "float": "iuf"}[param.type]
    if param.type == "bool" and array.dtype.kind in "iu":
        if param.element == "bool" and not np.isin(array, (0, 1)).all():
            raise RequestError(f"{param.name} is bool: give 0 and 1, or true and false")
        return array.astype(bool) if param.element == "bool" else array.astype(np.int32)
    if array.dtype.kind not in kind:
        raise RequestError(f"{param.name} is {param.element}, and {array.dtype} was given")
    return array


def _check_axes(param: Param, array: Array, packed: bool, shape: Shape, free: dict[str, int]) -> None:
    called = call_axes(shape)
    if array.ndim != len(param.axes):
        axes = ", ".join(map(str, param.axes))
        raise RequestError(f"{param.name} has the axes [{axes}], and {array.ndim} dimensions were given")
    for i, axis in enumerate(param.axes):
        extent = array.shape[i]
        last = packed and i == array.ndim - 1
        wanted = axis if isinstance(axis, int) else called.get(axis, free.get(axis))
        if wanted is None:
            free[str(axis)] = extent * WORD if last else extent
        elif (-(-wanted // WORD) if last else wanted) != extent:
            raise RequestError(f"{param.name}: axis {axis} is {wanted} long in this call, and {extent} came")


def unknown_in_mask(spec: AttentionSpec, known: Contents) -> tuple[str, ...]:
    """Parameters and free axes that the mask reads and nothing is known of."""
    from attncc.ir import conjunction, names, tensors

    mask = conjunction(spec.masks)
    read = (names(mask) | tensors(mask)) if mask is not None else frozenset()
    axes = [axis for axis in spec.free_axes if axis not in known.free]
    return tuple(name for name in (*known.missing, *axes) if name in read)


def example(spec: AttentionSpec, shape: Shape, known: Contents, seed: int) -> Contents:
    """The same with what is missing drawn at random, as `attncc check` draws it; ints along positions are sorted.

    Free axes get extents of their own unless something was given for one; then that is refused. Imports torch.
    """
    from attncc.runtime.draw import Draw

    if known.free:
        raise RequestError(
            f"--example draws every tensor over the free axis {next(iter(known.free))}: give all or none"
        )
    drawn = Draw(spec, seed, known.scalars).params(shape)
    scalars, tensors, free = dict(known.scalars), dict(known.tensors), dict(known.free)
    packed = set(known.packed)
    for param in spec.params:
        if param.name not in known.missing:
            continue
        if not param.is_tensor:
            scalars[param.name] = drawn[param.name]
            continue
        value = drawn[param.name]
        array = (value.float() if param.type == "float" else value).numpy()
        if param.type == "int" and param.axes[-1] in ("k", "row"):
            array = np.sort(array, axis=-1)
        packed |= {param.name} if param.element == "bit" else set()
        _check_axes(param, array, param.element == "bit", shape, free)
        tensors[param.name] = array
    return Contents(scalars, tensors, free, frozenset(packed))


def call_axes(shape: Shape) -> dict[str, int]:
    return {"b": shape.batch, "h": shape.heads, "h_kv": shape.kv_heads, "row": shape.q_len, "k": shape.k_len}


def environment(spec: AttentionSpec, shape: Shape, known: Contents, batch: int, head: int) -> Env:
    """What the names of the expressions mean in one batch entry and head; positions are put in with `plus`."""
    from attncc.analysis import Env

    fixed = {
        "b": batch, "h": head, "h_kv": head // (shape.heads // shape.kv_heads), "b_len": shape.batch,
        "h_len": shape.heads, "q_len": shape.q_len, "k_len": shape.k_len,
    }  # fmt: skip
    return Env({**fixed, **known.scalars, **known.free}, known.tensors, known.packed)
