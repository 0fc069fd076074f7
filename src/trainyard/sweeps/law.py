"""Chinchilla's law: the loss that a model of N parameters reaches after D tokens.

    L(N, D) = E + A N^-alpha + B D^-beta          (approach 3 of arXiv:2203.15556)

The fit minimizes the Huber loss (delta 1e-3) of differences of log losses, as arXiv:2404.10102
does, from many starts. Runs that all have one ratio r of tokens to parameters cannot separate A
from B: they get E + A N^-alpha, which holds on that ratio only.

A few small runs do not determine two exponents. So each has a prior, 0.35 with a standard
deviation of 0.05, as if runs scattered by 0.5 %. Published fits give 0.34 and 0.28
(arXiv:2203.15556), 0.348 and 0.366 (arXiv:2404.10102), 0.353 for both (arXiv:2305.16264).

Intervals hold 90 %. Each draw of the bootstrap gives settings, and seeds within a setting,
exponential weights (Rubin, The Bayesian bootstrap, 1981), which never lose a size as resampling
would, and moves the center of the prior within its deviation. The interval of a loss adds the
scatter of runs.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.errors import DataError, explain_failure
from trainyard.extras import require
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file
from trainyard.units import format_large

Array = NDArray[np.float64]

DELTA = 1e-3
EXPONENT, EXPONENT_DEVIATION, EXPECTED_SCATTER = 0.35, 0.05, 0.005
BOUNDS = {"A": (1e-9, 1e26), "E": (0.05, 50.0), "alpha": (0.1, 0.9), "beta": (0.1, 0.9)}
COVERED = (5, 95)
"""Percentiles that an interval spans."""
DIVERGED_SCATTERS, LEAST_SCATTER, DOMINATED = 10, 0.002, 0.03
ASSUMED_RUNS = 2
"""Runs of expected scatter that count beside the real ones: a few show too little of it."""
N_DRAWS = 200
ONE_RATIO, MOST_HALF_WIDTH, MOST_REACH, LARGEST = 1.5, 0.03, 30, 1.2


class Estimate(NamedTuple):
    """A value with the ends of its 90 % interval."""

    value: float
    low: float
    high: float


class Points(NamedTuple):
    """Finished runs, in the order of the file."""

    parameters: list[float]
    tokens: list[float]
    losses: list[float]
    names: list[str]


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted law. Needs no scipy; `msgspec.json` writes and reads it.

    Attributes:
        parameters: log A, log B, log E, alpha, beta; log A, log E, alpha for one ratio.
        draws: the same of each draw of the bootstrap.
        scatter: mean distance of a run's log loss from the law.
        largest: the most parameters, tokens and FLOP of a run.
        n_runs: number of runs that it is fitted to.
        n_sizes: number of their sizes.
        ratio: tokens per parameter, where all runs have one.
        missed: log loss of the largest size minus that of a law fitted to the others; 0 if those
            are too few.
        left_out: runs that the fit does not use, with reasons.
    """

    parameters: list[float]
    draws: list[list[float]]
    scatter: float
    largest: dict[str, float]
    n_runs: int
    n_sizes: int
    ratio: float | None
    missed: float
    left_out: dict[str, str]

    def predict(self, parameters: float, tokens: float) -> Estimate:
        """Predicts the loss of one run; `problems` says whether to trust it."""
        x = np.log([[parameters, tokens]])[:, : 1 if self.ratio else 2]
        noise = (np.arange(15) + 0.5) / 15 - 0.5  # quantiles of a Laplace distribution
        noise = -self.scatter * np.sign(noise) * np.log1p(-2 * np.abs(noise))
        drawn = (_log_losses(np.array(self.draws), x) + noise).ravel()
        value = _log_losses(np.array(self.parameters), x)
        return _estimate(np.exp(np.concatenate([value, drawn])))

    def estimates(self) -> dict[str, Estimate]:
        """Returns the fitted parameters under their published names."""
        names = ("A", "E", "alpha") if self.ratio else ("A", "B", "E", "alpha", "beta")
        rows = np.vstack([self.parameters, self.draws]).T
        is_log = len(names) // 2 + 1
        columns = [*np.exp(rows[:is_log]), *rows[is_log:]]
        return {name: _estimate(column) for name, column in zip(names, columns, strict=True)}

    def optimum(self, flop: float) -> dict[str, Estimate]:
        """Returns the parameters and tokens of the lowest loss for 6 N D FLOP, and that loss.

        Raises:
            DataError: the runs have one ratio of tokens to parameters, and cannot tell.
        """
        if self.ratio:
            problem = f"all runs have {self.ratio:.3g} tokens per parameter: the optimum is unknown"
            raise DataError(problem, "train some sizes with 4 times fewer or more tokens")
        a, b, _, alpha, beta = np.vstack([self.parameters, self.draws]).T
        scale = a - b + np.log(alpha / beta) + beta * math.log(flop / 6)
        parameters = np.exp(scale / (alpha + beta))
        n, d = _estimate(parameters), _estimate(flop / 6 / parameters)
        return {"parameters": n, "tokens": d, "loss": self.predict(n.value, d.value)}

    def reach(self, parameters: float, tokens: float) -> dict[str, float]:
        """Returns how many times more parameters, tokens and FLOP than the largest run has."""
        asked = {"parameters": parameters, "tokens": tokens, "flop": 6 * parameters * tokens}
        return {name: asked[name] / most for name, most in self.largest.items()}

    def answer(self, parameters: float, tokens: float) -> dict[str, Any]:
        """Returns what is known of a run: its loss, why it cannot be trusted, reach and optimum.

        The loss is None if it cannot be trusted, and so is the best run of as many FLOP.
        """
        problems, optimum = self.problems(parameters, tokens), None
        if not self.ratio:
            best = self.optimum(6.0 * parameters * tokens)
            n, d, loss = (one.value for one in best.values())
            if not self.problems(n, d):
                optimum = {"parameters": n, "tokens": d, "loss": loss}
        return {
            "parameters": parameters,
            "tokens": tokens,
            "loss": None if problems else self.predict(parameters, tokens),
            "problems": problems,
            "reach": self.reach(parameters, tokens),
            "optimum": optimum,
        }

    def describe(self, parameters: float, tokens: float) -> list[str]:
        """Says what `answer` returns, for people."""
        found = self.answer(parameters, tokens)
        lines = [f"not predicted: {problem}" for problem in found["problems"]]
        if found["loss"]:
            value, low, high = found["loss"]
            lines.append(f"{value:.4f} held out ({low:.4f} to {high:.4f}, 90 %)")
        if best := found["optimum"]:
            n, d = format_large(best["parameters"]), format_large(best["tokens"])
            lines.append(
                f"{tokens / parameters:.3g} tokens per parameter; for the same FLOP, "
                f"{n} parameters on {d} tokens reach {best['loss']:.4f}"
            )
        times = ", ".join(f"{value:.3g} times the {name}" for name, value in found["reach"].items())
        largest = f"the largest of {self.n_runs} runs in {self.n_sizes} sizes"
        return [*lines, f"reach: {times} of {largest}"]

    def problems(self, parameters: float, tokens: float) -> list[str]:
        """Says why a prediction cannot be trusted, each with a hint; empty if it can."""
        value, low, high = self.predict(parameters, tokens)
        width, own = (high - low) / 2 / value, tokens / parameters
        times = max(self.reach(parameters, tokens)[name] for name in ("parameters", "tokens"))
        found = [
            f"{name} is {one.value:.3g}, at its bound: add sizes and lengths"
            for name, one in self.estimates().items()
            if name not in "AB" and np.isclose(one.value, BOUNDS[name], rtol=1e-3).any()
        ]
        if width > MOST_HALF_WIDTH:
            limit = f"over ±{MOST_HALF_WIDTH:.0%}: add a larger size, or seeds"
            found.append(f"the interval, {low:.4g} to {high:.4g}, is ±{width:.1%}, {limit}")
        if abs(self.missed) > MOST_HALF_WIDTH:
            limit = f"{-self.missed:+.1%} at the largest, over {MOST_HALF_WIDTH:.0%}"
            found.append(f"a law fitted to the smaller sizes is off by {limit}: add larger sizes")
        if times > MOST_REACH:
            limit = f"tested to {MOST_REACH}: add a larger one"
            found.append(f"{times:.3g} times the largest run, {limit}")
        if self.ratio and not 1 / ONE_RATIO < own / self.ratio < ONE_RATIO:
            limit = f"and all runs have {self.ratio:.3g}: ask for that, or train other lengths"
            found.append(f"{own:.3g} tokens per parameter, {limit}")
        return found


