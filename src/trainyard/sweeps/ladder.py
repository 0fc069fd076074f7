"""A ladder: smaller models of a run's family, and how they are trained.

Each size has half as many parameters in its blocks as the one before, or another share. All else
follows from the run at the top, the target, by rules: N parameters in blocks, D tokens; of the
target N* and D*.

    width, depth     their ratio stays, with at least 2 blocks; so do the size of a head, the heads
                     that share keys, and the widths of MLPs and experts as multiples of d_model
    length           0.5, 1 and 2 times D* N / N*; of the largest without 2
    batch            B* (D / D*)^0.571, in micro batches of the target's activations
    learning rate    r* (N* / N)^0.713 (D / D*)^0.307         the same; with parametrization
                     complete_p r*, whatever the size         arXiv:2505.01618
    schedule         warmup, decay and cooldown as shares of the length; the lowest rate as a share

The rules start from the target's learning rate and batch, and are corrected by measurement:

    1  rates         the second largest and the two smallest sizes with 0.5, 1 and 2 times the
                     rule's rate, and beyond while the best is the last; then the second smallest
                     with 0.5 and 2 times the batch, and the square root of that times the rate
                     (arXiv:2205.10287)
    2  lengths       every size and length, with the corrected rate

All members read the same held-out text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import msgspec
import numpy as np

from trainyard.architecture import count_idle, padded_vocabulary_size, parameter_counts
from trainyard.config import rules
from trainyard.config.run import Model, Parallel, Run
from trainyard.errors import ConfigError
from trainyard.layout.resolve import resolve
from trainyard.planning.ladder import CHANGED_FIELDS, find_minimum
from trainyard.units import Length, parse_shares

LENGTHS = (0.5, 1.0, 2.0)
FACTORS = (0.5, 1.0, 2.0)
MOST_LOG2 = 4
"""Factors of a rate are tried up to two to the power of this, and down to one over it."""
BATCH_EXPONENT, RATE_OF_SIZE, RATE_OF_LENGTH = 0.571, 0.713, 0.307
SLOPE_DEVIATION, RATE_DEVIATION = 0.25, 0.15
"""Standard deviations supposed: of the exponent by which the best rates leave the rule, and of the
logarithm of a measured best rate."""
LEAST_HEAD, LEAST_HEADS, WIDTH_STEP = 8, 2, 16
LEAST_BLOCKS = 2
"""Unless the target has one, which cannot look up what followed earlier (arXiv:2209.11895)."""
LEAST_RATIO = 1.2
"""Least that neighbouring sizes differ by, where whole blocks and heads allow few shapes."""
HELD_OUT_TOKENS = 4_000_000
"""Most held-out tokens: the mean over them is known to about 0.001 nats."""
OF_MEMBERS: rules.Changes = {
    **{"parallel": Parallel(), "train.batch_ramp": None},
    **{"evaluate.interval": 0, "evaluate.sample_interval": 0, "checkpoint.keep_last": 1},
    **{"log.tensorboard": False, "log.wandb_project": ""},
}
"""One device, a constant batch, and all but the end left out."""
FAMILY = {"model", "data", "tokenizer", "optimizer", "precision"}
"""Sections that all sizes share, but for the shape of the model and the learning rate."""


class Rung(msgspec.Struct, frozen=True):
    """A member of a ladder, by factors of what the rules give it.

    Attributes:
        size: 0 is the largest.
        length: factor of the tokens that the target has for as many parameters in blocks.
        rate: of the learning rate.
        batch: of the batch.
    """

    size: int
    length: float = 1.0
    rate: float = 1.0
    batch: float = 1.0


class LadderSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What defines a ladder, beside its target.

    Attributes:
        share: of the target's parameters in blocks that the largest size has.
        n_sizes: number of sizes, at least 4.
        ratio: of the parameters of neighbouring sizes.
        held_out: sequences of held-out text that every member reads.
        n_seeds: runs of each member.
    """

    share: float
    n_sizes: int
    ratio: float = 2.0
    held_out: int = 1
    n_seeds: int = 1


