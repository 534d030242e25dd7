"""What a cache entry is the answer to: keys as frozen data, written in one canonical form and hashed.

A request is what a user typed (text, target, sizes, values) and answers with a listing; a kernel is what the planner
made of it and answers with a source file; a binary is what Triton made of one kernel in it. Two requests that lead to
one plan share one kernel.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Union

# Variables of Triton that change the code it makes, and so the resources that a listing names.
CODE_VARIABLES = (
    "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "TRITON_DEFAULT_FP_FUSION", "TRITON_DISABLE_LINE_INFO",
    "TRITON_F32_DEFAULT", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_PTXAS_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",
)  # fmt: skip
SOURCE_SUFFIXES = (".py", ".lark", ".jinja")


@dataclass(frozen=True)
class Toolchain:
    """What makes code, besides a spec and a plan: versions, hashes of our own texts, flags."""

    attncc: str
    triton: str
    templates: str
    sources: str
    flags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RequestKey:
    """A request as it was typed. `sizes` and `values` are sorted pairs; dtype None leaves the type to the spec."""

    kind: ClassVar[str] = "request"
    spec: str
    target: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str | None
    values: tuple[tuple[str, int | float | bool], ...]
    toolchain: Toolchain
    layout: str | None = None
    passes: tuple[str, ...] = ("forward",)
    algorithm: str | None = None


@dataclass(frozen=True)
class KernelKey:
    """One generated file. `spec` is canonical with its constants baked in; `plan` and `target` are plain data."""

    kind: ClassVar[str] = "kernel"
    spec: str
    consts: tuple[tuple[str, int], ...]
    direction: str  # forward
    plan: Any
    target: Any
    toolchain: Toolchain


@dataclass(frozen=True)
class BinaryKey:
    """One compiled kernel. Pairs are of names and texts; `source` is the digest of the generated file's text."""

    kind: ClassVar[str] = "binary"
    source: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, str], ...]
    target: str
    options: tuple[tuple[str, str], ...]
    triton: str
    variables: tuple[tuple[str, str], ...]  # of the environment, that Triton compiles by


@dataclass(frozen=True)
class SpecKey:
    """A text, and answers with what it means."""

    kind: ClassVar[str] = "spec"
    text: str
    toolchain: Toolchain


@dataclass(frozen=True)
class CallKey:
    """A call's class, and answers with the kernel that serves it, so that no later process plans it again."""

    kind: ClassVar[str] = "call"
    spec: str
    consts: tuple[tuple[str, int], ...]
    target: str
    shape: Any  # its bucket, in plain form
    int_bits: int
    tuned: Any  # choices by pass that stand in for the model's
    aligned: bool  # K and V lie as TMA takes them
    toolchain: Toolchain


@dataclass(frozen=True)
class WinnerKey:
    """Where a measured plan holds: the spec, the device, the bucket of shapes (planner.bucket_of), the pass.

    Not the toolchain: what was measured is kept for good, and taken while it is legal.
    """

    kind: ClassVar[str] = "winner"
    spec: str  # canonical, constants baked in
    device: str
    capability: str
    driver: str
    q_len: int
    head_dim: int
    head_dim_v: int
    dtype: str
    direction: str


Key = Union[RequestKey, KernelKey, BinaryKey, SpecKey, CallKey, WinnerKey]


def plain(value: Any) -> Any:
    """Lists, dicts and scalars that mean the same in JSON. Raises TypeError for what has no such form."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{value} has no canonical form")
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=canonical)
    raise TypeError(f"a {type(value).__name__} has no canonical form")


def canonical(value: Any) -> str:
    """The one text of a value: JSON with sorted names and no spaces."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(kind: str, content: Any) -> str:
    """The name of an entry: 40 hex digits of the sha256 over the kind and the canonical content."""
    return hashlib.sha256(f"{kind}\n{canonical(content)}".encode("ascii")).hexdigest()[:40]


def key_digest(key: Key) -> str:
    return digest(key.kind, key)


def flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`toolchain.triton`, ...: each leaf of a key with its dotted name; a list of pairs opens up by name."""
    if isinstance(content, list) and content and all(_is_pair(p) for p in content):
        content = dict(content)
    if isinstance(content, dict):
        for name in sorted(content):
            yield from flatten(content[name], f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, content


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def differences(old: Any, new: Any) -> list[str]:
    """One line for each field that differs between two keys in plain form."""
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        _difference(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        was, now = old.splitlines(), new.splitlines()
        at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        line = lambda lines: repr(lines[at]) if at < len(lines) else "(no such line)"
        return f"{name}, line {at + 1}: {line(was)} -> {line(now)}"
    short = lambda v: "(absent)" if v is None else repr(v) if len(repr(v)) <= 80 else repr(v)[:77] + "..."
    return f"{name}: {short(old)} -> {short(new)}"


def package_root() -> Path:
    return Path(__file__).resolve().parent.parent


def template_root() -> Path:
    """The templates: inside an installed package, or beside it in a checkout."""
    inside = package_root() / "templates"
    return inside if inside.is_dir() else package_root().parent / "templates"


def tree_hash(root: Path) -> str:
    """One hash over the names and bytes of a folder's sources; about 2 ms for a megabyte."""
    whole = hashlib.sha256()
    for folder, below, names in os.walk(root):
        below[:] = sorted(b for b in below if b != "__pycache__")
        for name in sorted(n for n in names if n.endswith(SOURCE_SUFFIXES)):
            path = Path(folder, name)
            content = path.read_bytes()
            whole.update(f"{path.relative_to(root).as_posix()}\n{len(content)}\n".encode())
            whole.update(content)
    return whole.hexdigest()


def installed_version(package: str) -> str:
    """A distribution's version without importing it; "none" where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def own_version() -> str:
    """attncc's version: the package's own word, or the installed distribution's."""
    import attncc

    return getattr(attncc, "__version__", None) or installed_version("attncc")


def toolchain(flags: Mapping[str, str] | None = None) -> Toolchain:
    """The toolchain of this process: reads our sources and the versions, imports neither triton nor torch."""
    switched = {name: os.environ[name] for name in CODE_VARIABLES if os.environ.get(name)}
    return Toolchain(
        attncc=own_version(),
        triton=installed_version("triton"),
        templates=tree_hash(template_root()),
        sources=tree_hash(package_root()),
        flags=tuple(sorted({**switched, **(flags or {})}.items())),
    )
