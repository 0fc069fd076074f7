"""Items of the plan, and what they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""What was found: "row" is its name, "found" a number or a word, "unit" its unit, "estimate" what
was expected, "decides" what follows; `wrong` is true where it must not be so."""


@dataclass(frozen=True)
class Session:
    """What all items get.

    Args:
        fake: on the fake GPU: models have `FAKE_BLOCKS` blocks, and no number is judged.
        output: folder of results.
        packed: folder of `--pack`, absent without one.
    """

    fake: bool
    output: Path
    packed: Path | None = None

    def as_json(self) -> Row:
        """Returns it as JSON can hold it."""
        packed = None if self.packed is None else str(self.packed)
        return {"fake": self.fake, "output": str(self.output), "packed": packed}

    @classmethod
    def from_json(cls, facts: Row) -> Session:
        """Reads what `as_json` gave."""
        packed = facts["packed"]
        return cls(facts["fake"], Path(facts["output"]), packed and Path(packed))

    def judge(self, row: Row, *, is_right: bool) -> Row:
        """Adds the verdict, which on the fake GPU is always that all is right."""
        return row | {"wrong": not (is_right or self.fake)}


@dataclass(frozen=True)
class Item:
    """One thing to find out.

    Args:
        name: unique.
        allowance: seconds, after which it is interrupted; after twice as many it is killed.
        function: "module:function", which gets a `Session` and `arguments` and yields rows.
    """

    name: str
    allowance: float
    function: str
    arguments: tuple[str, ...] = ()

    def rows(self, session: Session) -> Iterator[Row]:
        """Does it."""
        module, _, name = self.function.partition(":")
        found: Iterator[Row] = getattr(import_module(module), name)(session, *self.arguments)
        return found


def read_items(module: str) -> list[Item]:
    """Reads the table `ITEMS` of a module."""
    return list(import_module(module).ITEMS)


def slower(items: Sequence[Item], factor: float) -> list[Item]:
    """Returns items with longer allowances."""
    return [replace(item, allowance=factor * item.allowance) for item in items]
