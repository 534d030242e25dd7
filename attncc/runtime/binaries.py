"""What Triton compiles of a generated file, kept in the cache beside the source: a second process compiles nothing.

Triton keeps binaries too, under a key for which it reads all of its own files, up to a second in each process; ours
names the version, also where Triton compiles for us. Only the kernels of the file are concerned, each through its own
object: nothing of Triton is changed for others, and where a person has turned on one of its ways to look into
compilation, Triton does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import JITFunction

from attncc.runtime import headstart
from attncc.runtime.cache import Cache, Entry
from attncc.runtime.keys import BinaryKey
from attncc.runtime.loader import lasting

INSPECTIONS = (  # of Triton's switches: what asks to see, or to change, how a kernel is compiled
    (knobs.compilation, ("override", "dump_ir", "always_compile", "use_ir_loc", "listener")),
    (knobs.runtime, ("add_stages_inspection_hook",)),
)
KEY = "get_cache_key"  # the function that Triton's compile gets the key of its cache from, in 3.6 to 3.9
DEFAULTS = r",transposed=False|,fp4_padded=False|,cga_layout=\[\]"  # of the layouts in a descriptor's type


@dataclass(frozen=True)
class Binaries:
    """Those of one generated file, `source` being the digest of its text."""

    cache: Cache
    source: str

    def attach(self, module: ModuleType) -> None:
        """From now on the kernels of the file, loaded as `module`, are compiled by `compile`."""
        for kernel in own_kernels(module):
            kernel.device_caches.default_factory = self._bind(kernel, kernel.create_binder)

    def _bind(self, kernel: Any, create: Callable[[], Any]) -> Callable[[], Any]:
        """Triton asks for this once for each kernel and device, and sets by whom the kernel is compiled."""

        def create_binder() -> Any:
            made = create()
            kernel.compile = self._compile_to_launch
            return made

        return create_binder

    def _compile_to_launch(self, src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        return self.compile(src, target, options, headstart.launcher, **more)

    def compile(
        self, src: Any, target: Any = None, options: Any = None,
        beside: Callable[[Any], Callable[[], Any]] = lambda src: lambda: None, **more: Any,
    ) -> Any:  # fmt: skip
        """As `triton.compile` of an ASTSource for a target: from the cache, else compiled and kept there.

        `beside` is what to begin with a compilation, and gives what waits for it."""
        if any(getattr(place, name, None) for place, names in INSPECTIONS for name in names):
            return triton.compile(src, target=target, options=options, **more)
        made: list[Any] = []

        def build(folder: Path) -> None:
            wait = beside(src)
            with lasting():  # of what a compilation makes there is little to collect
                made.append(_by_version()(src, target=target, options=options, **more))
            wait()
            wanted = (".json", f".{make_backend(target).binary_ext}")
            for name, path in made[0].metadata_group.items():
                if name.endswith(wanted):
                    (folder / name).write_bytes(Path(path).read_bytes())

        entry = self.cache.get_or_build(self._key(src, target, options), build)
        return made[0] if made else _load(src, entry) or triton.compile(src, target=target, options=options, **more)

    def _key(self, src: Any, target: Any, options: Any) -> BinaryKey:
        """The same for a launch and for a cross-compilation of the same kernel."""
        whole = make_backend(target).parse_options(dict(options or {})).__dict__
        attributes = {path: sorted(map(str, found)) for path, found in src.attrs.items() if found}
        return BinaryKey(
            source=self.source, kernel=src.name,
            signature=tuple((n, _type(src.signature[n])) for n in src.fn.arg_names),
            constants=tuple((_path(p), repr(value)) for p, value in sorted(src.constants.items())),
            attributes=tuple((_path(p), " ".join(found)) for p, found in sorted(attributes.items())),
            target=f"{target.backend} {target.arch} {target.warp_size}",
            options=tuple((name, repr(value)) for name, value in sorted(whole.items())),
            triton=triton.__version__, variables=tuple(sorted(get_cache_invalidating_env_vars().items())),
        )  # fmt: skip


def _by_version() -> Callable[..., Any]:
    """`triton.compile` with another key for Triton's own cache: a copy of the function, which alone sees that."""
    own = triton.compile
    code = getattr(own, "__code__", None)
    if code is None or KEY not in code.co_names:
        return own
    return FunctionType(code, {**own.__globals__, KEY: _triton_key}, own.__name__, own.__defaults__, own.__closure__)


def _triton_key(src: Any, backend: Any, options: Any, env_vars: Any) -> str:
    """What Triton's own key has, but for the hash of Triton's files."""
    return f"attncc {triton.__version__}-{src.hash()}-{backend.hash()}-{options.hash()}-{sorted(env_vars.items())}"


def own_kernels(module: ModuleType) -> list[Any]:
    """The JITFunctions of a generated file."""
    return [x for x in vars(module).values() if isinstance(x, JITFunction) and x.module == module.__name__]


def _type(type_: Any) -> str:
    """A type's text without what a launch writes out and a signature by hand leaves to its defaults."""
    return re.sub(DEFAULTS, "", str(type_).replace(" ", ""))


def _path(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place))


def _load(src: Any, entry: Entry) -> Any:
    """Triton's own object around the kept files; None where they changed after they were compared."""
    try:
        kernel = CompiledKernel(src, {name: str(entry.path / name) for name in entry.files}, entry.digest)
    except (OSError, ValueError, KeyError, StopIteration):
        return None
    return kernel if kernel.kernel in entry.files.values() else None