@dataclass(frozen=True)
class Ladder:
    """Sizes below a target, and their runs."""

    target: Run
    sizes: LadderSizes

    @cached_property
    def models(self) -> list[Model]:
        """The model of each size, the largest first; two are the same if the target is small."""
        largest = self.sizes.share * block_parameters(self.target.model)
        found: list[Model] = []
        for size in range(self.sizes.n_sizes):
            most = block_parameters(found[-1]) / LEAST_RATIO if found else math.inf
            wanted = largest / self.sizes.ratio**size
            found.append(scale_model(self.target.model, wanted, most))
        return found

    @property
    def rated(self) -> tuple[int, int, int]:
        """The sizes whose rates are tried, the largest first; of the second the batch, too."""
        return 1, self.sizes.n_sizes - 2, self.sizes.n_sizes - 1

    def share_of(self, size: int) -> float:
        """Returns the parameters in blocks of a size, as a share of the target's."""
        return block_parameters(self.models[size]) / block_parameters(self.target.model)

    def build(self, rung: Rung) -> Run:
        """Builds the run of a rung, named as the target, in a layout of one device."""
        target, model, whole = self.target, self.models[rung.size], resolve(self.target)
        size = self.share_of(rung.size)
        length = rung.length * size
        given = target.train.global_batch_size
        batch = _round_batch(given * length**BATCH_EXPONENT * rung.batch)
        # Of a model with smaller activations, more sequences at a time.
        smaller = target.model.n_layers * target.model.d_model / (model.n_layers * model.d_model)
        most = target.train.micro_batch_size * smaller
        n_steps = max(1, round(length * whole.n_tokens / (batch * model.sequence_length)))
        rate = target.optimizer.learning_rate * rung.rate * math.sqrt(rung.batch)
        if model.parametrization == "standard":
            rate *= size**-RATE_OF_SIZE * length**RATE_OF_LENGTH
        lowest = target.schedule.minimum_learning_rate / target.optimizer.learning_rate
        changes: rules.Changes = {
            "model": model,
            "train.global_batch_size": batch,
            "train.micro_batch_size": max(d for d in rules.divisors(batch) if d <= most),
            "train.length": Length(n_steps, "steps"),
            "optimizer.learning_rate": float(f"{rate:.4g}"),
            "schedule.minimum_learning_rate": float(f"{lowest * rate:.4g}"),
            "evaluate.batches": max(1, self.sizes.held_out // batch),
            "log.interval": max(1, n_steps // 100),
        }
        for name in ("warmup", "decay", "cooldown"):
            part = getattr(whole, f"{name}_sequences") / whole.n_sequences
            changes[f"schedule.{name}"] = Length(round(part * n_steps), "steps")
        return rules.change(target, {**OF_MEMBERS, **changes})

    def next_rungs(self, losses: Mapping[Rung, float]) -> list[Rung]:
        """Lists the rungs to train after those that have been: empty once the ladder is complete.

        Args:
            losses: final held-out losses; infinite for a run that diverged.
        """
        more = [rung for rung in self.rate_rungs(losses) if rung not in losses]
        if more:
            return more
        last = self.batch_rungs(losses)
        offset, slope, _ = self.fit_rates(losses)
        for size, length in itertools.product(range(self.sizes.n_sizes), LENGTHS):
            if (size, length) != (0, LENGTHS[-1]):
                rate = math.exp(offset + slope * math.log(self.share_of(size)))
                last.append(Rung(size, length, float(f"{rate:.3g}")))
        return [rung for rung in dict.fromkeys(last) if rung not in losses]

    def rate_rungs(self, losses: Mapping[Rung, float]) -> list[Rung]:
        """Lists rungs around the best rate of each size so far, which at first is the rule's."""
        found = []
        for size in self.rated:
            tried = self._tried_rates(size, losses)
            best = min(tried, key=tried.__getitem__, default=1.0)
            rates = [factor * best for factor in FACTORS]
            found += [Rung(size, rate=rate) for rate in rates if abs(math.log2(rate)) <= MOST_LOG2]
        return found

    def batch_rungs(self, losses: Mapping[Rung, float]) -> list[Rung]:
        """Lists rungs with other batches, at the best rate of their size."""
        size = self.rated[1]
        rate = float(f"{find_minimum(self._tried_rates(size, losses)):.3g}")
        return [Rung(size, rate=rate, batch=factor) for factor in FACTORS]

    def _tried_rates(self, size: int, losses: Mapping[Rung, float]) -> dict[float, float]:
        """Maps the powers of two tried at a size, at length 1, to their losses."""
        return {
            rung.rate: loss
            for rung, loss in losses.items()
            if rung == Rung(size, rate=rung.rate) and math.log2(rung.rate).is_integer()
        }

    def fit_rates(self, losses: Mapping[Rung, float]) -> tuple[float, float, float]:
        """Fits the best rate of each rated size, as `fit_rates`."""
        best = {size: find_minimum(self._tried_rates(size, losses)) for size in self.rated}
        return fit_rates({self.share_of(size): rate for size, rate in best.items()})

    def best_batch(self, losses: Mapping[Rung, float]) -> tuple[float, float | None]:
        """Returns the factor of the rule's batch with the lowest loss, and what the others lose.

        The least of the losses of the others shows how flat it is, in nats; None: all diverged.
        """
        rungs = self.batch_rungs(losses)
        tried = {rung.batch: losses[rung] for rung in rungs if rung in losses}
        low, second, *_ = sorted([*tried.values(), math.inf, math.inf])
        return find_minimum(tried or {1.0: 0.0}), second - low if second < math.inf else None


def fit_rates(factors: Mapping[float, float]) -> tuple[float, float, float]:
    """Fits how the best rates leave the rule: factor = exp(offset + slope ln(size)).

    Args:
        factors: of the rule's rate, by the size as a share of the target's.

    Returns:
        offset, the logarithm of the factor at the target; slope, which is held near 0 by
        `SLOPE_DEVIATION`; and the standard deviation of the offset.
    """
    x, y = np.log([*factors]), np.log([*factors.values()])
    # Least squares of (offset, slope), with a normal prior on the slope.
    a = np.stack([np.ones_like(x), x]) / RATE_DEVIATION
    covariance = np.linalg.inv(a @ a.T + np.diag([0.0, SLOPE_DEVIATION**-2]))
    offset, slope = covariance @ a @ y / RATE_DEVIATION
    return float(offset), float(slope), math.sqrt(covariance[0, 0])


def scale_model(whole: Model, n_parameters: float, most: float = math.inf) -> Model:
    """Returns a model of a family with about as many parameters in its blocks.

    Depth and width come as near as whole blocks and heads allow to the number of parameters, and
    to the target's ratio of width to depth.

    Args:
        whole: the target's model.
        n_parameters: in blocks, to come near to.
        most: not to exceed, unless the smallest model does.
    """
    widths, per_block = _by_width(whole)
    depths = np.arange(min(LEAST_BLOCKS, whole.n_layers), whole.n_layers + 1)[:, None]
    shapes = widths / depths * whole.n_layers / whole.d_model
    # Of shapes that trade one for the other evenly, that with the nearest number of parameters.
    off = abs(np.log(depths * per_block / n_parameters)) + 0.99 * abs(np.log(shapes))
    off[depths * per_block > most] = np.inf
    depth, width = np.unravel_index(off.argmin(), off.shape)
    return scale_width(whole, int(depths[depth, 0]), int(widths[width]))


@cache
def _by_width(whole: Model) -> np.ndarray:
    """Returns the widths of a family that heads allow, and the parameters of a block of each."""
    steps = range(LEAST_HEADS * LEAST_HEAD, whole.d_model + 1, LEAST_HEAD)
    group = whole.n_heads // whole.n_key_value_heads
    heads = {width: width / _width_of_head(whole, width) for width in steps}
    # Whole heads; as many share keys as in the target, or all.
    widths = [width for width, n in heads.items() if n % min(group, max(1, int(n))) == 0]
    models = (scale_width(whole, whole.n_layers, width) for width in widths)
    return np.array([widths, [block_parameters(model) / whole.n_layers for model in models]])


def _width_of_head(whole: Model, d_model: int) -> int:
    """Returns the features of the residual stream for each head.

    They are the target's; of a model with fewer than two such heads a half, or a quarter, ..
    """
    per_head = whole.d_model // whole.n_heads
    while per_head > LEAST_HEAD and d_model < LEAST_HEADS * per_head:
        per_head //= 2
    return per_head


def scale_width(whole: Model, n_layers: int, d_model: int) -> Model:
    """Returns a model of another depth and width, all else in proportion."""
    per_head, share = _width_of_head(whole, d_model), d_model / whole.d_model
    n_heads = d_model // per_head
    group = min(n_heads, whole.n_heads // whole.n_key_value_heads)
    changes = {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": round(whole.d_head * per_head * whole.n_heads / whole.d_model),
        "n_key_value_heads": n_heads // group,
        "d_ff": max(1, round(whole.d_ff * share / WIDTH_STEP)) * WIDTH_STEP,
        "d_expert": max(1, round(whole.d_expert * share / LEAST_HEAD)) * LEAST_HEAD,
        "n_dense_blocks": round(whole.n_dense_blocks * n_layers / whole.n_layers),
    }
    return whole.model_copy(update=changes)


def block_parameters(model: Model) -> int:
    """Counts the parameters in blocks that a token uses."""
    blocks = parameter_counts(model, padded_vocabulary_size(model))["blocks"]
    return blocks - count_idle(model)


def count_parameters(run: Run) -> int:
    """Counts the parameters that a token uses, except an embedding that is not the head too.

    6 FLOP a token for each is about what training takes, as laws suppose (arXiv:2406.12907).
    """
    counts = parameter_counts(run.model, padded_vocabulary_size(run.model))
    only_read = 0 if run.model.tied_embeddings else counts["embedding"]
    return sum(counts.values()) - count_idle(run.model) - only_read


def training_flops(run: Run) -> float:
    """Counts the model FLOP of a whole run."""
    plan = resolve(run)
    return plan.n_tokens * plan.model_flops_per_token


def choose_ladder(
    target: Run, asked: LadderSizes, cost: Callable[[Run], float], cost_share: float
) -> Ladder:
    """Chooses the largest ladder whose runs cost at most a share of the target.

    Args:
        target: the run to predict.
        asked: all but `share`.
        cost: of a run, such as seconds of a device.
        cost_share: of the target's, for all runs.

    Raises:
        ConfigError: not even the smallest ladder is as cheap.
    """
    most, low, high, chosen = cost_share * cost(target), 1e-6, 1.0, None
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        ladder = Ladder(target, msgspec.structs.replace(asked, share=middle))
        if len(set(ladder.models)) < asked.n_sizes:
            low = middle
        elif sum(price_rungs(ladder, cost).values()) <= most:
            low, chosen = middle, ladder
        else:
            high = middle
    if chosen is None:
        raise ConfigError(
            f"--share {cost_share:.3g}: no ladder of {asked.n_sizes} sizes below "
            f"{target.name} is as cheap",
            "a greater --share, fewer --sizes, a smaller --ratio, or a larger target",
        )
    return chosen


def price_rungs(ladder: Ladder, cost: Callable[[Run], float]) -> dict[Rung, float]:
    """Prices the members of a ladder whose rules are right, over seeds.

    Each size is priced once, and all its members by their FLOP.

    Args:
        ladder: its sizes.
        cost: of a run.
    """
    losses = {rung: abs(math.log(rung.rate)) for rung in ladder.rate_rungs({})}
    rungs = [*losses, *ladder.next_rungs(losses)]
    members = [ladder.build(Rung(size)) for size in range(ladder.sizes.n_sizes)]
    per_flop = [ladder.sizes.n_seeds * cost(run) / training_flops(run) for run in members]
    return {rung: per_flop[rung.size] * training_flops(ladder.build(rung)) for rung in rungs}


def count_held_out(run: Run, sizes: Mapping[str, int]) -> int:
    """Counts the sequences of held-out text that members read: all, up to `HELD_OUT_TOKENS`.

    Args:
        run: the target.
        sizes: tokens of its token files, by prefix; those that do not exist are missing.
    """
    given, length = run.data.valid.prefixes, run.model.sequence_length
    shares = parse_shares(run.data.split)
    share = 1.0 if given else shares[1] / sum(shares)
    there = sum(sizes.values()) if sizes else HELD_OUT_TOKENS / max(share, 1e-9)
    return max(1, int(min(HELD_OUT_TOKENS, share * there)) // length)


def family_of(run: Run) -> dict[str, object]:
    """Returns what a run shares with the members of its ladder."""
    sized = {name.removeprefix("model.") for name in CHANGED_FIELDS if name.startswith("model.")}
    own = {"model": sized, "optimizer": {"learning_rate"}}
    return run.model_dump(mode="json", include=FAMILY, exclude=own)


def _round_batch(batch: float) -> int:
    """Rounds a batch to one that devices and micro batches can share: 1, 2, 4, 8, 16, 24, .."""
    if batch >= 8 * math.sqrt(2):
        return round(batch / 8) * 8
    return int(2 ** max(0, round(math.log2(batch))))
