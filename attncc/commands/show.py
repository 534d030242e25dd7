"""`attncc show`: the mask as a picture, with its tile grid."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncc.commands.console import count, progress, say
from attncc.commands.options import FILE, layout_option, request, shape_option, values_of
from attncc.pipeline import RequestError

if TYPE_CHECKING:
    from attncc.commands.contents import Contents
    from attncc.commands.picture import Keep, Survey
    from attncc.pipeline import Planned


class Range(click.ParamType):
    """`100:200`, `:64`, `-64:`: positions, the end left out; negative ones count from the end."""

    name = "BEGIN:END"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        parts = value.split(":")
        if len(parts) != 2:
            self.fail(f"{value!r}: give a range as 100:200, :64 or -64:", param, ctx)
        try:
            begin, end = (int(p) if p.strip() else None for p in parts)
        except ValueError:
            self.fail(f"{value!r}: give a range as 100:200, :64 or -64:", param, ctx)
        return begin, end


class Tile(click.ParamType):
    """`128,64`: rows and keys of a tile, powers of two."""

    name = "ROWS,KEYS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = value.replace("x", ",").split(",")
        sizes = [int(p) for p in parts if p.isascii() and p.isdigit() and len(p) < 8]
        if len(parts) != 2 or len(sizes) != 2 or any(s < 1 or s & (s - 1) for s in sizes):
            self.fail(f"{value!r}: give two powers of two, such as 128,64", param, ctx)
        return sizes[0], sizes[1]


@click.command("show", short_help="Draw the mask with its tile grid")
@click.argument("spec", type=FILE)
@layout_option
@shape_option
@click.option("--target", metavar="NAME", help="Whose plan gives the tiles; left out: this machine's GPU, else cpu.")
@click.option("--tile", type=Tile(), help="Another tile than the plan's.")
@click.option("--rows", type=Range(), default=":", help="Zoom: which rows.")
@click.option("--keys", type=Range(), default=":", help="Zoom: which keys.")
@click.option("--batch", type=click.IntRange(0), default=0, help="Which batch entry.")
@click.option("--head", type=click.IntRange(0), default=0, help="Which head.")
@click.option(
    "--example", type=click.IntRange(0, 2**63 - 1), metavar="SEED", help="Draw what --set leaves open at random."
)
@click.option("--png", type=click.Path(dir_okay=False), help="Write a PNG (needs matplotlib: attncc[plot]).")
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII characters.")
def command(
    spec: str, layout: str | None, shape: dict[str, int], dtype: str | None, assigned: tuple[tuple[str, Any], ...],
    target: str | None,
    tile: tuple[int, int] | None, rows: tuple[int | None, int | None], keys: tuple[int | None, int | None],
    batch: int, head: int, example: int | None, png: str | None, plain: bool,
) -> None:  # fmt: skip
    """Draw which keys (across) each row (down) sees, and the tiles that a kernel skips, masks, or takes whole.

    \b
        attncc show causal.attn --shape q_len=512,k_len=512
        attncc show window.attn --set window=256 --rows 1000:1100 --keys 700:1100
        attncc show padding.attn --shape batch=2,k_len=256 --set length=100,256 --batch 1
        attncc show document.attn --example 1 --png document.png
    """
    from attncc import pipeline
    from attncc.commands import picture
    from attncc.runtime.machine import local_target
    from attncc.targets import TARGETS

    values = values_of(assigned)
    local = local_target()
    goal = target or (local if local in TARGETS else None) or "cpu"
    planned = pipeline.plan(request(spec, goal, shape, dtype, values, layout))
    known = _known(planned, values.tensors, example)
    for name, chosen, limit in (("--batch", batch, planned.shape.batch), ("--head", head, planned.shape.heads)):
        if chosen >= limit:
            raise RequestError(f"{name} {chosen}: there are {limit}, counted from 0")
    lengths = planned.shape.q_len, planned.shape.k_len
    chosen_tile = tile or (planned.choice.plan.tile_q, planned.choice.plan.tile_k)
    ranges = _clip(rows, lengths[0], "--rows"), _clip(keys, lengths[1], "--keys")
    width, height = shutil.get_terminal_size((100, 40))
    room = (512, 512) if png else (max(height - 8, 16), max(width - len(str(lengths[0])) - 2, 16))
    with progress() as shown:
        shown.stage("counting pairs")
        found = picture.survey(
            keeper(planned, known, batch, head), *picture.windows(*ranges, lengths, chosen_tile, room)
        )
    title = _title(planned, batch, head, chosen_tile, None if tile else goal)
    if png:
        picture.save_png(found, Path(png), title)
        say(f"wrote {png}")
        return
    looks = picture.ASCII_LOOKS if plain or not _can_print(picture.LOOKS) else picture.LOOKS
    say(title)
    for line in picture.draw(found, looks):
        say(line.rstrip())
    say(_legend(found, looks))


def keeper(planned: Planned, known: Contents, batch: int, head: int) -> Keep:
    """The mask of one batch entry and head as a function of rows and keys."""
    import numpy as np

    from attncc.analysis import evaluate
    from attncc.commands.contents import environment
    from attncc.ir import conjunction

    mask = conjunction(planned.spec.masks)
    env = environment(planned.spec, planned.shape, known, batch, head)
    shift = planned.shape.k_len - planned.shape.q_len if planned.spec.align == "end" else 0

    def keep(rows: Any, keys: Any) -> Any:
        if mask is None:
            return np.ones((1, 1), bool)
        return np.asarray(evaluate(mask, env.plus(row=rows[:, None], q=rows[:, None] + shift, k=keys[None, :])))

    return keep


def _known(planned: Planned, given: dict[str, Any], example: int | None) -> Contents:
    """What is known of the parameters; those that the mask reads must be. Raises RequestError that names one."""
    from attncc.commands import contents

    known = contents.contents(planned.spec, planned.shape, planned.values, given)
    unknown = contents.unknown_in_mask(planned.spec, known)
    if not unknown:
        return known
    if example is not None:
        return contents.example(planned.spec, planned.shape, known, example)
    first = unknown[0]
    form = f"{first}=@FILE.npy" if first in {p.name for p in planned.spec.tensors} else f"{first}=VALUE"
    raise RequestError(f"the mask reads {first}: give it with --set {form}, or draw an example with --example 1")


def _clip(asked: tuple[int | None, int | None], length: int, option: str) -> tuple[int, int]:
    begin, end, _ = slice(*asked).indices(length)
    if begin >= end:
        raise RequestError(f"{option}: there is nothing between {begin} and {end}")
    return begin, end


def _title(planned: Planned, batch: int, head: int, tile: tuple[int, int], target: str | None) -> str:
    shape = planned.shape
    whose = f", the plan for {target}" if target else ""
    one = "" if shape.batch == shape.heads == 1 else f", batch entry {batch}, head {head}"
    axes = f"{planned.spec.name}: {shape.q_len} rows down, {shape.k_len} keys across{one}"
    return f"{axes}, tiles of {tile[0]} x {tile[1]}{whose}"


def _legend(found: Survey, looks: dict[str, str]) -> str:
    skipped, partial, full = found.tiles
    cell = f"a character is {found.rows.cell} x {found.keys.cell}"
    marks = (
        f"{looks['full']} full tile, {looks['all']} kept, {looks['some']} partly, {looks['none']} masked, blank skipped"
    )
    total = skipped + partial + full
    tiles = f"{count(skipped)} skipped, {count(partial)} partial, {count(full)} full of {count(total)}"
    return f"{cell}: {marks}\ntiles here: {tiles}"


def _can_print(looks: dict[str, str]) -> bool:
    try:
        "".join(looks.values()).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
