"""Dynamic loss scaling: the rule against a plain one, what a checkpoint keeps, no waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainyard.config.precisions import LossScale
from trainyard.model.loss import LossOptions, summed_cross_entropy
from trainyard.precision.scaler import LARGEST, LossScaler, SavedScale

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(3.5), torch.tensor(math.inf)


@dataclass
class PlainScaler:
    """The rule in plain Python, from the description of Megatron-LM's DynamicGradScaler."""

    settings: LossScale
    scale: float = 0.0
    good_steps: int = 0
    overflows_left: int = 0

    def __post_init__(self) -> None:
        self.scale, self.overflows_left = self.settings.initial, self.settings.hysteresis

    def update(self, norm: float) -> None:
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == self.settings.window:
                self.good_steps = 0
                self.overflows_left = self.settings.hysteresis
                self.scale = min(self.scale * 2, 2.0**64)
            return
        self.good_steps = 0
        self.overflows_left -= 1
        if self.overflows_left <= 0:
            self.scale = max(self.scale / 2, self.settings.minimum)


settings_of_a_run = st.builds(
    LossScale,
    initial=st.integers(3, 63).map(lambda power: 2.0**power),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    minimum=st.integers(-3, 3).map(lambda power: 2.0**power),
)
norms = st.lists(st.sampled_from([0.0, 1e-3, 3e38, math.inf, math.nan]), max_size=60)


@given(settings_of_a_run, norms, st.integers(0, 60))
def test_every_scale_is_that_of_the_plain_rule(
    settings: LossScale, norms: list[float], saved_after: int
) -> None:
    plain, scaler = PlainScaler(settings), LossScaler(settings, CPU)
    for step, norm in enumerate(norms):
        if step == saved_after:
            text = scaler.as_saved().model_dump_json()
            scaler = LossScaler(settings, CPU, SavedScale.model_validate_json(text))
        may_help = plain.scale > settings.minimum and not math.isfinite(norm)
        assert scaler.update(torch.tensor(norm)).item() == may_help
        plain.update(norm)
        assert scaler.scale.item() == plain.scale
        assert settings.minimum <= plain.scale <= LARGEST


def test_the_example_of_the_module() -> None:
    scaler = LossScaler(LossScale(initial=2.0**16, window=4, hysteresis=2), CPU)
    powers, patience = [], []
    for norm in (GOOD, BAD, BAD, BAD, GOOD, GOOD, GOOD, GOOD, BAD):
        powers.append(math.log2(scaler.scale.item()))
        patience.append(scaler.as_saved().patience)
        scaler.update(norm)
    assert powers == [16, 16, 16, 15, 14, 14, 14, 14, 15]
    assert patience == [2, 2, 1, 0, 0, 0, 0, 0, 2]


def test_the_scale_starts_between_its_bounds() -> None:
    assert LossScaler(LossScale(initial=2.0, minimum=8.0), CPU).scale.item() == 8
    assert LossScaler(LossScale(initial=1e300), CPU).scale.item() == LARGEST
    # One that was handed out stays.
    scaler = LossScaler(LossScale(initial=4.0, hysteresis=1), CPU)
    before = scaler.scale
    scaler.update(BAD)
    assert (before.item(), scaler.scale.item()) == (4, 2)


def test_a_damaged_scale_is_refused() -> None:
    right = {"scale": 4.0, "good_steps": 1, "patience": 0}
    SavedScale.model_validate(right)
    for damage in ({"scale": 0.0}, {"scale": math.inf}, {"scale": 2.0**65}, {"good_steps": -1}):
        with pytest.raises(ValidationError):
            SavedScale.model_validate(right | damage)


def test_nothing_waits_for_the_device() -> None:
    """A tensor on "meta" has no value that could be read."""
    meta = torch.device("meta")
    scaler = LossScaler(LossScale(), meta)
    hidden = torch.empty(2, 3, 4, dtype=torch.float16, device=meta, requires_grad=True)
    weight = torch.empty(8, 4, device=meta, requires_grad=True)
    labels = torch.empty(2, 3, dtype=torch.int64, device=meta)
    loss = summed_cross_entropy(hidden, weight, labels, LossOptions(7), scaler.scale / 6)
    loss.backward()
    scaler.update(torch.linalg.vector_norm(weight.grad))
    with pytest.raises(RuntimeError, match="meta"):
        scaler.as_saved()
