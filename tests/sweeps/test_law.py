"""Laws of loss: published sets, known laws, and every reason not to trust one."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.optimize import minimize
from tests.circles import everyday

from trainyard import fit_law
from trainyard.errors import DataError
from trainyard.sweeps import law as subject
from trainyard.sweeps.law import Law, Points, read_points

PUBLISHED = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
"""arXiv:2404.10102, table 1, without five outliers."""
KNOWN = {"E": 1.7, "A": 400.0, "B": 1500.0, "alpha": 0.34, "beta": 0.37}
SIZES = (1e7, 2e7, 4e7, 8e7, 1.6e8)
LARGE = (1e9, 2e10)

Runs = tuple[np.ndarray, np.ndarray, np.ndarray]


def loss_of(n: np.ndarray | float, d: np.ndarray | float) -> np.ndarray | float:
    return KNOWN["E"] + KNOWN["A"] / n ** KNOWN["alpha"] + KNOWN["B"] / d ** KNOWN["beta"]


def make_runs(
    ratios: tuple[float, ...] = (10, 20, 80), noise: float = 0.005, seed: int = 0
) -> Runs:
    n = np.repeat(SIZES, len(ratios))
    d = n * np.tile(ratios, len(SIZES))
    scatter = np.random.default_rng(seed).normal(0, noise, len(n))
    return n, d, loss_of(n, d) * np.exp(scatter)


@pytest.fixture(scope="module")
def law() -> Law:
    return fit_law(*make_runs())


@pytest.fixture(scope="module")
def chinchilla(shared_data: Path) -> Points:
    return read_points(shared_data / "ladder" / "chinchilla.csv")


def test_chinchilla_has_its_published_parameters(chinchilla: Points) -> None:
    law = fit_law(*chinchilla)
    for name, estimate in law.estimates().items():
        assert estimate.low < PUBLISHED[name] < estimate.high, name
        relative = 0.1 if name in "AB" else 0.015  # far less than the intervals
        assert estimate.value == pytest.approx(PUBLISHED[name], rel=relative), name
    for name, error in (("E", 0.03), ("alpha", 0.02), ("beta", 0.02)):  # published standard errors
        estimate = law.estimates()[name]
        assert 0.5 < (estimate.high - estimate.low) / (2 * 1.645 * error) < 2, name
    assert abs(law.missed) < 0.02
    names = [*law.left_out]
    assert names[:5] == [f"line {number}" for number in range(2, 7)] and len(names) == 6
    best = law.optimum(5.76e23)  # Chinchilla 70B had 1.4T tokens
    assert best["parameters"].low < 70e9 < best["parameters"].high
    assert best["tokens"].low < 1.4e12 < best["tokens"].high


def test_the_fit_minimizes_the_huber_loss_by_its_definition(
    chinchilla: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "N_DRAWS", 1)
    n, d, losses = (np.array(values)[6:] for values in chinchilla[:3])

    def objective(theta: np.ndarray) -> float:
        a, b, e, alpha, beta = theta
        fitted = np.log(np.exp(a - alpha * np.log(n)) + np.exp(b - beta * np.log(d)) + np.exp(e))
        r = np.abs(fitted - np.log(losses))
        huber = np.where(r <= 1e-3, r**2 / 2, 1e-3 * (r - 1e-3 / 2)).sum()
        prior = ((alpha - 0.35) ** 2 + (beta - 0.35) ** 2) / (2 * 0.05**2)
        return float(huber + 1e-3 * 0.005 * prior)

    found = np.array(fit_law(n, d, losses).parameters)
    least = objective(found)
    settings = {"maxiter": 4000, "maxfev": 4000, "xatol": 1e-8, "fatol": 1e-12}
    for start in (found, found + np.array([0.3, -0.3, 0.02, 0.01, -0.01])):
        other = minimize(objective, start, method="Nelder-Mead", options=settings)
        assert least <= other.fun * (1 + 1e-4)
    for step in np.vstack([np.eye(5), -np.eye(5)]) * [0.02, 0.02, 2e-3, 1e-3, 1e-3]:
        assert objective(found + step) > least


def test_a_known_law_is_found() -> None:
    law = fit_law(*make_runs(noise=0.0))
    assert law.predict(*LARGE).value == pytest.approx(loss_of(*LARGE), rel=2e-3)
    for name, estimate in law.estimates().items():
        assert estimate.low <= KNOWN[name] <= estimate.high, name
    assert law.reach(*LARGE) == pytest.approx(
        {"parameters": 6.25, "tokens": 2e10 / 1.28e10, "flop": 2e19 / (1.6e8 * 1.28e10)}
    )
    assert law.problems(*LARGE) == []


@pytest.mark.parametrize("n_ladders", everyday([8, 50], [8]))
def test_intervals_hold_nine_of_ten_large_runs(
    n_ladders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ladders up to 160M parameters, a run of 1B."""
    monkeypatch.setattr(subject, "N_DRAWS", 60)
    held, widths = 0, []
    for seed in range(n_ladders):
        law = fit_law(*make_runs(seed=seed))
        estimate = law.predict(*LARGE)
        truth = loss_of(*LARGE) * np.exp(np.random.default_rng([seed, 1]).normal(0, 0.005))
        held += estimate.low < truth < estimate.high
        widths.append((estimate.high - estimate.low) / 2 / estimate.value)
    assert held >= 0.8 * n_ladders - 1
    assert 0.015 < np.mean(widths) < 0.035


