"""What a call can return of each row beside its lse: its greatest score, the entropy of its weights, its pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from attncc.ir import SUM, AttentionSpec

if TYPE_CHECKING:
    from attncc.frontend.parse import Parsed

SPARSE = ("sparsemax", "entmax")
UNDIVIDED = ("sigmoid", "relu", "none", "custom")
KEY = "layout.rows"


def reporting(parsed: Parsed, wanted: Collection[str]) -> Parsed:
    """The same attention whose calls return these REPORTS. Raises SpecError for what has no meaning or is not built."""
    from attncc.frontend.canonical import canonical
    from attncc.frontend.parse import parse
    from attncc.frontend.unbuilt import refuse_unbuilt

    made = parse(canonical(parsed.spec.reporting(wanted)), parsed.filename)
    refuse_unbuilt(made)
    return made


def meaningless(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Key of the place, what is wrong, and a hint."""
    policy = spec.softmax.policy
    if "entropy" in spec.reports and policy in UNDIVIDED and not _divides(spec):
        what = f"the weights of softmax {policy} do not add up to 1, so that they have no entropy"
        yield KEY, what, "max and pairs are there for every weight"


def unbuilt(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """Key of the place, and what it is."""
    if not spec.reports:
        return
    if spec.ragged:
        yield KEY, "layout rows of packed sequences"
    if spec.softmax.policy in SPARSE:
        yield KEY, f"layout rows beside softmax {spec.softmax.policy}"
    elif "entropy" in spec.reports and _divides(spec) and spec.softmax.exponent is None:
        yield KEY, "the entropy of weights that are no exponentials"


def _divides(spec: AttentionSpec) -> bool:
    """Whether weights of one's own are divided by their sum."""
    return dict(spec.softmax.named).get("divide") == SUM
