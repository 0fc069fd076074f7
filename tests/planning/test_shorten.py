from __future__ import annotations

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.planning.resolve import resolve
from trainyard.planning.shorten import shorten, with_lengths_of


def load(*overrides: str) -> Run:
    return load_run("tiny", list(overrides)).run


SCHEDULE = ["schedule.warmup='400 steps'", "schedule.decay='20_000 steps'"]


def test_the_schedule_shortens_with_the_run() -> None:
    run = load("train.length='20_000 steps'", "schedule.cooldown='3M tokens'", *SCHEDULE)
    short = shorten(run, 5_000)
    assert resolve(short).n_steps == 5_000
    lengths = (short.train.length, short.schedule.warmup, short.schedule.decay)
    assert [str(each) for each in lengths] == ["5k steps", "100 steps", "5k steps"]
    assert str(short.schedule.cooldown) == "750k tokens"
    assert short.model == run.model
    assert short.optimizer == run.optimizer


def test_a_run_that_fits_stays_as_it_is() -> None:
    run = load("train.length='300 steps'")
    assert shorten(run, 300) == run
    assert shorten(run, 10**9) == run


def test_shortening_again_to_the_same_length_gives_the_same_run() -> None:
    run = load("train.length='33_333 steps'", *SCHEDULE)
    for n_steps in (1, 7, 4_999):
        short = shorten(run, n_steps)
        assert resolve(short).n_steps == n_steps
        assert shorten(run, resolve(short).n_steps) == short


def test_a_short_run_is_still_watched() -> None:
    run = load(
        "train.length='20_000 steps'",
        *("evaluate.interval=1000", "evaluate.sample_interval=0", "log.interval=10"),
    )
    short = shorten(run, 400)
    assert short.evaluate.interval == 50
    assert short.evaluate.sample_interval == 0
    assert short.log.interval == 7
    assert shorten(run, 19_000).evaluate.interval == 1000


def test_a_batch_ramp_shortens_too() -> None:
    ramp = "train.batch_ramp={start=4, increment=4, length='8_000 sequences'}"
    shape = ["train.length='80_000 sequences'", "train.global_batch_size=8", ramp]
    run = load(*shape)
    short = shorten(run, 1_000)
    assert short.train.batch_ramp is not None
    assert str(short.train.batch_ramp.length) == "800 sequences"
    assert resolve(short).n_sequences <= 8_000
    assert with_lengths_of(short, run) == short
    changed = with_lengths_of(short, load(*shape, "optimizer.clip_norm=2.0"))
    assert changed.train == short.train
    assert changed.optimizer.clip_norm == 2.0
