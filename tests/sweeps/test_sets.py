"""Which runs a set has, and what its folder keeps of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainyard.config.load import load_run
from trainyard.errors import ConfigError
from trainyard.sweeps.sets import (
    SEED,
    RunSet,
    as_number,
    build_set,
    expand,
    is_set,
    read_set,
    split_axes,
    split_values,
    write_set,
)

RATE, DROPOUT = "optimizer.learning_rate", "model.dropout"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file of the name web."""
    monkeypatch.chdir(tmp_path)
    write_run_file()
    return tmp_path


def write_run_file(**fields: object) -> None:
    lines = "".join(f"{name.replace('__', '.')} = {value}\n" for name, value in fields.items())
    Path("web.toml").write_text(f'name = "web"\nextends = "tiny"\ntrain.seed = 5\n{lines}')


def written(*overrides: str, name: str = "", n_seeds: int = 1, n_drawn: int = 0) -> RunSet:
    """Builds and writes a set of the run file."""
    run_set, runs = build_set("web.toml", overrides, name, n_seeds, n_drawn)
    write_set(run_set, runs)
    assert read_set(run_set.folder) == run_set
    return run_set


def members(run_set: RunSet) -> dict[str, list[str]]:
    return {one.name: [*one.values.values()] for one in run_set.members}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,2e-3", ["1e-3", "2e-3"]),
        (" a , b", ["a", "b"]),
        ("'a,b',c", ["'a,b'", "c"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ("['x','y'],['z']", ["['x','y']", "['z']"]),
        ("{a=1,b=[2,3]},1", ["{a=1,b=[2,3]}", "1"]),
        ("'[',2", ["'['", "2"]),
        ("it's,1", ["it's", "1"]),
        ("", [""]),
    ],
)
def test_commas_in_quotes_and_brackets_separate_nothing(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_a_grid_has_every_combination_with_every_seed() -> None:
    shared, axes = split_axes([f"{RATE}=1e-3,2e-3", "train.length='9 steps'", f"{DROPOUT}=0,0.1"])
    assert shared == ["train.length='9 steps'"]
    found = expand(axes, n_seeds=2, first_seed=7)
    assert found == [
        {RATE: rate, DROPOUT: dropout, SEED: seed}
        for rate in ("1e-3", "2e-3")
        for dropout in ("0", "0.1")
        for seed in ("7", "8")
    ]
    assert expand({}, n_seeds=3) == [{SEED: "0"}, {SEED: "1"}, {SEED: "2"}]
    assert expand({SEED: ["4", "9"]}) == [{SEED: "4"}, {SEED: "9"}]


def test_more_draws_begin_with_the_same_ones() -> None:
    _, axes = split_axes([f"{RATE}=1e-4..1e-2,0.5", "model.n_layers=2..64"])
    few, many = (expand(axes, n_drawn=n, first_seed=3) for n in (8, 400))
    assert many[:8] == few
    assert expand(axes, n_drawn=8, first_seed=4) != few
    rates = [float(one[RATE]) for one in many if one[RATE] != "0.5"]
    assert 300 < len(rates) < 400  # those of 0.5 repeat each other
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.4 < sum(rate < 1e-3 for rate in rates) / len(rates) < 0.6  # evenly by the logarithm
    assert {2, 3, 60} <= {int(one["model.n_layers"]) for one in many}


@pytest.mark.parametrize(
    ("overrides", "n_seeds", "n_drawn", "message"),
    [
        (["dropout"], 1, 0, "'dropout' is not of the form section.field=value,value"),
        ([f"{RATE}=1e-3"], 1, 0, "a set needs a field with several values, or several seeds"),
        ([f"{RATE}=1e-4..1e-2"], 1, 0, f"{RATE}=1e-4..1e-2 has a range, which a grid cannot have"),
        ([f"{RATE}=1e-2..1e-4"], 1, 4, "1e-2..1e-4 is not a range of positive numbers"),
        ([f"{RATE}=0..1"], 1, 4, "0..1 is not a range of positive numbers"),
        ([f"{RATE}=1,2"], 1, 3, "--draw 3, but these values have only 2 combinations"),
        ([f"{RATE}=1,2", f"{RATE}=3"], 1, 0, f"{RATE} is given twice"),
        (["name=a,b"], 1, 0, "name names one run"),
        ([f"{SEED}=1,2"], 3, 0, f"--seeds 3 and {SEED} both set the seeds"),
        ([f"{RATE}=1,2"], 501, 0, "1,002 runs in a set"),
        ([f"{RATE}=1e-3,0.001"], 1, 0, f"the same values twice: {RATE}=0.001"),
        (["optimizer.lr=1e-3,2e-3"], 1, 0, "optimizer.lr"),
        ([f"{DROPOUT}=0,7"], 1, 0, "model.dropout: must be less than 1 (got 7)"),
        ([f"{RATE}=1,2", "evaluate.batches=0"], 1, 0, "a set compares held-out losses"),
        (["model.vocabulary_size=300,400"], 1, 0, "losses of different tokenizers"),
    ],
)
def test_a_set_that_makes_no_sense_is_one_message(
    overrides: Sequence[str], n_seeds: int, n_drawn: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_set("web.toml", overrides, "", n_seeds, n_drawn)
    assert message in str(error.value)
    assert not Path("runs").exists()


def test_members_are_runs_with_a_name_and_a_run_file_each() -> None:
    run_set = written(f"{RATE}=1e-3,2e-3", f"{DROPOUT}=0.1", n_seeds=2)
    assert members(run_set) == {
        "web-sweep-01": ["1e-3", "5"],
        "web-sweep-02": ["1e-3", "6"],
        "web-sweep-03": ["2e-3", "5"],
        "web-sweep-04": ["2e-3", "6"],
    }
    assert run_set.fields == [RATE]
    run = load_run("runs/web-sweep/members/web-sweep-04.toml").run
    assert (run.name, run.train.seed, run.model.dropout) == ("web-sweep-04", 6, 0.1)
    assert run.optimizer.learning_rate == 2e-3
    assert is_set("web-sweep") and is_set("runs/web-sweep") and not is_set("web.toml")
    assert written(f"{RATE}=1,2", name="other").name == "other"
    with pytest.raises(ConfigError, match="name"):
        build_set("web.toml", [f"{RATE}=1,2"], "a/b")


def test_more_values_and_seeds_keep_the_numbers() -> None:
    first = members(written(f"{RATE}=1e-3,2e-3"))
    second = members(written(f"{RATE}=8e-3,0.002,1e-3"))
    assert second == first | {"web-sweep-03": ["8e-3", "5"]}
    more = members(written(f"{RATE}=1e-3,2e-3", n_seeds=2))
    assert more == second | {"web-sweep-04": ["1e-3", "6"], "web-sweep-05": ["2e-3", "6"]}
    # Only new ones were asked for: the others stay.
    assert members(written(f"{RATE}=3,4")).keys() > more.keys()


def test_other_settings_are_refused_once_a_run_has_begun() -> None:
    run_set = written(f"{RATE}=1e-3,2e-3")
    write_run_file(train__micro_batch_size=1)
    run_set = written(f"{RATE}=1e-3,2e-3")  # nothing has trained yet
    assert load_run(str(run_set.run_file(run_set.members[0]))).run.train.micro_batch_size == 1
    run_set.members[1].folder.mkdir()
    written(f"{RATE}=1e-3,2e-3")
    write_run_file(train__micro_batch_size=1, guard__spike_window=9)
    with pytest.raises(ConfigError) as error:
        written(f"{RATE}=1e-3,2e-3,4e-3")
    assert error.value.problem == "runs/web-sweep was begun with another guard.spike_window"
    assert members(read_set("web-sweep")) == members(run_set)
    with pytest.raises(ConfigError, match=re.escape(f"runs/web-sweep varies {RATE} alone")):
        written(f"{RATE}=1e-3,2e-3", f"{DROPOUT}=0,0.1")


@pytest.mark.parametrize("name", ["web-sweep", "web-sweep-02"])
def test_a_run_of_this_name_is_not_taken_for_a_member(name: str) -> None:
    (Path("runs") / name).mkdir(parents=True)
    (Path("runs") / name / "run.toml").touch()
    with pytest.raises(ConfigError, match=f"runs/{name} is a run that is not in the set"):
        written(f"{RATE}=1e-3,2e-3")
    assert not is_set("web-sweep")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "member = 3",
        "[[member]]\nname = 'a'",
        "[[member]]\nname = 'a'\nvalues = {x = 1}",
        "[[member]]\nname = '../a'\nvalues = {x = '1'}",
        "[[member]]\nname='a'\nvalues={x='1'}\n[[member]]\nname='b'\nvalues={y='1'}",
    ],
)
def test_a_damaged_record_is_named(text: str) -> None:
    written(f"{RATE}=1e-3,2e-3")
    Path("runs/web-sweep/set.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"runs/web-sweep/set.toml does not describe a set"):
        read_set("web-sweep")


def test_numbers_are_compared_as_numbers() -> None:
    assert as_number("1e-3") == as_number("0.001") == 0.001
    assert as_number("'adamw'") == "'adamw'"
