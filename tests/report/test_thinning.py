from __future__ import annotations

import numpy as np

from trainyard.report.thinning import thin_out


def test_stretches_have_mean_and_range() -> None:
    x, y = np.arange(1.0, 7.0), np.array([4.0, 6, 5, 9, 3, 3])
    thin = thin_out(x, y, 3)
    assert thin.x.tolist() == [1.5, 3.5, 5.5]
    assert (thin.mean.tolist(), thin.n_in_each) == ([5, 7, 3], 2)
    assert (thin.low.tolist(), thin.high.tolist()) == ([4, 5, 3], [6, 9, 3])


def test_few_points_stay_as_they_are() -> None:
    x = np.arange(5.0)
    thin = thin_out(x, x * 2, 5)
    assert (thin.mean.tolist(), thin.n_in_each) == ([0, 2, 4, 6, 8], 1)
    assert len(thin_out(x[:0], x[:0], 5).x) == 0


def test_what_is_no_number_is_left_out_and_a_stretch_without_any_is_none() -> None:
    y = np.array([1.0, np.nan, np.nan, np.nan, 5, 7])
    thin = thin_out(np.arange(6.0), y, 3)
    assert np.array_equal(thin.mean, [1, np.nan, 6], equal_nan=True)
    assert np.array_equal(thin.low, [1, np.nan, 5], equal_nan=True)
    assert np.array_equal(thin.high, [1, np.nan, 7], equal_nan=True)


def test_no_spike_of_a_long_curve_is_lost() -> None:
    y = np.ones(1_000_003)
    y[[0, 7, 500_000, -1]] = [5, -3, 99, 42]
    thin = thin_out(np.arange(len(y), dtype=float), y, 500)
    assert (len(thin.x), thin.n_in_each) == (500, 2001)
    assert set(thin.high) == {1, 5, 99, 42}
    assert (thin.low.min(), thin.high[-1]) == (-3, 42)
    assert np.isclose(np.average(thin.mean), y.mean(), rtol=1e-3)
