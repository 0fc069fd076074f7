"""Finished runs as a table: parameters, tokens and loss of each, from a CSV file."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainyard.errors import DataError, explain_failure
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file


class Points(NamedTuple):
    """Finished runs, in the order of the file."""

    parameters: list[float]
    tokens: list[float]
    losses: list[float]
    names: list[str]


def read_points(
    path: Path, where: Sequence[str] = (), loss: str = "loss", parameters: str = "parameters"
) -> Points:
    """Reads runs from a CSV file with a header.

    Args:
        path: the file. Tokens are in a column `tokens`, or follow from `flop` as
            flop / (6 parameters). A column `name` names the runs; else their lines do.
        where: conditions on columns, all of which a run must meet: corpus=c4, multiplier>=0.5.
        loss: the column of the held-out loss; a diverged run may have nan or nothing there.
        parameters: the column of the parameters.

    Raises:
        DataError: the file, a column or a value is missing or wrong.
    """
    with explain_failure(f"cannot read {path}", "check the path", DataError):
        text = read_file(path, SETTINGS_LIMIT_BYTES).decode(errors="replace")
    reader, points = csv.DictReader(text.splitlines()), Points([], [], [], [])
    try:
        for row in reader:
            if all(_meets(row, condition) for condition in where):
                n = float(row[parameters])
                points.parameters.append(n)
                points.tokens.append(float(row.get("tokens") or float(row["flop"]) / 6 / n))
                points.losses.append(float(row[loss] or "nan"))
                points.names.append(row.get("name") or f"line {reader.line_num}")
    except KeyError as error:
        columns = f"columns: {', '.join(reader.fieldnames or [])}"
        raise DataError(f"{path}: there is no column {error}", columns) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        place = f"{path}, line {reader.line_num}"
        raise DataError(f"{place}: {error}", "correct it, or leave its line out") from None
    return points


def _meets(row: dict[str, str], condition: str) -> bool:
    match = re.fullmatch(r"([^<>=]+)(>=|<=|=)(.*)", condition)
    if match is None:
        raise DataError(f"{condition}: not a condition", "such as corpus=c4 or multiplier>=1")
    value, relation, wanted = row[match[1]], match[2], match[3]
    if relation == "=":
        return value == wanted
    return float(value) >= float(wanted) if relation == ">=" else float(value) <= float(wanted)
