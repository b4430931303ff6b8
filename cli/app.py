"""The ``isthmus`` command. The command modules import typer, and what is heavy only inside a command."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isthmus.cli.checking import check, plain_request
from isthmus.errors import IsthmusError

if TYPE_CHECKING:
    import typer

MODULES = {
    "quickstart": ("quickstart",),
    "recipes": ("recipes",),
    "data": ("data",),
    "launch": ("launch",),
    "supervise": ("supervise",),
    "doctor": ("doctor",),
    "rehearse": ("rehearse",),
    "runs": ("runs", "status", "logs", "stop", "resume"),
    "carrying": ("fetch",),
    "sample": ("sample", "export"),
    "cost": ("cost",),
    "compare": ("compare",),
    "prices": ("prices",),
    "report": ("report",),
}
"""The modules of this package and the commands that each one registers, in the order that help shows."""


def build(command: str | None = None) -> typer.Typer:
    """The application, with all commands, or with only the module that has one command.

    Args:
        command: the first word of the command line. Importing its module alone halves the time to the
            command's first line; a word that is no command registers all, so that help can suggest one.
    """
    from importlib import import_module

    import typer

    app = typer.Typer(
        name="isthmus",
        add_completion=False,
        no_args_is_help=True,
        # Rich would cost more to import than everything else that help needs.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_callback())
    wanted = [module for module, commands in MODULES.items() if command in commands]
    for module in wanted or MODULES:
        import_module(f"isthmus.cli.{module}").register(app)
    return app


def _callback() -> Callable[..., None]:
    import typer

    def print_version(wanted: bool) -> None:
        if wanted:
            from isthmus import __version__

            print(f"isthmus {__version__}")
            raise typer.Exit()

    def isthmus(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        """Train latent text-to-image models from one recipe, on Azure ML, SageMaker or here.

        Example: isthmus quickstart
        """

    return isthmus


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, or the exit code of the error (see :mod:`isthmus.errors`)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Imports make garbage collectors busy for nothing: a fifth of the time of a command that ends at once.
    gc.set_threshold(100_000, 20, 20)
    try:
        request = plain_request(arguments)
        if request is None:
            build(arguments[0] if arguments else None)(arguments, prog_name="isthmus")
        else:
            check(request)
    except IsthmusError as error:
        if os.environ.get("ISTHMUS_DEBUG") == "1":
            raise
        from isthmus.cli.output import fail

        fail(error)
