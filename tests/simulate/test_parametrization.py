"""The check of a parametrization: what it computes of small models, and what it finds wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.command import trainyard

from trainyard import architecture
from trainyard.config.load import load_run
from trainyard.simulate import parametrization as subject
from trainyard.simulate.parametrization import ScalingTable, compare_shapes, reshape


def test_exponents_are_slopes_of_logarithms() -> None:
    rows = [[3 * n**0.5, 7.0, 2 / n, 0.0] for n in (64, 128, 256)]
    table = ScalingTable("x", [64, 128, 256], ["a", "b", "c", "d"], rows)
    assert table.exponents == pytest.approx([0.5, 0, -1, 0], abs=1e-12)
    sizes = ScalingTable("x", [64, 128, 256], subject.SIZES, rows)
    last = str(sizes).splitlines()[-1].split()
    assert (last[0], last[1], last[3]) == ("exponent", "+0.50", "-1.00")
    assert sizes.is_beyond and not table.is_beyond


def test_the_best_rate_is_that_of_a_parabola_in_the_logarithm() -> None:
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    rows = [
        [2 + (math.log(rate) - math.log(3e-3)) ** 2 for rate in rates],
        [5, 4, 3, 2, 1],
        [3, math.inf, 4, 5, 6],
        [3, 3, 3, 3, 3],
    ]
    table = ScalingTable("x", [1, 2, 3, 4], [f"{rate:g}" for rate in rates], rows)
    assert table.best == pytest.approx([3e-3, 16e-3, 1e-3, 1e-3])
    assert ScalingTable("x", [1], ["0.001", "0.002"], [[1, 2]]).best == [1e-3]


def test_models_are_the_familys_with_the_smallest_as_the_base() -> None:
    run = load_run("modern-350m").run
    small = reshape(run, (4, 128), (2, 64), "complete_p", 20)
    assert (small.model.norm, small.model.mlp) == (run.model.norm, run.model.mlp)
    assert (small.model.n_layers, small.model.d_model) == (4, 128)
    assert (small.model.base_n_layers, small.model.base_d_model) == (2, 64)
    assert small.model.vocabulary_size == run.model.vocabulary_size
    assert (str(small.schedule.warmup), str(small.train.length)) == ("2 steps", "20 steps")


TINY = ["model.vocabulary_size=64", "model.vocabulary_multiple=8", "model.dropout=0.0"]


def sizes_of(kind: str, *more: str) -> dict[str, ScalingTable]:
    run = load_run("tiny", [*TINY, *more, "optimizer.learning_rate=2e-3"]).run
    told: list[str] = []
    tables = compare_shapes(
        run, ([32, 128], [1, 4]), [kind], [], 8, lambda *facts: told.append(str(facts[2]))
    )
    assert told == [f"{kind}, {n} blocks of width {d}" for n, d in ((1, 32), (1, 128), (4, 32))]
    return {table.name: table for table in tables}


@pytest.mark.parametrize("more", [[], ["optimizer.kind=muon"]])
def test_activations_keep_their_size_with_complete_p(more: list[str]) -> None:
    tables = sizes_of("complete_p", *more)
    assert [*tables] == ["complete_p, width", "complete_p, depth"]
    for table in tables.values():
        assert max(map(abs, table.exponents)) <= subject.BOUND, str(table)


def test_activations_grow_otherwise() -> None:
    tables = sizes_of("standard")
    found = [dict(zip(t.columns, t.exponents, strict=True)) for t in tables.values()]
    assert found[0]["change of logits"] > 0.5 and found[0]["change of blocks"] > 1
    assert found[1]["change of blocks"] > 0.5


@pytest.mark.parametrize("missing", ["rate", "output"])
def test_a_missing_multiplier_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = architecture.Multipliers

    def without(**fields: Any) -> architecture.Multipliers:
        return right(**fields | {missing: 1.0})

    monkeypatch.setattr(architecture, "Multipliers", without)
    monkeypatch.setattr(architecture, "replace", replace_without(missing, architecture.replace))
    for cached in (architecture.block_layers, architecture._ends, architecture._numbered_blocks):
        cached.cache_clear()
    try:
        tables = sizes_of("complete_p")
    finally:
        for cached in (
            architecture.block_layers,
            architecture._ends,
            architecture._numbered_blocks,
        ):
            cached.cache_clear()
    assert max(abs(n) for table in tables.values() for n in table.exponents) > subject.BOUND


def replace_without(field: str, right: Any) -> Any:
    def wrong(what: Any, **fields: Any) -> Any:
        if isinstance(what, architecture.LayerSpec):
            return right(what, **fields)
        return right(what, **{name: 1.0 if name == field else x for name, x in fields.items()})

    return wrong


def test_the_command_trains_at_each_rate_and_draws(tmp_path: Path) -> None:
    words = ["check", "parametrization", "tiny", *TINY, "--widths", "32,64", "--depths", "1,2"]
    words += ["--rates", "1e-3,4e-3,2e-3", "--steps", "10", "--compare"]
    ended = trainyard(*words, "--picture", "rates.png", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    lines = ended.stdout.splitlines()
    assert next(line for line in lines if "0.001" in line).split()[:5] == [
        *("complete_p,", "width", "0.001", "0.002", "0.004")
    ]
    assert sum("drifts by a factor of" in line for line in lines) == 4
    assert "standard, depth" in ended.stdout and "exponent" in ended.stdout
    assert lines[-1] == "complete_p holds: all exponents are within 0.25"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--widths", "64,x"], "invalid value for '--widths'"),
        (["--rates", "-1"], "optimizer.learning_rate: must be greater than 0"),
        (["--depths", "0"], "must be"),
        (["--picture", "a.pdf"], "--picture a.pdf: pictures are .png or .svg"),
    ],
)
def test_mistakes(option: list[str], said: str, tmp_path: Path) -> None:
    ended = trainyard("check", "parametrization", "tiny", *option, folder=tmp_path)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
