"""The blend against the rule followed one draw at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.data.order import build_blend_index


def follow_the_rule(weights: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """One draw after another in Python's floats, which are C's doubles."""
    counts = [0] * len(weights)
    corpus, position = [], []
    for draw in range(size):
        best, largest = -1, -math.inf
        for number, weight in enumerate(weights.tolist()):
            lag = weight * float(max(draw, 1)) - counts[number]
            if lag > largest:
                best, largest = number, lag
        corpus.append(best)
        position.append(counts[best])
        counts[best] += 1
    return corpus, position


def check(weights: np.ndarray, size: int) -> None:
    corpus, position = build_blend_index(weights, size)
    expected_corpus, expected_position = follow_the_rule(weights, size)
    assert (corpus.dtype, position.dtype) == (np.int16, np.int64)
    assert corpus.tolist() == expected_corpus
    assert position.tolist() == expected_position


positive = st.one_of(st.floats(1e-6, 1e6), st.integers(1, 9).map(float))


@given(weights=st.lists(positive, min_size=1, max_size=12), size=st.integers(1, 5000))
@settings(max_examples=20)
def test_any_weights(weights: list[float], size: int) -> None:
    check(np.array(weights) / np.sum(weights), size)


@pytest.mark.parametrize("weights", [(0.35, 0.65), (0.5, 0.5), (1 / 3, 2 / 3), (0.1, 0.7, 0.2)])
def test_rounding_decides_ties_as_it_does_one_by_one(weights: tuple[float, ...]) -> None:
    check(np.array(weights), 60_000)
