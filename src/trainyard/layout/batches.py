"""Batch size and consumed sequences of each step: pure arithmetic.

With a ramp from 16 by 16 to 64 over 120 sequences there are three increments of 40 sequences each:

    step   consumed before   increments so far = floor(consumed / 40)   batch
    0      0                 0                                          16
    1      16                0                                          16
    2      32                0                                          16
    3      48                1                                          32
    4      80                2                                          48
    5      128               3 (all)                                    64

so the steps fall into stages of equal batch: (from step 0: 16), (3: 32), (4: 48), (5: 64).
Source: Megatron-LM's rampup-batch-size; its rounding of the increment is kept.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from trainyard.config.run import Run, Train
from trainyard.errors import ConfigError
from trainyard.units import Length


def batch_sizes(train: Train) -> list[int]:
    """Lists the batch sizes of a ramp, in sequences; a short ramp skips some."""
    ramp, full = train.batch_ramp, train.global_batch_size
    return [full] if ramp is None else [*range(ramp.start, full, ramp.increment), full]


@dataclass(frozen=True)
class _Stage:
    """Steps that share one batch size."""

    first_step: int
    consumed_before: int
    batch_size: int


class BatchSchedule:
    """Batch size and consumed sequences as functions of the step number."""

    def __init__(self, run: Run) -> None:
        self._sequence_length = run.model.sequence_length
        self._stages = self._build_stages(run)
        self.order_start = self.sequences(run.data.skip) - self.consumed(run.data.from_step)

    def batch_size(self, step: int) -> int:
        """Sequences of step `step`, counted from 0."""
        return self._stage(step).batch_size

    def consumed(self, step: int) -> int:
        """Sequences consumed before step `step`."""
        stage = self._stage(step)
        return stage.consumed_before + (step - stage.first_step) * stage.batch_size

    def position(self, step: int) -> int:
        """Place in the order of the data of the first sequence of step `step`."""
        return self.consumed(step) + self.order_start

    def steps_within(self, n_sequences: int) -> int:
        """Whole steps that fit into `n_sequences`; at least one."""
        index = bisect.bisect_right(self._stages, n_sequences, key=lambda s: s.consumed_before) - 1
        stage = self._stages[index]
        return max(1, stage.first_step + (n_sequences - stage.consumed_before) // stage.batch_size)

    def sequences(self, length: Length) -> int:
        """Whole sequences in a length."""
        if length.unit == "tokens":
            return length.amount // self._sequence_length
        return length.amount if length.unit == "sequences" else self.consumed(length.amount)

    def _stage(self, step: int) -> _Stage:
        return self._stages[bisect.bisect_right(self._stages, step, key=lambda s: s.first_step) - 1]

    def _build_stages(self, run: Run) -> list[_Stage]:
        ramp, full = run.train.batch_ramp, run.train.global_batch_size
        if ramp is None or ramp.start == full:
            return [_Stage(0, 0, full)]
        if ramp.length.unit == "steps":
            raise ConfigError(
                f"train.batch_ramp.length={str(ramp.length)!r} is in steps, whose size it sets",
                "give it in tokens or sequences",
            )
        self._stages = [_Stage(0, 0, full)]
        total = self.sequences(ramp.length)
        if total == 0:
            return self._stages
        n_increments = (full - ramp.start) // ramp.increment
        per_increment = total / n_increments
        stages = []
        step = consumed = 0
        while (done := int(consumed / per_increment)) < n_increments:
            batch = ramp.start + done * ramp.increment
            stages.append(_Stage(step, consumed, batch))
            n_steps = max(1, int(((done + 1) * per_increment - consumed) / batch) - 1)
            while int((consumed + n_steps * batch) / per_increment) == done:
                n_steps += 1
            step, consumed = step + n_steps, consumed + n_steps * batch
        return [*stages, _Stage(step, consumed, full)]
