"""How outcomes of ranks are put together and compared; whole runs are in tests/parity."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from trainyard.simulate.parity import (
    IncompleteError,
    Outcome,
    Piece,
    assemble,
    compare,
    load_outcome,
    save_outcome,
)

WHOLE = np.arange(12.0).reshape(4, 3) + 1


def piece(first_row: int, n_rows: int, value: np.ndarray | None = None) -> Piece:
    rows = WHOLE[first_row : first_row + n_rows].copy()
    return Piece("weight", (4, 3), (first_row, 0), rows if value is None else value)


def outcome(*pieces: Piece, loss: float = 2.0) -> Outcome:
    return Outcome([loss], [1.0], list(pieces), list(pieces))


def test_pieces_make_the_whole_and_copies_are_compared() -> None:
    whole, apart = assemble([[piece(0, 2)], [piece(2, 2)], [piece(0, 4)], [piece(4, 0)]])
    np.testing.assert_array_equal(whole["weight"], WHOLE)
    assert apart == 0.0
    _, apart = assemble([[piece(0, 2)], [piece(2, 2)], [piece(0, 2, WHOLE[:2] - 0.5)]])
    assert apart == 0.5


def test_a_part_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(IncompleteError, match="no rank holds part of weight"):
        assemble([[piece(0, 2)], [piece(3, 1)]])


def test_differences_are_relative_and_the_worst_of_all() -> None:
    reference = outcome(piece(0, 4))
    ranks = [outcome(piece(0, 2), loss=2.0), outcome(piece(2, 2, WHOLE[2:] + 1e-3), loss=2.002)]
    found = compare(reference, ranks)
    assert found.loss == pytest.approx(1e-3)
    assert (
        found.weight == found.gradient == pytest.approx(1e-3 * math.sqrt(6) / np.linalg.norm(WHOLE))
    )
    assert (found.norm, found.between_ranks) == (0.0, 0.0)
    assert found.is_within(1.1e-3)
    assert not found.is_within(0.9e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_never_the_same(value: float) -> None:
    reference = outcome(piece(0, 4))
    assert not compare(reference, [outcome(piece(0, 4), loss=value)]).is_within(1.0)
    wrong = WHOLE.copy()
    wrong[3, 1] = value
    found = compare(reference, [outcome(piece(0, 4, wrong)), outcome(piece(0, 4))])
    assert not found.is_within(1.0)
    assert found.between_ranks != 0.0


def test_padding_may_be_missing_but_must_be_zero() -> None:
    padded = Piece("weight", (6, 3), (0, 0), np.vstack([WHOLE, np.zeros((2, 3))]))
    assert compare(outcome(piece(0, 4)), [outcome(padded)]).weight == 0.0
    assert compare(outcome(padded), [outcome(piece(0, 4))]).weight == 0.0
    padded.value[5, 2] = 1e-3
    assert compare(outcome(piece(0, 4)), [outcome(padded)]).weight > 1e-5


def test_an_outcome_can_be_written_and_read(tmp_path: Path) -> None:
    scalar = Piece("bias", (3,), (1,), np.array([5.0, math.nan]))
    left = Outcome([1.5, 2.5], [0.1, 0.2], [piece(0, 2), piece(4, 0), scalar], [scalar])
    save_outcome(left, tmp_path / "rank")
    np.testing.assert_equal(asdict(load_outcome(tmp_path / "rank")), asdict(left))
