from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.planning.shorten import describe_too_short, follow_length, shorten, with_lengths_of


def load(*overrides: str) -> Run:
    return load_run("tiny", list(overrides)).run


SCHEDULE = ["schedule.warmup='400 steps'", "schedule.decay='20_000 steps'"]


def test_the_schedule_shortens_with_the_run() -> None:
    stable = ("schedule.kind=warmup_stable_decay", "schedule.cooldown='3M tokens'")
    run = load("train.length='20_000 steps'", *SCHEDULE, *stable)
    short = shorten(run, 5_000)
    assert resolve(short).n_steps == 5_000
    lengths = (short.train.length, short.schedule.warmup, short.schedule.decay)
    assert [str(each) for each in lengths] == ["5k steps", "100 steps", "5k steps"]
    assert str(short.schedule.cooldown) == "750k tokens"
    assert (short.model, short.optimizer) == (run.model, run.optimizer)
    assert shorten(run, 20_000) == run
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


OURS = """# Written by trainyard prepare for the data 0; checksum 0
train.length = "3000 steps"
schedule.warmup = "150 steps"
schedule.decay = "3000 steps"
evaluate.interval = 300
log.interval = 60
"""


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (OURS, ["train.length=10 steps"], ("0 steps", "10 steps", 2, 1)),
        (OURS, ["train.length=60 steps", "log.interval=5"], ("3 steps", "60 steps", 8, 5)),
        (OURS, ["train.length=60 steps", "schedule.warmup=9 steps"], ("9 steps", "60 steps", 8, 1)),
        (OURS, ["train.length=6000 steps"], ("150 steps", "3k steps", 300, 60)),
        (OURS, [], ("150 steps", "3k steps", 300, 60)),
        (
            OURS.replace("# Written", "# written"),
            ["train.length=60 steps"],
            ("150 steps", "3k steps", 300, 60),
        ),  # edited
    ],
)
def test_a_file_of_ours_follows_its_length(
    tmp_path: Path, text: str, overrides: list[str], expected: tuple[str, str, int, int]
) -> None:
    path = tmp_path / "web.toml"
    path.write_text(text)
    run = follow_length(load_run(str(path), overrides).run, str(path), overrides, None)
    lengths = (str(run.schedule.warmup), str(run.schedule.decay))
    assert (*lengths, run.evaluate.interval, run.log.interval) == expected


def test_a_file_of_ours_keeps_the_schedule_of_a_run_that_has_begun(tmp_path: Path) -> None:
    path = tmp_path / "web.toml"
    path.write_text(OURS)

    def follow(n_steps: int, begun: Run | None = None) -> Run:
        overrides = [f"train.length={n_steps} steps"]
        return follow_length(load_run(str(path), overrides).run, str(path), overrides, begun)

    begun = follow(60)
    assert follow(60, begun) == begun
    longer = follow(6000, begun)
    assert (longer.schedule, str(longer.train.length)) == (begun.schedule, "6k steps")


def test_points_shrink_with_the_run() -> None:
    points = "schedule.points='0: 0, 100 steps: 1e-3, 300 steps: 1e-4'"
    run = load("train.length=300 steps", "schedule.kind=points", points)
    assert str(shorten(run, 30).schedule.points) == (
        "0 steps: 0.0, 10 steps: 0.001, 30 steps: 0.0001"
    )
    assert shorten(run, 300) == run
    assert not [text for text in describe_too_short(run, resolve(run)) if "warmup" in text]


def test_what_does_not_suit_the_length_is_said() -> None:
    run = load("train.length=10 steps", "schedule.warmup='40 steps'", "log.interval=61")
    said = [*describe_too_short(run, resolve(run))]
    assert said[0].startswith("the run ends in warmup, at a learning rate of 0.00")
    assert "schedule.warmup='40 steps', train.length='10 steps'" in said[0]
    assert said[-1] == "log.interval=61 is longer than the run of 10 steps"
    slow = load("train.length=300 steps", "schedule.decay='9000 steps'")
    said = [*describe_too_short(slow, resolve(slow))]
    assert said[0].startswith("the learning rate falls only")
    assert not [*describe_too_short(long := load("train.length=300 steps"), resolve(long))]
