"""A spec that was read, and the way to read one: what reads is imported when there is something to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attncc.errors import Diagnostic, Span
from attncc.ir import AttentionSpec


@dataclass(frozen=True)
class Parsed:
    """A right spec with its places.

    `spans` is keyed by what stands there: attention, softmax, align, scale, weight, dropout, mask:0, score:0, let:NAME,
    param:NAME, precision.inputs, schedule.algorithm, schedule.sm_90.algorithm, layout.kv, and so on.
    """

    spec: AttentionSpec
    spans: Mapping[str, Span] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()
    text: str = ""
    filename: str = "<spec>"


def parse(text: str, filename: str = "<spec>") -> Parsed:
    """The meaning of a spec's text. Raises SpecError with every fault that was found, in the order of the text."""
    from attncc.frontend.meaning import meaning

    return meaning(text, filename)
