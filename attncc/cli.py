"""The program `attncc`: its commands, loaded when called, and how every error leaves it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import click

import attncc
from attncc.commands.console import colors, tell
from attncc.errors import AttnError

COMMANDS = ("build", "explain", "check", "show", "fmt", "tune", "bench", "export", "cache")
INTERRUPTED, CLOSED_PIPE = 130, 141  # as a shell gives them for SIGINT and SIGPIPE
OUR_FAULT = 70  # EX_SOFTWARE of sysexits.h: a bug of attncc, never the user's doing


class Commands(click.Group):
    """A group whose commands are modules of attncc.commands, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"attncc.commands.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as fault:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if near and self.get_command(ctx, args[0]) is None:
                raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx) from None
            raise fault


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(attncc.__version__, prog_name="attncc", message="%(prog)s %(version)s")
def program() -> None:
    """Compile a short attention spec into a fast, exact, readable kernel file.

    \b
        attncc explain causal.attn                     what it means, and how it would be computed
        attncc build   causal.attn --target sm_90      the kernel file, compiled
        attncc check   causal.attn                     its numbers against float64

    Exit status: 0 done; 1 the spec is wrong, or asks for what is not built yet; 2 the command line is wrong;
    3 no plan fits the target; 4 a check failed; 5 the environment (cache, disk, no GPU).
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the program and exit with its status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started it; the next file opened would take its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    status = run(args)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    sys.exit(status)


def run(args: Sequence[str] | None = None) -> int:
    """Run the program; gives its exit status. No error that attncc raises on purpose shows a traceback."""
    try:
        status = program.main(args, prog_name="attncc", standalone_mode=False, color=colors())
        sys.stdout.flush()
    except AttnError as fault:
        return _failed(str(fault), fault.exit_code, bare=type(fault).__name__ == "SpecError")
    except click.ClickException as fault:
        fault.show()
        return fault.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # the second is how click leaves on the first
        _close_stdout()
        return CLOSED_PIPE
    except OSError as fault:
        return _failed(f"{fault.filename or 'output'}: {fault.strerror or fault}", 5)
    except Exception:
        import traceback

        return _failed(f"{traceback.format_exc()}this is a fault of attncc: please report it with the spec", OUR_FAULT)
    return status if isinstance(status, int) else 0


def _failed(text: str, status: int, bare: bool = False) -> int:
    with contextlib.suppress(OSError):
        tell(text if bare else f"attncc: {click.style('error:', fg='red')} {text}")
    return status


def _close_stdout() -> None:
    """Nobody reads any more: keep Python from complaining about it when it exits."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
