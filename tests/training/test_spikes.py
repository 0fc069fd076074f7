"""Spikes: planted ones are found, real histories have none, and a resumed run judges alike."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from trainyard.config.run import Guard
from trainyard.optim.clip import StepStats
from trainyard.training.state import SavedWindow, SpikeWindow

CPU = torch.device("cpu")


def totals(loss: float, norm: float = 1.0) -> StepStats:
    return StepStats(torch.tensor(loss), torch.tensor(norm), torch.tensor(1.0))


def judge(window: SpikeWindow, loss: float, norm: float = 1.0) -> bool:
    return bool(window.judge(totals(loss, norm)).item())


def window_of(losses: list[float], **guard: float) -> SpikeWindow:
    window = SpikeWindow(Guard.model_validate(guard), CPU)
    for loss in losses:
        assert not judge(window, loss)
    return window


def noise(n: int, seed: int = 0) -> list[float]:
    return (3 + 0.05 * np.random.default_rng(seed).standard_normal(n)).tolist()


EXAMPLE = [3.10, 3.14, 3.08, 3.12, 3.09, 3.11, 3.13, 3.07]
"""That of the docstring."""
WIDE = [3 + 2 * (each - 3) for each in noise(128, seed=3)]
MEAN, DEVIATION = float(np.mean(WIDE)), float(np.std(WIDE))


@pytest.mark.parametrize(
    ("losses", "loss", "norm", "is_spike"),
    [
        *((EXAMPLE, loss, 1.0, loss > 3.47) for loss in (3.48, 3.47, 3.30, 3.90)),
        # A loss or a norm is enough, and only a rise counts.
        *((noise(200), 3.0, 10.0, True), (noise(200), 6.0, 1.0, True)),
        (noise(200), 0.1, 0.1, False),
        # Deviations are those of the window.
        *((WIDE, MEAN + times * DEVIATION, 1.0, times > 6) for times in (5.9, 6.1)),
        # Nothing is a spike until the window is half full.
        *(([3.0] * 62, 4.0, 1.0, False), ([3.0] * 62 + [4.0, 3.0], 4.5, 1.0, True)),
        # A constant loss is no spike, and norms have a long tail.
        *(
            ([level] * 300, loss, 1.0, is_spike)
            for level in (3.0, 0.0, 1e-30, 1e30)
            for loss, is_spike in (
                *((level * (1 + 1e-7), False), (level * 1.11, False)),
                (level * 1.14 + 1e-31, True),
            )
        ),
        *(([3.0] * 128, 3.0, norm, norm > 4) for norm in (3.9, 4.2)),
    ],
)
def test_what_is_a_spike(losses: list[float], loss: float, norm: float, is_spike: bool) -> None:
    window = window_of(losses, spike_window=len(EXAMPLE) if losses is EXAMPLE else 128)
    assert judge(window, loss, norm) == is_spike
    newest = window.as_saved().losses[-1]
    assert newest == pytest.approx(losses[-1] if is_spike else loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_spike_and_stays_out(bad: float) -> None:
    window = window_of(noise(128))
    before = window.as_saved()
    assert not judge(window, bad)
    assert not judge(window, 3.0, bad)
    assert not judge(window, 9.0, bad)
    assert window.as_saved() == before


@pytest.fixture(scope="module")
def healthy_run() -> list[tuple[float, float]]:
    """Every step of the preset tiny on the bytes of novels: 512 tokens a step, nothing went wrong.

    At step 767 an odd document makes the norm 2.3 times, 8.5 deviations above, those before.
    """
    text = (Path(__file__).parent / "healthy_run.json").read_text(encoding="utf-8")
    found = json.loads(text)
    return list(zip(found["losses"], found["gradient_norms"], strict=True))


def test_a_healthy_run_has_no_spikes(healthy_run: list[tuple[float, float]]) -> None:
    window = SpikeWindow(Guard(), CPU)
    assert len(healthy_run) == 800
    assert not any(judge(window, loss, norm) for loss, norm in healthy_run)


@pytest.mark.parametrize(("loss_times", "norm_times"), [(2.0, 1.0), (1.0, 10.0)])
def test_planted_in_a_healthy_run_it_is_found_wherever_it_is(
    healthy_run: list[tuple[float, float]], loss_times: float, norm_times: float
) -> None:
    window = SpikeWindow(Guard(), CPU)
    for step, (loss, norm) in enumerate(healthy_run):
        # Before, the loss falls so fast that its own deviation hides a loss of twice as much.
        if step >= 200:
            assert judge(window, loss * loss_times, norm * norm_times), step
        assert not judge(window, loss, norm)


def test_a_spike_stays_out_so_that_the_next_one_is_found_too() -> None:
    window = window_of(noise(128))
    before = window.as_saved().losses
    assert [judge(window, 6.0) for _ in range(10)] == [True] * 10
    assert window.as_saved().losses == before
    assert not judge(window, 3.0)


def test_a_rise_that_lasts_is_the_new_level() -> None:
    window = window_of([3.0] * 8, spike_window=8)
    assert [judge(window, 6.0) for _ in range(8)] == [True] * 8
    assert window.as_saved() == SavedWindow()
    assert [judge(window, 6.0) for _ in range(8)] == [False] * 8
    assert judge(window, 12.0)


@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 10.0)])
def test_resumed_from_json_it_decides_the_same_to_the_last_bit(
    factors: tuple[float, float],
) -> None:
    random = np.random.default_rng(11)
    whole = SpikeWindow(Guard(), CPU)
    resumed = whole
    for step in range(400):
        if step % 37 == 5:
            saved = json.dumps(resumed.as_saved().model_dump(mode="json"))
            resumed = SpikeWindow(Guard(), CPU, SavedWindow.model_validate_json(saved))
        loss, norm = 3 + 0.1 * random.standard_normal(), random.gamma(2.0)
        is_planted = step % 50 == 49
        if is_planted:
            loss, norm = 3 * factors[0], 2 * factors[1]
        found = judge(whole, loss, norm)
        assert judge(resumed, loss, norm) == found
        assert resumed.as_saved() == whole.as_saved()
        assert found == (is_planted and step >= 64)


def test_a_window_of_another_length_takes_the_newest() -> None:
    saved = window_of(noise(128)).as_saved()
    shorter = SpikeWindow(Guard(spike_window=16), CPU, saved)
    assert shorter.as_saved().losses == saved.losses[-16:]
    longer = SpikeWindow(Guard(spike_window=300), CPU, saved)
    assert longer.as_saved() == saved