def read_points(
    path: Path, where: Sequence[str] = (), loss: str = "loss", parameters: str = "parameters"
) -> Points:
    """Reads runs from a CSV file with a header.

    Args:
        path: the file. Tokens are in a column `tokens`, or follow from `flop` as
            flop / (6 parameters). A column `name` names the runs; else their lines do.
        where: conditions on columns, all of which a run must meet: corpus=c4, multiplier>=0.5.
        loss: the column of the held-out loss; a diverged run may have nan or nothing there.
        parameters: the column of the parameters.

    Raises:
        DataError: the file, a column or a value is missing or wrong.
    """
    with explain_failure(f"cannot read {path}", "check the path", DataError):
        text = read_file(path, SETTINGS_LIMIT_BYTES).decode(errors="replace")
    reader, points = csv.DictReader(text.splitlines()), Points([], [], [], [])
    try:
        for row in reader:
            if all(_meets(row, condition) for condition in where):
                n = float(row[parameters])
                points.parameters.append(n)
                points.tokens.append(float(row.get("tokens") or float(row["flop"]) / 6 / n))
                points.losses.append(float(row[loss] or "nan"))
                points.names.append(row.get("name") or f"line {reader.line_num}")
    except KeyError as error:
        columns = f"columns: {', '.join(reader.fieldnames or [])}"
        raise DataError(f"{path}: there is no column {error}", columns) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        place = f"{path}, line {reader.line_num}"
        raise DataError(f"{place}: {error}", "correct it, or leave its line out") from None
    return points


