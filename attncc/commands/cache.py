"""`attncc cache`: what is kept, whether it is whole, and how to be rid of it."""

from __future__ import annotations

import time
from typing import Any

import click

from attncc.commands.console import amount, count, say, say_json, table
from attncc.commands.options import json_option
from attncc.errors import EnvironmentFault


@click.group("cache", short_help="List, verify or clear what is kept")
def command() -> None:
    """What attncc keeps on this machine, in ATTNCC_CACHE_DIR or the user's cache folder.

    \b
        attncc cache list
        attncc cache verify
        attncc cache clear
    """


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the kernels that are kept."""
    from attncc.runtime.cache import Cache

    cache = Cache()
    kernels = sorted((_facts(e) for e in cache.entries() if e.kind == "kernel"), key=lambda f: f["file"])
    if as_json:
        say_json({"root": str(cache.root), "kernels": kernels})
        return
    if kernels:
        rows = [
            [f["file"], f["plan"], f["triton"], count(f["size"]), f["published"], f["digest"][:12]] for f in kernels
        ]
        say(table(["kernel", "plan", "triton", "bytes", "published (UTC)", "entry"], rows, numbers=(3,)))
    word = "kernel" if len(kernels) == 1 else "kernels"
    say(f"{len(kernels)} {word}, {amount(sum(f['size'] for f in kernels), 'B')}, in {cache.root}")


@command.command("verify")
@json_option
def verify(as_json: bool) -> None:
    """Compare every file with its manifest; exit 5 where one is broken.

    A broken entry is harmless: the next build of the same kernel replaces it.
    """
    from attncc.runtime.cache import Cache

    cache = Cache()
    faults = cache.verify()
    whole = sum(1 for _ in cache.entries())
    if as_json:
        say_json(
            {
                "root": str(cache.root),
                "whole": whole,
                "broken": [{"entry": str(f.path), "problem": f.problem} for f in faults],
            }
        )
    else:
        for fault in faults:
            say(f"broken: {fault.path}: {fault.problem}")
        say(f"{whole} whole, {len(faults)} broken, in {cache.root}")
    if faults:
        raise EnvironmentFault(
            f"{len(faults)} broken in the cache: the next build replaces them, `attncc cache clear` removes all"
        )


@command.command("clear")
@click.option("--winners", is_flag=True, help="Remove what `attncc tune` found too.")
def clear(winners: bool) -> None:
    """Remove everything that a build brings back. Files of your own in that folder stay."""
    from attncc.runtime.cache import Cache

    cache = Cache()
    entries, size = cache.clear(winners)
    say(f"removed {entries} {'entry' if entries == 1 else 'entries'}, {amount(size, 'B')}, from {cache.root}")


def _facts(entry: Any) -> dict[str, Any]:
    plan, tools = entry.key.get("plan") or {}, entry.key.get("toolchain") or {}
    tiles = f"{plan.get('algorithm', '?')} {plan.get('tile_q', '?')}x{plan.get('tile_k', '?')}"
    head = f"d{plan.get('head_dim', '?')} {plan.get('dtype', '?')}"
    return {
        "file": next((n for n in entry.files if n.endswith(".py")), "?"),
        "plan": f"{tiles} {head}",
        "attncc": tools.get("attncc"),
        "triton": tools.get("triton"),
        "size": entry.size,
        "published": time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.modified)),
        "digest": entry.digest,
        "path": str(entry.path),
    }
