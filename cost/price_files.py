"""Rows of prices in files: the package's CSV, and a user's CSV or YAML."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cost.skus import gpu_of
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.cost.catalog import Price, Rate

DEFAULTS = {"service": "", "currency": "USD", "note": ""}


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file with its place, `prices.csv:12` or `own.yaml: row 3`.

    Raises:
        UsageError: no such file, or not of that form.
    """
    if not path.is_file():
        raise UsageError("there is no such file of prices", where=str(path))
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    if path.suffix.lower() in (".yaml", ".yml"):
        yield from _yaml(path, text)
        return
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        where = f"{path.name}:{reader.line_num}"
        if None in row or None in row.values():
            raise UsageError("has more or fewer fields than the first line names", where=where)
        yield where, {name.strip(): value.strip() for name, value in row.items()}


def _yaml(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UsageError(f"is no YAML: {str(error).splitlines()[0]}", where=str(path)) from error
    rows = content.get("prices") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError("must be a list of rows, or have one under `prices`", where=str(path))
    for number, row in enumerate(rows, 1):
        yield f"{path.name}: row {number}", {str(name): value for name, value in row.items()}


def row_price(row: Mapping[str, Any], where: str) -> Price:
    """A row as a Price. GPU and count may be left out of a machine that is known.

    Raises:
        UsageError: a field that is missing, unknown or no number.
    """
    from isthmus.cost.catalog import Price

    known = gpu_of(str(row.get("sku", "")))
    filled = {"unit": "hour", "tier": "on_demand", **DEFAULTS, **row}
    if known:
        filled = {"gpu": known[0], "gpus": known[1], **filled}
    usd, gpus = _number(filled, "usd_per_hour", where), _number(filled, "gpus", where)
    if gpus is None or gpus != int(gpus):
        raise UsageError("gpus must be a whole number", where=where)
    return Price(**_texts(Price, filled, where, {"usd_per_hour": usd, "gpus": int(gpus)}))


def row_rate(row: Mapping[str, Any], where: str) -> Rate:
    """A row as a Rate.

    Raises:
        UsageError: a field that is missing, unknown or no number.
    """
    from isthmus.cost.catalog import Rate

    unit = "GB-month" if row.get("kind") == "storage" else "GB"
    filled = {"unit": unit, "to": "", "from_gb": 0, **DEFAULTS, **row}
    filled.pop("service")
    numbers = {"usd": _number(filled, "usd", where), "from_gb": _number(filled, "from_gb", where) or 0.0}
    return Rate(**_texts(Rate, filled, where, numbers))


def _number(row: Mapping[str, Any], name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} `{value}` is no number", where=where) from None


def _texts(
    kind: type[Price] | type[Rate], row: Mapping[str, Any], where: str, numbers: Mapping[str, Any]
) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if unknown := sorted(row.keys() - names):
        raise UsageError(
            f"has no field `{unknown[0]}`", where=where, hint=f"fields: {', '.join(sorted(names))}"
        )
    if missing := sorted(names - row.keys() - numbers.keys()):
        raise UsageError(f"needs `{missing[0]}`", where=where)
    return {**{name: str(row[name]) for name in names - numbers.keys()}, **numbers}
