"""`attncc fmt`: the canonical form of a spec's file, in place."""

from __future__ import annotations

from pathlib import Path

import click

from attncc.commands.console import say, tell
from attncc.commands.options import FILE, read_spec, shown
from attncc.errors import EnvironmentFault, SpecError


@click.command("fmt", short_help="Write specs in canonical form")
@click.argument("specs", nargs=-1, required=True, type=FILE, metavar="SPEC...")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 and name the files that would change.")
def command(specs: tuple[str, ...], check: bool) -> int:
    """Write each SPEC in canonical form, in place. Comments and names stay; formatting twice changes nothing.

    A file with a fault in it is left as it is. `-` reads standard input and writes the form to standard output.

    \b
        attncc fmt specs/*.attn
        attncc fmt --check specs/*.attn
        attncc fmt - < causal.attn
    """
    from attncc import frontend

    changed = wrong = 0
    for path in specs:
        try:
            before = read_spec(path)
            after = frontend.format_text(before, shown(path))
        except SpecError as fault:
            tell(str(fault))
            wrong += 1
            continue
        changed += before != after
        if path == "-" and not check:
            click.echo(after, nl=False)
        elif before != after:
            say(f"{'would change' if check else 'changed'} {shown(path)}")
            if not check:
                _write(path, after)
    tell(_summary(len(specs), changed, wrong, check))
    return 1 if wrong or (check and changed) else 0


def _write(path: str, text: str) -> None:
    from attncc.runtime.publish import replace_file

    try:
        replace_file(Path(path), text.encode("utf-8"))
    except OSError as fault:
        raise EnvironmentFault(f"{shown(path)} cannot be written: {fault.strerror}") from None


def _summary(total: int, changed: int, wrong: int, check: bool) -> str:
    verb = "would change" if check else "changed"
    text = f"{total} {'file' if total == 1 else 'files'}: {changed} {verb}, {total - changed - wrong} as they should be"
    return text + (f", {wrong} with faults" if wrong else "")
