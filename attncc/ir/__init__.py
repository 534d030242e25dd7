"""Frozen data that the stages hand to one another."""

from attncc.ir.expr import (
    COMPARISON, FUNCTIONS, OPERATORS, Const, Expr, Op, Read, Type, Var,
    children, conjunction, names, rewrite, substitute, tensors, walk,
)  # fmt: skip
from attncc.ir.plan import KernelPlan, Shape
from attncc.ir.spec import (
    BUILTINS, CALL_AXES, ELEMENTS, POLICIES, AttentionSpec, Layout, Param, Precision, Schedule, Softmax,
)  # fmt: skip
from attncc.ir.visits import Segment, Summary, Visits

__all__ = [
    "BUILTINS", "CALL_AXES", "COMPARISON", "ELEMENTS", "FUNCTIONS", "OPERATORS", "POLICIES",
    "AttentionSpec", "Const", "Expr", "KernelPlan", "Layout", "Op", "Param", "Precision", "Read", "Schedule", "Segment",
    "Shape", "Softmax", "Summary", "Type", "Var", "Visits",
    "children", "conjunction", "names", "rewrite", "substitute", "tensors", "walk",
]  # fmt: skip
