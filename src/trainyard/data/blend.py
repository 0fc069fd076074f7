"""Which corpus each sequence of a blend comes from: Megatron-LM's rule, exactly.

The rule: corpus i has been drawn c[i] times; draw k goes to the corpus that lags most behind its
share, the one with the largest w[i] * max(k, 1) - c[i], the first of equals. For weights 0.5, 0.3
and 0.2:

    k   lag before the draw      drawn      c after
    0    0.5   0.3   0.2         corpus 0   1 0 0
    1   -0.5   0.3   0.2         corpus 1   1 1 0
    2    0.0  -0.4   0.4         corpus 2   1 1 1
    3    0.5  -0.1  -0.4         corpus 0   2 1 1

Each draw depends on all earlier draws, down to the rounding, so it has no closed form. But the
rule converges: from any sensible counts it soon reaches the true ones. So the draws are split into
lanes that run in parallel, each from estimated counts. If a lane ends with other counts than the
next one started with, the next one runs again from there, until every lane starts where the
previous one ended. The first starts with the true counts, so then all are true.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LANES = 4096
_LANE_DRAWS = 1024

Float = NDArray[np.float64]


def build_blend_index(
    weights: Float, size: int, limits: Float | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Draws `size` times from corpora of these weights.

    Args:
        weights: each corpus's share, adding up to 1.
        size: the number of draws.
        limits: how often each corpus may be drawn; without it there is no limit.

    Returns:
        For each draw the corpus, and how often that corpus had been drawn before
        (Megatron-LM's dataset_index and dataset_sample_index).
    """
    corpus = np.empty(size, np.int16)
    position = np.empty(size, np.int64)
    limits = np.full(len(weights), np.inf) if limits is None else limits
    counts = np.zeros(len(weights))
    for start in range(0, size, _LANES * _LANE_DRAWS):
        stop = min(size, start + _LANES * _LANE_DRAWS)
        part = slice(start, stop)
        counts = _fill(corpus[part], position[part], start, counts, weights, limits)
    return corpus, position


def _fill(
    corpus: NDArray[np.int16],
    position: NDArray[np.int64],
    start: int,
    counts: Float,
    weights: Float,
    limits: Float,
) -> Float:
    """Writes the draws from `start` on, given the counts there; returns the counts after them."""
    n_draws = min(_LANE_DRAWS, len(corpus))
    n_lanes = len(corpus) // n_draws
    starts = start + n_draws * np.arange(n_lanes)
    begins = _guess_counts(starts, weights)
    begins[0] = counts
    ends: Float = np.empty_like(begins)
    lanes = np.arange(n_lanes)
    whole = n_lanes * n_draws
    corpus_lanes = corpus[:whole].reshape(n_lanes, n_draws)
    position_lanes = position[:whole].reshape(n_lanes, n_draws)
    while len(lanes):
        corpus_lanes[lanes], position_lanes[lanes], ends[lanes] = _walk(
            starts[lanes], begins[lanes], n_draws, weights, limits
        )
        lanes = np.flatnonzero((ends[:-1] != begins[1:]).any(axis=1)) + 1
        begins[lanes] = ends[lanes - 1]
    if whole < len(corpus):  # the last draws, too few for another row of lanes
        return _fill(corpus[whole:], position[whole:], start + whole, ends[-1], weights, limits)
    last: Float = ends[-1]
    return last


def _guess_counts(starts: NDArray[np.int64], weights: Float) -> Float:
    """Rounds each corpus's share of the draws so that they add up to the number of draws."""
    shares = np.multiply.outer(starts.astype(np.float64), weights)
    whole = np.floor(shares)
    missing = starts - whole.sum(axis=1)
    rank = np.argsort(np.argsort(whole - shares, axis=1, kind="stable"), axis=1)
    counts: Float = whole + (rank < missing[:, None])
    return counts


def _walk(
    starts: NDArray[np.int64], begins: Float, n_draws: int, weights: Float, limits: Float
) -> tuple[NDArray[np.int16], NDArray[np.int64], Float]:
    """Follows the rule for `n_draws` draws in every lane at once."""
    limited = bool(np.isfinite(limits).any())
    counts = begins.copy()
    rows = np.arange(len(starts))
    corpus = np.empty((n_draws, len(starts)), np.int16)
    position = np.empty((n_draws, len(starts)), np.int64)
    for draw in range(n_draws):
        lag = np.multiply.outer(np.maximum(starts + draw, 1).astype(np.float64), weights)
        lag -= counts
        if limited:
            lag[counts >= limits] = -np.inf
        chosen = lag.argmax(axis=1)  # the first of equals
        corpus[draw] = chosen
        position[draw] = counts[rows, chosen]
        counts[rows, chosen] += 1
    return corpus.T, position.T, counts
