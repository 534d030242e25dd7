"""Names in generated code: a spec's own wherever possible, never one that the file uses for something else."""

from __future__ import annotations

import re
from collections.abc import Iterable


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


def reserved(template_text: str) -> frozenset[str]:
    """Every identifier in the Python of a template's text: what a spec's names must keep clear of."""
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", "_", template_text, flags=re.DOTALL)
    return frozenset(re.findall(r"[A-Za-z_]\w*", re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)))


def read_name(tensor: str, variables: Iterable[str]) -> str:
    """A speaking name for an element that was read at these plain variables: `doc_q`, `slopes_h`, `bias_row_k`."""
    plain = list(variables)
    finer = [i for i in plain if i not in ("b", "h", "h_kv")]
    return "_".join([tensor, *(finer or plain[-1:] or ["at"])])
