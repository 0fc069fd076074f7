"""Which cases of a table run every day, which when all are asked for, and in which part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import pytest


def everyday(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Gives the cases for `pytest.mark.parametrize`: those not chosen are left to `make test-all`.

    A name that is none of the cases is an error, so that none drops out when it is renamed.
    """
    cases = list(cases)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, unknown
    return [
        case
        if case in chosen
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=(pytest.mark.exhaustive, pytest.mark.table),
        )
        for case in cases
    ]


def is_in_part(name: str, part: str) -> bool:
    """Tells whether the case of a name is in a part of all, such as "2/3"."""
    number, _, n_parts = part.partition("/")
    return crc32(name.encode()) % int(n_parts) == int(number) % int(n_parts)
