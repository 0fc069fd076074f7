"""A ladder as a set of runs: its folder, the members that come next, and what it predicts.

runs/web-ladder/set.toml            the members, by their factors (`sweeps/ladder.py`)
runs/web-ladder/target.toml         the run to predict
runs/web-ladder/ladder.json         the sizes
runs/web-ladder/prediction.json     what was found, for `trainyard plan`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import asdict

from trainyard.config import rules
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.errors import DataError
from trainyard.files import publish_text, read_file
from trainyard.launch.lock import hold
from trainyard.layout.resolve import resolve
from trainyard.sweeps import sets
from trainyard.sweeps.ladder import Ladder, LadderSizes, Rung, count_parameters, family_of
from trainyard.sweeps.law import Estimate, Law, Points, fit_law, to_json
from trainyard.sweeps.results import read_results
from trainyard.training.run_folder import RUNS, open_run
from trainyard.units import format_large

TARGET, SIZES, PREDICTION = "target.toml", "ladder.json", "prediction.json"
ENDING = "-ladder"
RATE_INTERVAL = 1.645
"""Standard deviations that hold 90 %."""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a ladder says of its target.

    Attributes:
        target: its name.
        parameters: that a token uses, as the law counts them.
        tokens: that it is trained on.
        law: fitted to the members.
        learning_rate: recommended, with its 90 % interval.
        given_rate: the target's own.
        batch: recommended, in sequences.
        given_batch: the target's own.
        batch_flatness: the least that half or twice the batch loses, in nats; None if unknown.
    """

    target: str
    parameters: int
    tokens: int
    law: Law
    learning_rate: Estimate
    given_rate: float
    batch: int
    given_batch: int
    batch_flatness: float | None

    def render(self) -> str:
        """Renders the prediction for people."""
        law, rate, lost = self.law, self.learning_rate, self.batch_flatness
        n, d = format_large(self.parameters), format_large(self.tokens)
        lines = [
            f"expected loss of {self.target}, {n} parameters on {d} tokens:",
            *law.describe(self.parameters, self.tokens),
            f"learning rate {rate.value:.3g} ({rate.low:.3g} to {rate.high:.3g}); "
            f"the run has {self.given_rate:.3g}",
            f"batch {self.batch} sequences; the run has {self.given_batch}"
            + ("" if lost is None else f"; half or twice as many lose at least {lost:.4f}"),
            *(f"left out {name}: {reason}" for name, reason in law.left_out.items()),
        ]
        return "\n".join(lines)


def is_ladder(name: str | Path) -> bool:
    """Returns whether a name in `runs`, or a folder, is that of a ladder."""
    return sets.is_set(name) and (sets.read_set(name).folder / SIZES).exists()


def open_ladder(folder: Path) -> Ladder:
    """Reads a ladder's target and sizes.

    Raises:
        DataError: a file is missing or damaged.
    """
    try:
        sizes = msgspec.json.decode(read_file(folder / SIZES), type=LadderSizes)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{folder / SIZES} cannot be read: {error}", "restore it, or begin another ladder"
        ) from None
    return Ladder(load_run(str(folder / TARGET)).run, sizes)


def write_ladder(ladder: Ladder) -> sets.RunSet:
    """Writes a ladder and its first members; returns the set, or the one that is there.

    Raises:
        DataError: the folder has the ladder of another target.
        UserError: what the target reads is missing.
    """
    folder, target = RUNS / f"{ladder.target.name}{ENDING}", render_run(ladder.target)
    if not is_ladder(folder):
        open_run(folder, run=ladder.target).refuse_missing_inputs()
        folder.mkdir(parents=True, exist_ok=True)
        publish_text(folder / TARGET, target)
        publish_text(folder / SIZES, to_json(ladder.sizes))
        grow_ladder(folder)
    elif render_run(open_ladder(folder).target) != target:
        raise DataError(
            f"{folder} is the ladder of another {ladder.target.name}",
            f"continue it: trainyard ladder {folder}; or give the run another name",
        )
    return sets.read_set(folder)


def grow_ladder(folder: Path) -> sets.RunSet | None:
    """Adds the members that come next; None if some are not done, or if it is complete.

    Several programs may train a ladder: one of them adds.

    Raises:
        DataError: the rules of sizes have changed since it was begun.
    """
    ladder = open_ladder(folder)
    first = ladder.target.train.seed
    with hold(folder / "claims" / "next"):
        known = sets.read_set(folder) if sets.is_set(folder) else sets.RunSet(folder, [])
        for name, run in known.load_members().items():
            if run.model not in ladder.models:
                raise DataError(
                    f"{name} has another shape than the sizes of {folder}: another version of "
                    "Trainyard has other rules, or the file was changed",
                    "finish it with that version; or give the run another name, for a new ladder",
                )
        losses, members, runs = read_losses(known), [*known.members], {}
        if sum(map(len, losses.values())) < len(members):
            return None
        rungs = ladder.next_rungs(average(losses))
        for rung, seed in itertools.product(rungs, range(first, first + ladder.sizes.n_seeds)):
            name = f"{folder.name}-{len(members) + 1:02}"
            values = {factor: f"{value:.4g}" for factor, value in asdict(rung).items()}
            members.append(sets.Member(folder.with_name(name), values | {sets.SEED: str(seed)}))
            runs[name] = rules.change(ladder.build(rung), {"name": name, "train.seed": seed})
        if runs:
            sets.write_set(sets.RunSet(folder, members), runs)
    return sets.RunSet(folder, members) if runs else None


