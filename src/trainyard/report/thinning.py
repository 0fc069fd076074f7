"""Reduces curves of any length to few points, without hiding spikes.

Six points as three intervals of two:

    x      1  2  3  4  5  6        x     1.5  3.5  5.5
    y      4  6  5  9  3  3        mean  5    7    3
                                   low   4    5    3
                                   high  6    9    3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainyard.report.history import Curve


@dataclass(frozen=True)
class Thin:
    """Mean, minimum and maximum of each interval of a curve; NaN if it has no number."""

    x: Curve
    mean: Curve
    low: Curve
    high: Curve
    n_in_each: int
    """Points in the longest interval; 1: no point is dropped."""


def thin_out(x: Curve, y: Curve, n_points: int) -> Thin:
    """Divides a curve into at most this many intervals with equal numbers of points."""
    if len(x) <= n_points:
        return Thin(x, y, y, y, 1)
    starts = np.linspace(0, len(x), n_points, endpoint=False).astype(int)
    counts = np.diff([*starts, len(x)])
    known = np.isfinite(y)
    n_known = np.add.reduceat(known.astype(int), starts)
    nothing = n_known == 0
    sums = np.add.reduceat(np.where(known, y, 0.0), starts)
    mean = np.where(nothing, np.nan, sums / np.maximum(n_known, 1))
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    low, high = (np.where(nothing, np.nan, edge) for edge in (low, high))
    return Thin(np.add.reduceat(x, starts) / counts, mean, low, high, int(counts.max()))
