"""The learning rate of a step: pure arithmetic."""

from __future__ import annotations

import math

from trainyard.config.run import Run
from trainyard.plan.resolve import Plan


def learning_rate(run: Run, plan: Plan, consumed_sequences: int) -> float:
    """Returns the rate of the step that ends at `consumed_sequences` in total.

    Counting the step's own batch makes the first rate of a warmup positive.

    Source: the rules of Megatron-LM's OptimizerParamScheduler; warmup starts from zero.
    """
    peak, lowest = run.optimizer.learning_rate, run.schedule.minimum_learning_rate
    if consumed_sequences <= plan.warmup_sequences and plan.warmup_sequences > 0:
        return peak * consumed_sequences / plan.warmup_sequences
    if run.schedule.kind == "constant":
        return peak
    if consumed_sequences > plan.decay_sequences:
        return lowest
    return lowest + (peak - lowest) * _share_of_peak(run, plan, consumed_sequences)


def _share_of_peak(run: Run, plan: Plan, consumed_sequences: int) -> float:
    if run.schedule.kind == "warmup_stable_decay":
        left = (plan.decay_sequences - consumed_sequences) / max(plan.cooldown_sequences, 1.0)
        return min(1.0, left)
    span = plan.decay_sequences - plan.warmup_sequences
    done = (consumed_sequences - plan.warmup_sequences) / span if span > 0 else 1.0
    if run.schedule.kind == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))
