"""Which cases of a table run every day, which when all are asked for, and in which part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from trainyard.config.run import Run


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


def skip_if_torch_is_old(run: Run) -> None:
    """Skips a run that the installed torch is refused for."""
    from trainyard.training.run_folder import FIRST_WITH_ZERO_BUBBLE

    torch = tuple(int(number) for number in version("torch").split(".")[:2])
    if run.parallel.schedule == "zero_bubble" and torch < FIRST_WITH_ZERO_BUBBLE:
        pytest.skip("needs torch 2.13")


def is_in_part(name: str, part: str) -> bool:
    """Tells whether the case of a name is in a part of all, such as "2/3"."""
    number, _, n_parts = part.partition("/")
    return crc32(name.encode()) % int(n_parts) == int(number) % int(n_parts)
