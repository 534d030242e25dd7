"""Arguments that several commands share, and how their text becomes values."""

from __future__ import annotations

import ast
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import click

from attncc.errors import EnvironmentFault
from attncc.pipeline import DTYPES, SIZES, Number, Request
from attncc.source import MAX_BYTES, decode

ALGORITHMS = ("standard", "fa1", "fa2", "fa3")
FILE = click.Path(exists=True, dir_okay=False, allow_dash=True, readable=True)
SHAPE_HELP = (
    "Sizes of the call, comma-separated; left out: batch=1, heads=16, kv_heads=heads, q_len and k_len=4096, "
    "head_dim=128, head_dim_v=head_dim."
)


@dataclass(frozen=True)
class Values:
    """What --set gave: single numbers, and contents of tensors (nested lists, or the path of a .npy file)."""

    scalars: dict[str, Number]
    tensors: dict[str, Any]


class Sizes(click.ParamType):
    """`batch=2,heads=16`: some of the sizes, each once."""

    name = "NAME=SIZE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in value.split(","))):
            name, equals, number = (s.strip() for s in part.partition("="))
            if name not in SIZES:
                self.fail(f"{part!r}: the sizes are {', '.join(SIZES)}, given as heads=8", param, ctx)
            if not equals or not number.isascii() or not number.isdigit() or len(number) > 10 or int(number) < 1:
                self.fail(f"{part!r}: a size is a whole number from 1 to 2147483647", param, ctx)
            if name in sizes:
                self.fail(f"{name} is given twice", param, ctx)
            sizes[name] = int(number)
        return sizes


class Assignment(click.ParamType):
    """`window=1024`, `scale=0.5`, `length=100,37`, `doc=@ids.npy`."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = (s.strip() for s in value.partition("="))
        if not equals or not name.isidentifier() or not text:
            self.fail(f"{value!r}: give a parameter as name=value", param, ctx)
        if text.startswith("@"):
            return name, Path(text[1:])
        try:
            return name, parse_value(text)
        except ValueError:
            self.fail(
                f"{value!r}: a value is a number, a list such as 3,5 or [[1, 0], [0, 1]], or @FILE.npy", param, ctx
            )


def parse_value(text: str) -> Any:
    """A number, true, false, or a (nested) list of them. Raises ValueError."""
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if len(text) > 1 << 20:
        raise ValueError("too long")
    try:
        value = ast.literal_eval(f"[{text}]" if "," in text and text[0] not in "[(" else text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("not a literal") from None
    if not _is_numeric(value):
        raise ValueError("not numbers")
    return value


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_is_numeric, value))
    return isinstance(value, (bool, int, float)) and value - value == 0 and abs(value) < 2**63


def shape_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--shape, --dtype and --set: what a plan and the numbers of a mask depend on."""
    options = (
        click.option("--shape", type=Sizes(), default="", help=SHAPE_HELP),
        click.option("--dtype", type=click.Choice(DTYPES), help="Type of q, k, v; left out: the spec's, else bf16."),
        click.option(
            "--set", "assigned", type=Assignment(), multiple=True,
            help="Value of a parameter: a number, a list, or @FILE.npy for a tensor's contents. Repeatable.",
        ),
    )  # fmt: skip
    return reduce(lambda made, option: option(made), reversed(options), command)


def target_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--target", "targets", multiple=True, metavar="NAME",
        help="sm_90, gfx942, cpu, ...; repeatable. Left out: this machine's GPU, or where there is none, cpu.",
    )(command)  # fmt: skip


def layout_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--layout", type=click.Choice(("dense", "ragged")),
        help="How q, k and v lie: ragged is for sequences packed one behind another. Left out: the spec's own.",
    )(command)  # fmt: skip


def algorithm_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--algorithm", type=click.Choice(ALGORITHMS),
        help="Of the forward pass on GPUs, in place of what SPEC pins. Left out: that, else the planner's choice.",
    )(command)  # fmt: skip


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="The same facts as one JSON document.")(command)


def values_of(assigned: tuple[tuple[str, Any], ...]) -> Values:
    """Sort --set into numbers and contents. Raises click.UsageError for a name given twice."""
    scalars: dict[str, Number] = {}
    tensors: dict[str, Any] = {}
    for name, value in assigned:
        if name in scalars or name in tensors:
            raise click.UsageError(f"--set gives {name} twice")
        kind = scalars if isinstance(value, (bool, int, float)) else tensors
        kind[name] = value
    return Values(scalars, tensors)


def read_spec(path: str) -> str:
    """The text of a spec's file, `-` for standard input. Raises SpecError for what is no UTF-8, EnvironmentFault."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as fault:
        raise EnvironmentFault(f"{shown(path)} cannot be read: {fault.strerror}") from None
    return decode(data, shown(path))


def shown(path: str) -> str:
    """A path for a message: `-` is <stdin>, bytes that are no text are escaped."""
    return "<stdin>" if path == "-" else click.format_filename(path)


def request(
    path: str, target: str, shape: dict[str, int], dtype: str | None, values: Values, layout: str | None = None,
    passes: tuple[str, ...] = ("forward",), algorithm: str | None = None,
) -> Request:  # fmt: skip
    """What the options ask of one spec's file."""
    return Request(
        text=read_spec(path), filename=shown(path), target=target, sizes=tuple(sorted(shape.items())), dtype=dtype,
        values=tuple(sorted(values.scalars.items())), layout=layout, passes=tuple(dict.fromkeys(passes)),
        algorithm=algorithm,
    )  # fmt: skip


def is_regular(path: str) -> bool:
    return stat.S_ISREG(Path(path).stat().st_mode)


def targets_of(named: tuple[str, ...]) -> tuple[str, ...]:
    """The targets asked for, each once; none: this machine's GPU, or cpu, and a line on standard error says so."""
    from attncc.commands.console import tell

    if named:
        return tuple(dict.fromkeys(named))
    from attncc.runtime.machine import local_target
    from attncc.targets import TARGETS

    found = local_target()
    if found in TARGETS:
        tell(f"attncc: for this machine's GPU, {found}; --target names another")
        return (found,)
    why = f"this machine's GPU, {found}, is not among the targets" if found else "no GPU here"
    tell(f"attncc: {why}: for the CPU; --target sm_90 and others name a GPU")
    return ("cpu",)
