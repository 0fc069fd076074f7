"""Values that cannot be, and what is said about each."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainyard.config import rules
from trainyard.config.load import load_run
from trainyard.config.run import Model, Run
from trainyard.errors import ConfigError

LENGTH = "is not a length; write an amount and a unit"

ROTARY, SCALING = "model.positions=rotary", "model.rotary_scaling"
RAMP = "train.batch_ramp={{start={},increment={},length='99 tokens'}}"
POINTS = "schedule.kind=points; schedule.points="
COOLDOWN = "schedule.kind=warmup_stable_decay; schedule.cooldown"
IMPOSSIBLE = [
    # wrong types
    ("model.n_layers='4'", "model.n_layers: must be a valid integer (got '4')"),
    ("model.n_layers.x=4", "must be a valid integer (got {'x': 4})"),
    ("model.end_of_document_id=-1", "must be greater than or equal to 0 (got -1)"),
    ("model.end_of_document_id=600", "end_of_document_id=600 is not below vocabulary_size=512"),
    ("data.blend.prefixes=a", "data.blend.prefixes: must be a list, such as"),
    ("data.blend.prefixes=[1]", "data.blend.prefixes.0: must be a valid string (got 1)"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1: required field is missing"),
    ("model=gpt3-13b", "model: this is a section, not a value (got 'gpt3-13b')"),
    ("train.batch_ramp.start=16", "train.batch_ramp.increment: required field is missing"),
    # wrong units
    ("train.length=300", f"train.length: 300 {LENGTH}"),
    ("train.length=300B", f"train.length: '300B' {LENGTH}"),
    ("train.length=3e8 tokens", "'3e8' is not a count such as 1500, 2.5M or 300B"),
    ("train.length=1.5 steps", "'1.5' is not a whole number"),
    ("train.length=steps", "is not a"),
    ("schedule.warmup=.01", f"'.01' {LENGTH}"),
    ("model.query_key_norm=heads", "must be 'none', 'head' or 'all' (got 'heads')"),
    ("model.query_key_norm=1", "must be 'none', 'head' or 'all' (got 1)"),
    # out of range
    ("model.n_layers=0", "must be greater than or equal to 1 (got 0)"),
    ("model.init_std=inf", "model.init_std: must be a finite number (got inf)"),
    ("optimizer.clip_norm=nan", "greater than 0 (got nan)"),
    ("parallel.pipeline=x", "1 problem in the run tiny:\n  parallel.pipeline: must be"),
    ("schedule.kind=cosin", "must be 'cosine', 'linear', 'constant', "),
    # points of a schedule
    (f"{POINTS}0: 0", "'0: 0' needs two points at least, and a rate that is positive"),
    (f"{POINTS}0: 0, 9 steps: 0", "needs two points at least, and a rate that is positive"),
    (f"{POINTS}0: 0, 9 steps", "'9 steps' is not a position and a learning rate; write points"),
    (f"{POINTS}0: 0, 9 steps: -1", "'9 steps: -1' is not a position and a learning rate"),
    (f"{POINTS}0: 0, 9: 1", f"'9' {LENGTH}"),
    (f"{POINTS}0: 0, 9 steps: 1, 5 steps: 0", "is not in order: 9 steps is before 5 steps"),
    ("schedule.kind=points", "schedule.points='' is empty, which schedule.kind='points' needs"),
    ("schedule.points=0: 0, 9 steps: 1", 'nearest that works: schedule.kind="points"'),
    ("name=a/b", "name: use letters, digits and . _ -, and start with a letter or digit"),
    ("name=..", "start with a letter or digit (got '..')"),
    # impossible sizes
    ("model.n_heads=5", "must be divisible by n_heads=5; nearest n_heads that divides: 4"),
    ("model.n_key_value_heads=3", "nearest n_key_value_heads that divides: 2"),
    (f"{ROTARY}; model.d_head=7", "d_head=7 must be even when positions='rotary'; nearest d_head"),
    ("model.rotary_scaling.factor=8.0", "rotary_scaling needs positions='rotary' (got 'learned')"),
    (
        f"{ROTARY}; {SCALING}.low_frequency_factor=4.0",
        "=4.0 is not below high_frequency_factor=4.0",
    ),
    (RAMP.format(2, 6), "train.batch_ramp.start=2 must be divisible by train.micro_batch_size=4"),
    (RAMP.format(4, 3), "is not a whole number of train.batch_ramp.increment=3"),
    (RAMP.format(16, 4), "from train.batch_ramp.start=16 to train.global_batch_size=8 is not"),
    ("train.length='0 steps'", "train.length='0 steps' must be positive"),
    ("schedule.minimum_learning_rate=1.0", "=1.0 is above optimizer.learning_rate=0.001"),
    ("schedule.warmup=50 steps", "='50 steps' must be shorter than schedule.decay='50 steps'"),
    (f"{COOLDOWN}='51 steps'", "='51 steps' must not be longer than schedule.decay='50 steps'"),
    ("data.blend={prefixes=['a','b'],weights=[1]}", "data.blend: 2 prefixes but 1 weights"),
    ("data.blend.prefixes=['a']; data.blend.weights=[0]", "weights must be positive (got [0"),
    ("data.blend.prefixes=['d/a','./d//a']", "'d/a' is listed more than once in prefixes"),
    (f"data.blend.prefixes={list(map(str, range(40_000)))}", "40000 prefixes; a blend takes 32766"),
    ("data.blend.prefixes=['a']; data.train.prefixes=['b']", "data: give either blend with split"),
    ("data.valid.prefixes=['b']", "data: valid is given without train"),
    *(
        (f"data.split='{text}'", f"data.split: split {text!r} is not one to three comma-separated")
        for text in ("", "9,a", "1,2,3,4", "9,-1,2", "1e3,1", "9,,1", "nan", "1.2.3", "9;1")
    ),
    ("data.split='0,0'", "data.split: split '0,0' leaves every split empty"),
]


ABBREVIATIONS = {
    "FP8": "model.n_layers=4; precision.kind=fp8",
    "LOW_BIT": "model.n_layers=4; precision.kind=fp8_lowbit",
}
# Overrides; below them the beginning of the problem -> the suggested change.
REFUSED_LAYOUTS = """\
model.n_heads=6; model.d_head=16; model.n_key_value_heads=3; parallel.tensor=4
    model.n_key_value_heads=3 must be divisible by parallel.tensor=4: a rank -> parallel.tensor=1
