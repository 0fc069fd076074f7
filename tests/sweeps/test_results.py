"""What a set has found: settings, spread, effects, verdict; as text, as JSON and in `status`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.command import call

from trainyard.cli.names import complete_run_or_set
from trainyard.cli.report import report
from trainyard.cli.status import status
from trainyard.errors import UserError
from trainyard.jobs.status import Submission, write_submission
from trainyard.launch.lock import hold
from trainyard.report.run_view import UNKNOWN
from trainyard.sweeps.picture import draw_effect
from trainyard.sweeps.results import read_results, render_results
from trainyard.sweeps.sets import STOPPED, RunSet

from .conftest import MakeSet

RATE, DROPOUT = "optimizer.learning_rate", "model.dropout"
GRID = [f"{RATE}=1e-3,2e-3", f"{DROPOUT}=0,0.1"]
NAN = math.nan


def stop(run_set: RunSet, name: str, why: str) -> None:
    (run_set.folder / STOPPED).mkdir(exist_ok=True)
    (run_set.folder / STOPPED / name).write_text(f"{why}\n")


def test_the_whole_text(make_set: MakeSet) -> None:
    run_set = make_set(GRID, [3.0, 3.2, 2.8, -5.0])
    stop(run_set, "web-04", "above the median")
    assert render_results(read_results(run_set)).replace(UNKNOWN, "-").splitlines() == [
        "web: 4 runs: 3 done, 1 stopped early",
        "",
        "optimizer.learning_rate  model.dropout  held out  ± seeds    runs",
        "                   2e-3              0    2.8000        -  1 of 1",
        "                   1e-3              0    3.0000        -  1 of 1",
        "                   1e-3            0.1    3.2000        -  1 of 1",
        "                   2e-3            0.1         -        -  0 of 1",
        "",
        "field                    value    mean    best  settings",
        "optimizer.learning_rate   1e-3  3.1000  3.0000         2",
        "optimizer.learning_rate   2e-3  2.8000  2.8000         1",
        "model.dropout                0  2.9000  2.8000         2",
        "model.dropout              0.1  3.2000  3.2000         1",
        "",
        "web-04: stopped early at 50%, held out 5.0000: above the median",
        "",
        "best: optimizer.learning_rate=2e-3 model.dropout=0, 2.8000; the second is 0.2000 higher; "
        "more --seeds show whether that is more than chance",
    ]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        # Standard errors 0.01 each, so 0.0141 of the difference.
        ([3.0, 3.02, 3.1, 3.12], "more than twice its standard error over seeds, 0.0141"),
        ([3.0, 3.02, 3.02, 3.04], "less than twice its standard error over seeds, 0.0141"),
        ([3.0, 3.02, 3.1, None], "more --seeds show whether that is more than chance"),
    ],
)
def test_seeds_tell_chance(make_set: MakeSet, losses: list[float], verdict: str) -> None:
    results = read_results(make_set([f"{RATE}=1e-3,2e-3"], losses, n_seeds=2))
    assert results.verdict.startswith(f"best: {RATE}=1e-3, 3.0100; the second is ")
    assert results.verdict.endswith(verdict)
    assert results.settings[0].spread == pytest.approx(0.02 / math.sqrt(2))
    assert results.settings[0].error == pytest.approx(0.01)


def test_an_unequal_number_of_seeds(make_set: MakeSet) -> None:
    losses = [3.0, 3.02, 3.0, 3.1, 3.14, None]
    results = read_results(make_set([f"{RATE}=1e-3,2e-3"], losses, n_seeds=3))
    first, second = results.settings
    assert (len(first.losses), len(second.losses), second.n_members) == (3, 2, 3)
    assert first.spread is not None and second.spread is not None
    error = math.hypot(first.spread / math.sqrt(3), second.spread / math.sqrt(2))
    assert f"{error:.4f}" in results.verdict


def test_runs_without_a_loss_have_no_rank(make_set: MakeSet) -> None:
    """A loss that is not a number is none, even if an earlier one was."""
    results = read_results(make_set([f"{RATE}=1e-3,2e-3"], [NAN, None]))
    assert (results.verdict, results.ranked) == ("no run is done yet", [])
    assert [one.state for one in results.members] == ["done", "not started"]
    assert [one.loss for one in results.members] == [None, None]


def test_seeds_alone(make_set: MakeSet) -> None:
    results = read_results(make_set([], [3.0, 3.2], n_seeds=2))
    assert results.verdict == "best: the only setting, 3.1000"
    assert results.effects == []


def test_a_damaged_run_does_not_hide_the_others(make_set: MakeSet) -> None:
    run_set = make_set([f"{RATE}=1e-3,2e-3"], [3.0, 2.0])
    (run_set.members[1].folder / "outcome.json").write_text("[")
    results = read_results(run_set)
    assert results.state == "1 done, 1 not readable"
    assert results.verdict == f"best: {RATE}=1e-3, 3.0000"


def test_a_run_that_ended_before_it_was_stopped_is_done(make_set: MakeSet) -> None:
    run_set = make_set([f"{RATE}=1e-3,2e-3"], [3.0, 2.0])
    stop(run_set, "web-02", "too late")
    assert read_results(run_set).state == "2 done"


def test_fields_in_another_order(make_set: MakeSet) -> None:
    run_set = make_set(GRID, [3.0, 3.2, 2.8, 2.9])
    turned = [*run_set.members[:3], run_set.members[3]]
    values = dict(reversed([*turned[3].values.items()]))
    turned[3] = type(turned[3])(turned[3].folder, values)
    results = read_results(RunSet(run_set.folder, turned))
    assert [one.values for one in results.settings][1] == {RATE: "2e-3", DROPOUT: "0.1"}


def test_json(make_set: MakeSet) -> None:
    found = json.loads(json.dumps(read_results(make_set(GRID, [3.0, NAN, 2.8, None])).as_json()))
    assert found["name"] == "web"
    assert found["state"] == "3 done, 1 not started"
    values = {RATE: "2e-3", DROPOUT: "0", "train.seed": "1234"}
    one = {"name": "web-03", "state": "done", "held_out_loss": 2.8, "share": 1.0, "values": values}
    assert found["members"][2] == one
    assert found["settings"][0] == {
        **{"values": {RATE: "2e-3", DROPOUT: "0"}, "losses": [2.8], "n_members": 1},
        **{"mean": 2.8, "spread": None},
    }
    assert found["settings"][3]["mean"] is None
    effect = {"field": DROPOUT, "value": "0", "mean": 2.9, "best": 2.8, "n_settings": 2}
    assert effect in found["effects"]
    assert found["verdict"].startswith("best: ")


def test_status_has_a_row_for_a_set(make_set: MakeSet, tmp_path: Path) -> None:
    run_set = make_set([f"{RATE}=1e-3,2e-3,4e-3"], [3.0, 2.5, None])
    shown = call(status)
    assert "web-01" not in shown
    rows = [line.split("  ") for line in shown.splitlines()]
    assert [text.strip() for text in rows[1] if text] == [
        *("web", "3 runs: 2 done, 1 not started", "2.5000 held out"),
    ]
    (found,) = json.loads(call(status, "--json"))
    assert (found["name"], found["state"]) == ("web", "2 done, 1 not started")
    (run_set.folder / "set.toml").write_text("[")
    shown = call(status)
    assert "web-01" in shown
    assert "not readable" in shown


def test_completion_knows_sets(make_set: MakeSet) -> None:
    make_set([f"{RATE}=1e-3,2e-3"], [3.0, None])
    assert complete_run_or_set("we") == ["web", "web-01"]
    assert complete_run_or_set("web-0") == ["web-01"]


def test_status_of_a_set(make_set: MakeSet) -> None:
    run_set = make_set([f"{RATE}=1e-3,2e-3"], [3.0, 2.5])
    assert call(status, "web") == render_results(read_results(run_set)) + "\n"
    assert json.loads(call(status, "web", "--json"))["job"] is None
    write_submission(run_set.folder, Submission(cluster="lumi", scheduler="ssh", n_nodes=2))
    assert call(status, "web").endswith("job  on lumi: it runs without a scheduler\n")
    assert json.loads(call(status, "web", "--json"))["job"]["phase"] == "unknown"


def test_status_follows_a_set_until_none_trains(
    make_set: MakeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_set = make_set([f"{RATE}=1e-3,2e-3"], [3.0, 2.5])
    holding = hold(run_set.members[1].folder)
    holding.__enter__()
    monkeypatch.setattr("time.sleep", lambda _: holding.__exit__(None, None, None))
    said = call(status, "web", "--follow")
    assert said == "1 done, 1 training\n" + render_results(read_results(run_set)) + "\n"


def test_the_page_of_a_set(make_set: MakeSet) -> None:
    run_set = make_set([*GRID[:1], "optimizer.kind='adamw','muon'"], [3.0, 3.2, 2.8, -5.0])
    stop(run_set, "web-04", "above the <median>")
    assert call(report, "web") == "wrote runs/web/report.html\n"
    page = Path("runs/web/report.html").read_text()
    assert f"<p><b>Best: {RATE}=2e-3 optimizer.kind=&#x27;adamw&#x27;, 2.8000; the second" in page
    assert "<td><mark>2.8000</mark></td>" in page
    assert "above the &lt;median&gt;" in page
    assert page.count("<svg ") == 2
    assert "<!DOCTYPE svg" not in page
    assert "<h2>Curves of the 3 best runs</h2>" in page
    curves = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    names = {one["label"] for one in curves[0]["series"]}
    assert "learning_rate=2e-3, kind='adamw', held out" in names
    with pytest.raises(UserError, match="--png and --baseline are for runs"):
        call(report, "web", "--baseline", "x=3")


def test_the_page_before_a_run_has_begun(make_set: MakeSet) -> None:
    make_set(GRID, [None, None, None, None])
    call(report, "web")
    page = Path("runs/web/report.html").read_text()
    assert "<b>No run is done yet.</b>" in page
    assert "<mark>" not in page


def test_a_picture_of_many_values_names_the_first_and_the_last(make_set: MakeSet) -> None:
    rates = [f"{n}.5e-3" for n in (5, 1, 8, 2, 3, 4, 7)]
    results = read_results(make_set([f"{RATE}={','.join(rates)}"], [3.0] * 7))
    picture = draw_effect(results, RATE)
    assert [rate for rate in rates if f">{rate}</text>" in picture] == ["1.5e-3", "8.5e-3"]


def test_pictures_of_effects(make_set: MakeSet) -> None:
    values = ["optimizer.kind='adamw','muon'", f"{RATE}=1e-3,4e-3", f"{DROPOUT}=0,0.1"]
    results = read_results(make_set(values, [3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, -9.0]))
    pictures = {field: draw_effect(results, field) for field in results.run_set.fields}
    for field, labels in (
        ("optimizer.kind", "adamw muon"),
        (RATE, "1e-3 4e-3"),
        (DROPOUT, "0 0.1"),
    ):
        assert all(f">{label}</text>" in pictures[field] for label in labels.split())
        assert "var(--run-0)" in pictures[field]
        assert "#0b6bb3" not in pictures[field]
