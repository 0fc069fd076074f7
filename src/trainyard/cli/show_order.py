"""`trainyard show order`: the exact token sequences a run will train on."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np

from trainyard.config.load import load_run
from trainyard.data.loader import build_orders
from trainyard.data.order import Split
from trainyard.errors import ConfigError, DataError
from trainyard.plan.resolve import resolve


def show_order(
    arguments: list[str], split: str, start: int, count: int, output: Path | None
) -> None:
    """Prints the sequences of a split, or writes them as `sequences` (count, T + 1) into an .npz.

    Raises:
        UserError: no such split, or fewer sequences than asked for.
    """
    if not arguments:
        raise ConfigError("show order needs a run file", "trainyard show order run.toml")
    run = load_run(arguments[0], arguments[1:]).run
    names: dict[str, Split] = {name: name for name in get_args(Split)}
    if split not in names:
        raise ConfigError(f"--split {split!r} is not one of {', '.join(names)}")
    order = build_orders(run, resolve(run))[names[split]]
    if order is None:
        raise DataError(
            f"the {split} split of {run.name} has no sequences",
            "see data.split, evaluate.batches and data." + split,
        )
    if start < 0 or count < 1 or start + count > len(order):
        raise DataError(
            f"sequences {start} to {start + count} requested, {split} has {len(order)}",
            "lower --start or --count",
        )
    sequences = order.sequences(start, count)
    if output is None:
        for row in sequences:
            print(*row)  # noqa: T201
        return
    with output.open("wb") as file:
        np.savez(file, sequences=sequences)