model.n_key_value_heads=2; model.query_key_norm=all; parallel.tensor=4
    model.n_key_value_heads=2 must be divisible by parallel.tensor=4: a rank -> parallel.tensor=2
model.n_key_value_heads=2; parallel.tensor=4; parallel.context=2; model.dropout=0.0
    model.n_key_value_heads=2 must be divisible by parallel.tensor=4 x -> parallel.tensor=1
FP8; model.d_head=12; parallel.tensor=4
    model.d_head=12 x model.n_heads=4, and x 2 model.n_key_value_heads=4, must -> parallel.tensor=1
parallel.tensor=4; parallel.context=2; model.dropout=0.0
    model.n_heads=4 must be divisible by parallel.tensor=4 x parallel.context=2 -> parallel.tensor=2
parallel.tensor=8; parallel.context=2; parallel.context_method=ring; model.dropout=0.0
    model.n_heads=4 must be divisible by parallel.tensor=8 -> parallel.tensor=4
model.sequence_length=62; parallel.tensor=4; parallel.sequence=true
    model.sequence_length=62 must be divisible by parallel.tensor=4 x -> parallel.tensor=2
model.sequence_length=62; parallel.context=2; parallel.context_method=ring; model.dropout=0.0
    model.sequence_length=62 must be divisible by 2 x parallel.context=2 -> parallel.context=1
parallel.context=2; parallel.context_method=ring; model.dropout=0.1
    model.dropout=0.1 is incompatible with -> parallel.context_method="ulysses"
