"""The parts of tables that CI takes turns with are all of each table, and none is much larger."""

from __future__ import annotations

from tests.circles import is_in_part
from tests.parity.rows import TABLE


def test_each_case_is_in_one_part() -> None:
    parts = [[name for name in TABLE if is_in_part(name, f"{n}/3")] for n in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(TABLE)
    assert all(len(part) < len(TABLE) / 2 for part in parts)
    assert all(is_in_part(name, "1/1") for name in TABLE)