def read_losses(run_set: sets.RunSet) -> dict[Rung, list[float]]:
    """Lists the losses of the members that have ended, by their rungs.

    A run that the guard stopped has diverged: its loss is infinite.
    """
    losses: dict[Rung, list[float]] = {}
    for one in read_results(run_set).members:
        loss = math.inf if run_set.why_stopped(one.member) else one.final_loss
        if loss is not None:
            rung = msgspec.convert(one.member.values, Rung, strict=False)
            losses.setdefault(rung, []).append(loss)
    return losses


def conclude(folder: Path, picture: Path | None = None) -> Prediction:
    """Writes what the members of a ladder that are done predict of its target.

    Args:
        folder: the ladder's; it gets a picture too, where matplotlib is installed.
        picture: another file to draw it to.

    Raises:
        DataError: too few members are done; says how many.
    """
    ladder = open_ladder(folder)
    losses = read_losses(sets.read_set(folder))
    found = predict_target(ladder, losses)
    publish_text(folder / PREDICTION, to_json(found))
    publish_text(folder / sets.CONCLUSION, found.render() + "\n")
    with suppress(ModuleNotFoundError):
        from trainyard.sweeps.picture import draw_law

        points, asked = collect_points(ladder, losses), [(found.parameters, found.tokens)]
        for path in (folder / sets.LAW_PICTURE, *([picture] if picture else [])):
            draw_law(path, found.law, points, asked)
    return found


def average(losses: Mapping[Rung, Sequence[float]]) -> dict[Rung, float]:
    """Returns the mean over seeds."""
    return {rung: fmean(each) for rung, each in losses.items()}


def collect_points(ladder: Ladder, losses: Mapping[Rung, Sequence[float]]) -> Points:
    """Collects the runs that a law is fitted to: the best rate and batch of each size and length.

    The target will be trained with the best, too.
    """
    means = average(losses)
    best: dict[tuple[int, float], Rung] = {}
    for rung in sorted(means, key=means.__getitem__):
        if means[rung] < math.inf:
            best.setdefault((rung.size, rung.length), rung)
    runs = [(rung, ladder.build(rung), loss) for rung in best.values() for loss in losses[rung]]
    return Points(
        [count_parameters(run) for _, run, _ in runs],
        [resolve(run).n_tokens for _, run, _ in runs],
        [loss for *_, loss in runs],
        [f"size {rung.size}, length {rung.length:g}" for rung, *_ in runs],
    )


def predict_target(ladder: Ladder, losses: Mapping[Rung, Sequence[float]]) -> Prediction:
    """Fits the law, and the best rates and batches.

    Args:
        ladder: its target and sizes.
        losses: final held-out losses of each rung, over seeds; infinite where it diverged.

    Raises:
        DataError: too few rungs are done; says how many.
    """
    means, first = average(losses), ladder.rate_rungs({})
    if missing := [rung for rung in first if rung not in means]:
        raise DataError(
            f"{len(missing)} of the first {len(first)} runs of the ladder are not done",
            "the same command continues",
        )
    target = ladder.target
    offset, _, deviation = ladder.fit_rates(means)
    rate = target.optimizer.learning_rate * math.exp(offset)
    spread = math.exp(RATE_INTERVAL * deviation)
    batch, flatness = ladder.best_batch(means)
    return Prediction(
        target=target.name,
        parameters=count_parameters(target),
        tokens=resolve(target).n_tokens,
        law=fit_law(*collect_points(ladder, losses)),
        learning_rate=Estimate(rate, rate / spread, rate * spread),
        given_rate=target.optimizer.learning_rate,
        batch=max(1, round(batch * target.train.global_batch_size)),
        given_batch=target.train.global_batch_size,
        batch_flatness=flatness,
    )


def describe_expected(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Says what a ladder in `runs` predicts of a run of its family; empty without one.

    Its own ladder comes first, then any whose target differs in size, length, batch, learning rate
    and layout only.

    Returns:
        for programs, the ladder and what `Law.answer` returns; and the same in lines.
    """
    others = sorted(path.parent for path in RUNS.glob(f"*{ENDING}/{PREDICTION}"))
    for folder in [RUNS / f"{run.name}{ENDING}", *others]:
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(read_file(folder / PREDICTION), type=Prediction)
            if family_of(load_run(str(folder / TARGET)).run) == family_of(run):
                break
    else:
        return {}, []
    n, d = count_parameters(run), resolve(run).n_tokens
    first, *lines = found.law.describe(n, d)
    return {"ladder": str(folder)} | found.law.answer(n, d), [f"{first}; by {folder}", *lines]