kernels.attention=cudnn; model.dropout=0.1; model.sequence_length=192
    kernels.attention='cudnn' is incompatible with model.dropout=0.1 -> kernels.attention="auto"
model.n_layers=3; parallel.pipeline=2; parallel.chunks=2; parallel.schedule=interleaved
    model.n_layers=3 is fewer than parallel.pipeline=2 -> parallel.pipeline=1 with parallel.chunks=1
parallel.chunks=2
    parallel.chunks=2 is incompatible with parallel.pipeline=1 -> parallel.chunks=1
model.n_layers=4; parallel.pipeline=2; parallel.chunks=2
    parallel.chunks=2 is incompatible with parallel.schedule='1f1b' -> parallel.chunks=1
model.n_layers=4; parallel.pipeline=2; parallel.schedule=interleaved
    parallel.chunks=1 is incompatible with parallel.schedule='interleaved' -> parallel.chunks=2
parallel.recompute_share=0.5
    parallel.recompute_share=0.5 is incompatible with parallel.recompute='none' -> \
parallel.recompute="block"
parallel.pipeline=2; parallel.schedule=zero_bubble; parallel.zero_stage=2
    parallel.zero_stage=2 is incompatible with -> parallel.zero_stage=1
parallel.reduce_format=bf16; precision.kind=fp32
    parallel.reduce_format='bf16' is incompatible with precision.kind='fp32' -> \
parallel.reduce_format="fp32"
parallel.reduce_format=bf16; precision.kind=bf16; parallel.zero_stage=0
    parallel.reduce_format='bf16' is incompatible with parallel.zero_stage=0 -> \
parallel.zero_stage=1
LOW_BIT; parallel.reduce_format=bf16
    parallel.reduce_format='bf16' is incompatible with precision.kind='fp8_lowbit' -> \
parallel.reduce_format="fp32"
parallel.pipeline=2; parallel.schedule=zero_bubble; train.compile=never; parallel.zero_stage=3
    parallel.zero_stage=3 is incompatible with -> parallel.zero_stage=1
parallel.zero_stage=0; parallel.data_replicate=2
    parallel.data_replicate=2 is incompatible with parallel.zero_stage=0 -> parallel.zero_stage=1
precision.kind=fp8
    precision.fp8.precise_blocks=1 at each end covers all -> precision.fp8.precise_blocks=0
FP8; model.d_ff=264
    model.d_ff=264 must be divisible by 16 x parallel.tensor=1 -> model.d_ff=256
FP8; model.d_model=96; parallel.tensor=4
    model.d_model=96 must be divisible by 16 x parallel.tensor=4 -> parallel.tensor=2
FP8; train.micro_batch_size=1; model.sequence_length=56; parallel.context=2
    train.micro_batch_size=1 x model.sequence_length=56 must be -> model.sequence_length=64
FP8; precision.fp8.scaling=rowwise; precision.fp8.all_gather=true
    precision.fp8.all_gather=true is incompatible with -> precision.fp8.scaling="tensorwise"
FP8; parallel.pipeline=2; parallel.schedule=zero_bubble; train.compile=never
    precision.kind='fp8' is incompatible with -> parallel.schedule="1f1b"
LOW_BIT; parallel.zero_stage=0
    parallel.zero_stage=0 is incompatible with precision.kind='fp8_lowbit' -> parallel.zero_stage=1
LOW_BIT; optimizer.kind=muon
    optimizer.kind='muon' is incompatible with precision.kind='fp8_lowbit' -> optimizer.kind="adamw"
LOW_BIT; model.d_model=64; parallel.tensor=4
    model.d_model=64 must be divisible by 32 x parallel.tensor=4 -> parallel.tensor=2
LOW_BIT; model.d_ff=272
    model.d_ff=272 must be divisible by 32 x parallel.tensor=1 -> model.d_ff=256
train.micro_batch_size=4; train.global_batch_size=6
    train.global_batch_size=6 must be divisible by -> train.micro_batch_size=3
