"""Lowering for the CPU program: where each value is worked out, and the lines that do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attncc.codegen.naming import Names, read_name
from attncc.codegen.printer import ATOM, PYTHON, TERM, TORCH, Form, Printer
from attncc.ir import (
    BUILTINS, AttentionSpec, Const, Expr, Op, Read, Summary, Var, Visits, children, conjunction, names, rewrite, tensors,
)  # fmt: skip

TORCH_TILES = replace(TORCH, forms={**TORCH.forms, "float": Form("real({0}, dtype)", helper="real")})
SPELLED = {"b_len": "B", "h_len": "H"}  # the other built-ins keep their names
UNITS = ("program", "row", "key", "pair")
PLAIN = ("b", "h", "row", "k")  # the order of a score tile's dimensions
SLICES = {"b": "batch", "h": "heads", "row": "rows", "k": "keys"}


def unit(e: Expr) -> str:
    """The coarsest unit on which `e` is one number: program, row, key or pair."""
    found = {BUILTINS[n][1] for n in names(e) if n in BUILTINS}
    if "pair" in found or {"row", "key"} <= found:
        return "pair"
    return "key" if "key" in found else "row" if "row" in found else "program"


@dataclass
class CpuLowering:
    """Puts the spec's expressions into lines. Ask for scale, start, scores, weight, then masks: what the scores need is
    worked out for every tile, what only the mask needs for masked tiles alone."""

    spec: AttentionSpec
    spelled: Mapping[str, str]
    sections: dict[str, list[str]] = field(default_factory=lambda: {"program": [], "row": []})

    def __post_init__(self) -> None:
        self.known: dict[Expr, str] = {}
        self.reads: dict[Read, str] = {}
        self.printer = Printer(
            TORCH_TILES, names={**self.spelled, **SPELLED}, reads=self.reads, known=self.known, positive=self._positive
        )
        self.free = Names({*TAKEN_LATE, *self.spelled.values()})
        self.lets = {e: n for n, e in reversed(self.spec.lets) if isinstance(e, Op) and "s" not in names(e)}
        self.scalars = {p.name for p in self.spec.scalars}
        policy = self.spec.softmax
        self.sink = {"sink": policy.args[:1], "off_by_one": (Const(0.0),)}.get(policy.policy, ())
        self.sink_expr: Expr | None = self.sink[0] if self.sink else None
