"""``isthmus data``: encode, stats, verify, order, bench."""

from __future__ import annotations

import typer

from isthmus.cli import (
    data_bench,
    data_copy,
    data_duplicates,
    data_index,
    data_order,
    data_repack,
    data_stats,
    encode,
)

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
encode.register(data_app)
data_stats.register(data_app)
data_duplicates.register(data_app)
data_order.register(data_app)
data_index.register(data_app)
data_bench.register(data_app)
data_copy.register(data_app)
data_repack.register(data_app)


def register(app: typer.Typer) -> None:
    """Add the command group to the application."""
    app.add_typer(data_app, name="data", help="Make latent datasets and check them.")