def test_the_largest_models_follow_from_three_smaller(shared_data: Path) -> None:
    """Two corpora, 13 runs of 412M: docs/ladder.md has the figures."""
    errors, held = [], []
    columns = {"loss": "loss_c4_val", "parameters": "parameters_without_embedding"}
    for corpus in ("c4_original", "rpj"):
        where = [f"corpus={corpus}", "multiplier>=0.5"]
        runs = read_points(shared_data / "ladder" / "open_lm.csv", where, **columns)
        n, d, losses = (np.array(values) for values in runs[:3])
        small = n < n.max()
        law = fit_law(n[small], d[small], losses[small])
        assert law.n_sizes == 3 and law.missed == 0  # too few without the largest
        assert abs(fit_law(n, d, losses).missed) < 0.02
        for run in np.flatnonzero(~small):
            estimate = law.predict(n[run], d[run])
            errors.append(abs(estimate.value / losses[run] - 1))
            held.append(estimate.low < losses[run] < estimate.high)
    assert len(errors) == 13
    assert np.mean(errors) < 0.013 and max(errors) < 0.04
    assert sum(held) >= 10


def test_runs_of_one_ratio_predict_on_it_only() -> None:
    law = fit_law(*make_runs(ratios=(20,), noise=0.001))
    assert law.ratio == pytest.approx(20) and [*law.estimates()] == ["A", "E", "alpha"]
    estimate = law.predict(*LARGE)
    assert estimate.low < loss_of(*LARGE) < estimate.high
    assert not any("tokens per parameter" in problem for problem in law.problems(*LARGE))
    (problem,) = [one for one in law.problems(1e9, 8e10) if "per parameter" in one]
    assert problem == (
        "80 tokens per parameter, and all runs have 20: ask for that, or train other lengths"
    )
    with pytest.raises(DataError, match="all runs have 20 tokens per parameter: the optimum is"):
        law.optimum(1e20)


def test_the_optimum_is_the_lowest_loss_of_its_budget(law: Law) -> None:
    best = law.optimum(1e20)
    n, d = best["parameters"].value, best["tokens"].value
    assert 6 * n * d == pytest.approx(1e20)
    for factor in (0.9, 1.1):
        assert law.predict(n * factor, d / factor).value > best["loss"].value
    assert best["parameters"].low < n < best["parameters"].high