"""


@pytest.mark.parametrize("case", re.split(r"\n(?=\S)", REFUSED_LAYOUTS.strip()))
def test_a_layout_is_refused_with_its_reason_and_the_nearest_change(case: str) -> None:
    first, second = case.splitlines()
    overrides = "; ".join(ABBREVIATIONS.get(each, each) for each in first.split("; ")).split("; ")
    problem, change = second.strip().split(" -> ")
    with pytest.raises(ConfigError) as caught:
        load_run("tiny", overrides)
    heading, line = caught.value.problem.splitlines()
    assert heading == "1 problem in the run tiny:"
    assert line.startswith(f"  {problem}") and ": " in line
    assert line.partition("  [")[0].endswith(f"; nearest that works: {change}")
    load_run("tiny", [*overrides, *change.split(" with ")])


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("tiny", ["parallel.tensor=3", "parallel.chunks=3", "parallel.zero_stage=0"])
    lines = caught.value.problem.splitlines()
    assert lines[0] == "4 problems in the run tiny:"
    assert [line.count("nearest that works") for line in lines[1:]] == [1, 1, 1, 1]


@pytest.mark.parametrize(("overrides", "message"), IMPOSSIBLE)
def test_what_cannot_be_is_said(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("tiny", overrides.split("; "))
    assert message in caught.value.problem
    assert "command line" in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize(
    "overrides",
    [
        "schedule.kind=constant; schedule.warmup=99 steps",  # needs no decay
        "schedule.warmup=0 steps",
        "checkpoint.interval=0",
        "evaluate.batches=0",
        "optimizer.clip_norm=inf",
        "train.batch_ramp=none",
        "model.tied_embeddings=false",
        "schedule.decay=1M tokens",  # units that differ are compared by the plan
        "parallel.sequence=true",  # without effect when parallel.tensor=1
        "parallel.schedule=interleaved",  # without effect when parallel.pipeline=1
        "parallel.schedule=zero_bubble",
        "parallel.pipeline=2; parallel.schedule=zero_bubble; parallel.recompute=block",
        "parallel.context_method=ring",  # without effect when parallel.context=1
        "parallel.zero_stage=2",
        "precision.fp8.precise_blocks=9",  # without effect where precision.kind=bf16
        "train.batch_ramp={start=8,increment=3,length='99 tokens'}",  # no increments
    ],
)
def test_edges_that_are_allowed(overrides: str) -> None:
    load_run("tiny", overrides.split("; "))


@pytest.mark.parametrize(
    ("overrides", "stage"),
    [
        ([], 1),
        (["parallel.pipeline=2"], 1),
        (["parallel.pipeline=2", "parallel.zero_stage=2"], 2),
        (["parallel.pipeline=2", "parallel.zero_stage=3"], 3),
    ],
)
def test_the_stage_of_zero_does_not_depend_on_the_pipeline(
    overrides: list[str], stage: int
) -> None:
    run = load_run("tiny", overrides).run
    assert run.parallel.zero_stage == stage
    assert Run.model_validate(run.model_dump()) == run
    # What is written down gives the same run, whatever the default would be.
    back = rules.change(run, {"parallel.pipeline": 1, "parallel.zero_stage": 1})
    texts = rules.describe(run, {"parallel.pipeline": 1, "parallel.zero_stage": 1}).split(" with ")
    assert load_run("tiny", [*overrides, *filter(None, texts)]).run == back


def test_runs_cannot_be_changed() -> None:
    run = Run()
    with pytest.raises(ValidationError, match="frozen"):
        run.model.n_layers = 3  # type: ignore[misc]


def test_defaults_are_the_125m_of_the_paper() -> None:
    run, paper = Run(), load_run("gpt3-125m").run
    assert run.model == paper.model == Model()
    assert run.optimizer == paper.optimizer
    assert run.schedule == paper.schedule


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert rules.divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(("written", "read"), [("true", "head"), ("false", "none"), ("all", "all")])
def test_query_key_norm_was_true_or_false(written: str, read: str) -> None:
    assert load_run("tiny", [f"model.query_key_norm={written}"]).run.model.query_key_norm == read
