"""Which cases of a table run every day, and which when all are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

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
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive
        )
        for case in cases
    ]
