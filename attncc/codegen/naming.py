"""Names in generated code: a spec's own wherever possible, never one that the file uses for something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from attncc import pycache
from attncc.codegen.environment import template_root
from attncc.codegen.printer import TORCH, TRITON
from attncc.ir import BUILTINS, AttentionSpec


class Names:
    """Hands out names that are still free. The same requests in the same order give the same names."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def fresh(self, wanted: str) -> str:
        """`wanted`, with as many underscores behind it as it takes."""
        name = wanted
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


# Words that the lowerings write themselves.
WORDS = (
    "keep",
    "masked",
    "full",
    "range",
    "slice",
    "min",
    "max",
    "abs",
    "len",
    "int",
    "bool",
    "float",
    "i",
    "j",
    "tl",
    "tables",
    "scans",
    "every_tables",
    "every_scans",
)

MOST_PARTS = 10  # powers of two in a head of at most 512 columns


@cache
def reserved() -> frozenset[str]:
    """Every identifier in the Python of the templates, and the built-ins: what a spec's names must keep clear of.

    Kept beside Python's compiled modules: searching the templates takes 30 ms, in every process."""
    own = {*BUILTINS, *WORDS, *(f.helper for b in (TRITON, TORCH) for f in b.forms.values() if f.helper)}
    texts = {str(p): p.read_text(encoding="utf-8") for p in sorted(template_root().rglob("*.jinja"))}
    key = repr((Path(__file__).read_text(encoding="utf-8"), sorted(own), texts))
    kept = pycache.load("reserved", key)
    if kept is not None:
        return frozenset(kept.decode().split("\n"))
    found = own | identifiers(texts)
    pycache.keep("reserved", key, "\n".join(sorted(found)).encode())
    return frozenset(found)


def identifiers(texts: Mapping[str, str]) -> set[str]:
    """Those in the Python of templates, which are given by their paths."""
    found: set[str] = set()
    tagged = {"d", "e"}  # names of which there is one for each part of a head, as d_0, d_1
    numbered: set[str] = set()  # names of which there is only one for each of several
    for file, whole in texts.items():
        tagged.update(re.findall(r"(\w+)\{\{ *\w+\.tag", whole))
        numbered.update(re.findall(r"(\w+)_\{\{ *i \}\}", whole))
        text = re.sub(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", "_", whole, flags=re.DOTALL)
        text = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
        if file.endswith("helpers.jinja"):  # what a helper calls its arguments is nobody else's concern
            text = " ".join(re.findall(r"(?:def|class) (\w+)", text))
        found.update(re.findall(r"[A-Za-z_]\w*", text))
    return found | tagged | {f"{name}_{i}" for name in tagged | numbered for i in range(MOST_PARTS)}


def parameter_names(spec: AttentionSpec) -> dict[str, str]:
    """The keyword of each parameter, and the name of each free axis, in every file of this spec."""
    fresh = Names(reserved())
    return {n: fresh.fresh(n) for n in (*(p.name for p in spec.params), *spec.free_axes)}


def read_name(tensor: str, variables: Iterable[str]) -> str:
    """A speaking name for an element that was read at these plain variables: `doc_q`, `slopes_h`, `bias_row_k`."""
    plain = list(variables)
    finer = [i for i in plain if i not in ("b", "h", "h_kv")]
    return "_".join([tensor, *(finer or plain[-1:] or ["at"])])