def _meets(row: dict[str, str], condition: str) -> bool:
    match = re.fullmatch(r"([^<>=]+)(>=|<=|=)(.*)", condition)
    if match is None:
        raise DataError(f"{condition}: not a condition", "such as corpus=c4 or multiplier>=1")
    value, relation, wanted = row[match[1]], match[2], match[3]
    if relation == "=":
        return value == wanted
    return float(value) >= float(wanted) if relation == ">=" else float(value) <= float(wanted)


def to_json(found: Any) -> str:
    """Returns indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(found)).decode() + "\n"


def fit_law(
    parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, names: Sequence[str] = ()
) -> Law:
    """Fits the law to finished runs; several seeds of a setting are several entries.

    Args:
        parameters: of each run, (n,).
        tokens: that each was trained on, (n,).
        losses: held-out losses in nats per token, (n,).
        names: to name runs that are left out. Default: their numbers, from 1.

    Raises:
        DataError: too few sizes or runs, or values that are not positive.
        MachineError: scipy is missing.
    """
    require("scipy")
    n, d, all_losses = (np.asarray(values, float) for values in (parameters, tokens, losses))
    if not len(n) == len(d) == len(all_losses) or not ((n > 0) & (d > 0)).all():
        counts = f"{len(n)} parameters, {len(d)} tokens, {len(all_losses)} losses"
        raise DataError(f"{counts}: they must be positive, and as many of each", "correct them")
    ratios = d / n
    is_ray = len(n) > 0 and max(ratios) < ONE_RATIO * min(ratios)
    ray = float(np.median(ratios)) if is_ray else None
    x, y = np.log([n] if ray else [n, d]).T, np.log(np.where(all_losses > 0, all_losses, np.nan))
    reasons = _find_diverged(n, d, all_losses)
    least = (4, 4) if ray else (3, 6)
    while True:
        kept = np.array([not reason for reason in reasons], bool)
        n_runs, n_sizes = int(kept.sum()), len(np.unique(n[kept]))
        if n_sizes < least[0] or n_runs < least[1]:
            few = "3 sizes, as E, A and alpha take three, and 6 runs"
            few = "4 sizes of one ratio, as three fit any law exactly" if ray else few
            hint = "train more sizes, each twice the last, and some with 4 times more tokens"
            raise DataError(f"{n_runs} runs of {n_sizes} sizes to fit: a law needs {few}", hint)
        fitted = _fit(x[kept], y[kept])
        distances = y - _log_losses(fitted, x)
        typical = max(1.4826 * np.median(np.abs(distances[kept])), LEAST_SCATTER)
        far = np.flatnonzero(kept & (distances > DIVERGED_SCATTERS * typical))
        if not len(far):
            break
        for i in far:
            above = f"{math.expm1(distances[i]):.1%} above the fit"
            reasons[i] = f"its loss, {all_losses[i]:.4g}, is {above}: diverged, or undertrained"
    n, d, x, y = n[kept], d[kept], x[kept], y[kept]
    n_free = len(n) - x.shape[1] - 1 + ASSUMED_RUNS
    total = np.abs(distances[kept]).sum() + ASSUMED_RUNS * EXPECTED_SCATTER
    noise = np.random.default_rng(1).laplace(0, total * ASSUMED_RUNS / n_free**2, (N_DRAWS, len(n)))
    most = [float(values.max()) for values in (n, d, 6 * n * d)]
    labels = names or [str(number + 1) for number in range(len(reasons))]
    return Law(
        fitted.tolist(),
        draws=_bootstrap(fitted, x, y + noise, np.stack([n, d], 1)).tolist(),
        scatter=float(total / n_free),
        largest={"parameters": most[0], "tokens": most[1], "flop": most[2]},
        n_runs=n_runs,
        n_sizes=n_sizes,
        ratio=ray,
        missed=_miss_largest(n, x, y, least),
        left_out={name: why for name, why in zip(labels, reasons, strict=True) if why},
    )


def _miss_largest(n: Array, x: Array, y: Array, least: tuple[int, int]) -> float:
    """Returns the mean distance of the largest size from a law of the others; 0 if too few."""
    is_small = n * LARGEST < max(n)
    if len(np.unique(n[is_small])) < least[0] or is_small.sum() < least[1]:
        return 0.0
    distances = y - _log_losses(_fit(x[is_small], y[is_small]), x)
    return float(np.mean(distances[~is_small]))


def _find_diverged(n: Array, d: Array, losses: Array) -> list[str]:
    """Explains losses that are not finite, or above that of a smaller run; empty for others."""
    reasons = []
    for size, length, loss in zip(n, d, losses, strict=True):
        is_less = (losses > 0) & (n <= size) & (d <= length)
        lowest, why = losses[is_less].min(initial=np.inf), ""
        if not 0 < loss < np.inf:
            why = f"its loss is {loss}"
        elif loss > (1 + DOMINATED) * lowest:
            other = f"{lowest:.4g}, that of a run with no more parameters and tokens"
            why = f"its loss, {loss:.4g}, is above {other}: diverged"
        reasons.append(why)
    return reasons


def _log_losses(theta: Array, x: Array) -> Array:
    """Returns the log losses of laws (..., 2k + 1) at the runs (n, k): (..., n)."""
    return np.asarray(np.logaddexp.reduce(_log_terms(theta, x), axis=-1))


def _log_terms(theta: Array, x: Array) -> Array:
    k = x.shape[1]
    powers = theta[..., None, :k] - theta[..., None, k + 1 :] * x
    e = np.broadcast_to(theta[..., None, k : k + 1], (*powers.shape[:-1], 1))
    return np.concatenate([powers, e], -1)


def _fit(x: Array, y: Array) -> Array:
    """Fits from starts in which each term has a small or a large part of the median loss."""
    k = x.shape[1]
    solutions = []
    for parts in product((0.1, 0.35), repeat=k):
        for exponents in product((0.25, 0.45), repeat=k):
            e = np.median(y) + math.log(1 - sum(parts))
            terms = np.median(y) + np.log(parts) + np.array(exponents) * x.mean(0)
            start = np.concatenate([terms, [e], exponents])
            solutions.append(_solve(start, x, y, np.ones(len(y)), np.full(k, EXPONENT)))
    best = min(solutions, key=lambda solution: float(solution.cost))
    return np.asarray(best.x)


def _solve(start: Array, x: Array, y: Array, weights: Array, centers: Array) -> Any:
    """Minimizes the weighted Huber loss and, with the exponents, the prior around `centers`."""
    from scipy.optimize import least_squares

    n, k = x.shape
    strength = math.sqrt(DELTA * EXPECTED_SCATTER) / EXPONENT_DEVIATION
    is_prior = np.arange(n + k) >= n
    all_weights = np.concatenate([weights, np.ones(k)])

    def distances(theta: Array) -> Array:
        prior = strength * (theta[k + 1 :] - centers)
        return np.concatenate([_log_losses(theta, x) - y, prior])

    def jacobian(theta: Array) -> Array:
        terms = _log_terms(theta, x)
        parts = np.exp(terms - np.logaddexp.reduce(terms, axis=-1)[:, None])
        of_runs = np.hstack([parts, -parts[:, :k] * x])
        return np.vstack([of_runs, strength * np.eye(2 * k + 1)[k + 1 :]])

    def huber(squares: Array) -> Array:
        roots = np.where(is_prior, 1, np.sqrt(np.maximum(squares, 1)))
        is_far = roots > 1
        values = np.where(is_far, 2 * roots - 1, squares)
        return np.asarray(all_weights * [values, 1 / roots, np.where(is_far, -0.5 / roots**3, 0)])

    logs = np.log([BOUNDS["A"]] * k + [BOUNDS["E"]])
    bounds = tuple(np.vstack([logs, [BOUNDS["alpha"]] * k]).T)
    scale = [1.0] * k + [0.1] + [0.05] * k
    start = np.clip(start, *bounds)
    settings: Any = {"bounds": bounds, "x_scale": scale, "loss": huber, "f_scale": DELTA}
    return least_squares(distances, start, jacobian, **settings)


def _bootstrap(fitted: Array, x: Array, drawn_y: Array, settings: Array) -> Array:
    random = np.random.default_rng(0)
    _, setting = np.unique(settings, axis=0, return_inverse=True)
    setting = setting.ravel()
    n_seeds = np.bincount(setting)
    drawn = []
    for y in drawn_y:
        seeds = random.exponential(size=len(x))
        seeds *= (n_seeds / np.bincount(setting, seeds))[setting]
        weights = random.exponential(size=len(n_seeds))[setting] * seeds
        centers = random.normal(EXPONENT, EXPONENT_DEVIATION, (x.shape[1],))
        drawn.append(_solve(fitted, x, y, weights, centers).x)
    return np.array(drawn)


def _estimate(values: Array) -> Estimate:
    """Takes the value first, then its draws."""
    low, high = np.percentile(values[1:], COVERED)
    return Estimate(float(values[0]), float(low), float(high))
