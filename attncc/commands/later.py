"""Commands that the program is to have and does not have yet: named in the help, refused when called."""

from __future__ import annotations

import click

from attncc.errors import AttnError


def refused(name: str, short: str, until: str) -> click.Command:
    """A command that takes any arguments and says that it is not built yet (exit 1), and what there is `until` then."""

    @click.command(name, short_help=f"{short} (not built yet)", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        raise AttnError(f"`attncc {name}` is not built yet")

    command.help = f"{short}.\n\nNot built yet: the command is refused. {until}"
    return command