def test_a_law_survives_json_and_needs_no_scipy(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    again = msgspec.json.decode(msgspec.json.encode(law), type=Law)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert again == law
    assert again.predict(*LARGE) == law.predict(*LARGE)
    assert again.optimum(1e20) == law.optimum(1e20)


def test_seeds_of_a_setting_are_not_settings() -> None:
    """Copies of each run say nothing new; as runs of their own they would narrow intervals."""
    n, d, losses = make_runs(ratios=(5, 10, 20, 40, 80, 160), noise=0.01)
    one, four = (fit_law(*(np.tile(v, k) for v in (n, d, losses))) for k in (1, 4))
    spreads = [np.std([draw[2] for draw in law.draws]) for law in (one, four)]
    assert spreads[1] > 0.75 * spreads[0]


@pytest.mark.parametrize(
    ("factor", "number", "reason"),
    [
        (np.nan, 14, "its loss is nan"),
        (np.inf, 3, "its loss is inf"),
        (1.5, 14, "of a run with no more parameters and tokens: diverged"),
        (1.3, 0, "above the fit: diverged, or undertrained"),
    ],
)
def test_a_run_that_diverged_is_left_out(
    factor: float, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "N_DRAWS", 2)
    n, d, losses = make_runs()
    losses[number] *= factor
    law = fit_law(n, d, losses, [f"run {i}" for i in range(15)])
    ((name, why),) = law.left_out.items()
    assert name == f"run {number}" and why.endswith(reason) and law.n_runs == 14
    rest = np.arange(15) != number
    alone = fit_law(n[rest], d[rest], losses[rest])
    assert law.predict(*LARGE) == alone.predict(*LARGE)


def test_too_few_runs_are_refused() -> None:
    n, d, losses = make_runs()
    needs = "a law needs 3 sizes, as E, A and alpha take three, and 6 runs"
    with pytest.raises(DataError, match=f"6 runs of 2 sizes to fit: {needs}"):
        fit_law(n[:6], d[:6], losses[:6])
    with pytest.raises(DataError, match=f"5 runs of 5 sizes to fit: {needs}"):
        fit_law(n[::3], d[::3] * [1, 2, 4, 1, 1], losses[::3])
    with pytest.raises(DataError, match="3 runs of 3 sizes to fit: a law needs 4 sizes of one"):
        fit_law(n[:9:3], d[:9:3], losses[:9:3])
    with pytest.raises(DataError, match="0 runs of 0 sizes"):
        fit_law([], [], [])
    with pytest.raises(DataError, match="15 parameters, 15 tokens, 14 losses: they must be"):
        fit_law(n, d, losses[1:])
    with pytest.raises(DataError, match="they must be positive"):
        fit_law(n, -d, losses)


def test_predictions_that_cannot_be_trusted_have_reasons(
    law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert law.problems(*LARGE) == []
    (reach,) = (one for one in law.problems(1.6e10, 1.28e10) if "times the" in one)
    assert reach == "100 times the largest run, tested to 30: add a larger one"
    monkeypatch.setattr(subject, "N_DRAWS", 60)
    noisy = fit_law(*make_runs(noise=0.03))
    assert any(
        "the interval, " in one and ", over ±3%: add" in one for one in noisy.problems(*LARGE)
    )
    n, d, losses = make_runs()
    jump = np.where(n == n.max(), 0.94, 1.0)  # such as one that learned what no smaller one could
    jumped = fit_law(n, d, losses * jump)
    assert any(
        one.startswith("a law fitted to the smaller sizes is off by +")
        for one in jumped.problems(*LARGE)
    )
    assert abs(law.missed) < 0.01
    for number, bound, problem in ((4, 0.9, "beta is 0.9, at"), (2, np.log(0.05), "E is 0.05, at")):
        theta = [*law.parameters]
        theta[number] = bound
        at_bound = msgspec.structs.replace(law, parameters=theta)
        assert any(one.startswith(problem) for one in at_bound.problems(*LARGE))
