from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tests.circles import everyday
from tests.command import call

from trainyard.cli.bench import bench
from trainyard.cli.plan import plan
from trainyard.config.load import load_run, preset_names
from trainyard.config.run import FlopFormula
from trainyard.data.indexed import IndexedWriter, optimal_dtype
from trainyard.errors import MachineError, UserError
from trainyard.units import parse_duration

RECIPES = Path(__file__).parents[2] / "recipes"
FORMULA_FIGURES = ("tflops_per_second_per_device", "share_of_peak")
LUMI_13B = RECIPES / "lumi" / "13b.toml"
LUMI = "--cluster lumi --nodes 2"


def run_plan(words: str) -> str:
    return call(plan, *shlex.split(words))


def as_json(words: str) -> Any:
    return json.loads(run_plan(f"{words} --json"))


def lines_of(text: str) -> dict[str, str]:
    return {line[:15].strip(): line[15:] for line in text.splitlines() if line[:15].strip()}


@pytest.mark.parametrize(("nodes", "link"), [(1, "inside"), (2, "across")])
def test_messages_of_muon_go_to_all_ranks_of_a_stage(nodes: int, link: str) -> None:
    shown = run_plan(f"gpt3-1.3b --cluster lumi --nodes {nodes} optimizer.kind=muon")
    (line,) = (line for line in shown.splitlines() if " stage " in line)
    assert "all-to-all" in line and f"{link} nodes" in line


def test_the_lumi_job() -> None:
    lines = lines_of(run_plan(f"{LUMI_13B} {LUMI} --price 1"))
    assert lines["layout"] == "pipeline 2 (1f1b) x data 4 (ZeRO 1) x tensor 2, recompute block"
    assert lines["parameters"] == "12,854,282,240 (12.9B); 3,286,292,480 on a rank"
    assert " of 62.7 GiB: fits, " in lines["memory"]
    assert "samples/s" in lines["step"] and "MFU " in lines["step"]
    assert lines["checkpoint"] == "143.7 GiB"
    assert "device-hours, " in lines["whole run"]
    assert lines["data"].startswith("data/my-gpt2_text_document: epochs unknown")
    found = as_json(f"{LUMI_13B} {LUMI}")
    assert found["fits"] is True
    assert found["machine"] == {"name": "lumi", "device": "MI250X GCD", "devices_per_node": 8}
    assert sum(found["step"]["parts"].values()) == pytest.approx(found["step"]["seconds"])
    for memory in found["memory"]:
        assert sum(memory["items"].values()) == memory["peak_bytes"]
    assert found["checkpoint_bytes"] == 12 * found["plan"]["n_parameters"]
    # Without a machine there is a size, and no time.
    alone = as_json(f"{LUMI_13B} --gpus 16")
    assert alone["parameters_held"] == found["parameters_held"]
    assert "step" not in alone


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    run = f"gpt3-13b parallel.zero_stage=1 {LUMI}"
    with pytest.raises(
        MachineError, match=r"does not fit: .* more than an MI250X GCD has"
    ) as error:
        run_plan(run)
    hint, _, change = error.value.hint.partition(": ")
    assert hint == "cheapest change that makes it fit"
    assert as_json(f"{run} {change.replace(',', '')}")["fits"] is True


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("--nodes 2", "--nodes 2 needs a cluster", "--cluster lumi --nodes 2"),
        ("--cluster lumy", "no cluster named 'lumy'", "did you mean lumi?"),
        ("--gpu h100-80", "h100-80", "h100-80g"),
        (f"{LUMI} --gpu h10", "no GPU named 'h10'", "h100"),
        (f"{LUMI} --gpus 15", "--nodes 2 of lumi are 16 devices, not --gpus 15", "omit one"),
        (f"{LUMI} --measure 3", "--measure 3 needs --search", "--search --measure 3"),
        (f"{LUMI} --search --measure 2", "times steps on this machine", "--cluster local"),
        (f"{LUMI} --rank 3", "--rank 3 needs --simulate", "--simulate --rank 3"),
        ("--all-stages", "--all-stages needs --simulate", ""),
        ("--search --simulate", "--search and --simulate cannot be combined", "one at a time"),
        (f"{LUMI} --search --deadline 1", "--deadline cannot be combined", "one at a time"),
        ("--deadline 1", "--deadline needs devices", "--cluster"),
        (f"{LUMI} --deadline soon", "--deadline 'soon' is not a duration", '"1 week"'),
        (f"{LUMI} --deadline '0 days'", "--deadline '0 days' is not a duration", '"1 week"'),
        (f"{LUMI} --deadline '1 minute'", "no model trains within 1 minute on 16", "more dev"),
        (
            "--gpu t4 precision.kind=fp16 --deadline '1 minute'",
            *("gpt3-125m does not train within 1 minute: on ", "a longer deadline"),
        ),
        ("--gpu t4 --deadline '1 day'", "T4 has no known peak for", "fp16"),
        ("--search", "--search needs devices", "--cluster"),
        (f"{LUMI} --storage fast", "--storage 'fast' is not a list of GB/s", "5,20,100"),
        (f"{LUMI} --picture nowhere/plan.png", "there is no folder nowhere", "create it"),
        (f"{LUMI} --search --picture plan.png", "draws a plan, not the results", "without it"),
        # A picture is refused before anything else.
        ("--picture plan.gif --gpu no", "--picture plan.gif: pictures are .png or .svg", ""),
        ("--flop-formula megatron_deepsped", "did you mean 'megatron_deepspeed'?", ""),
        ("--gpu a100-80g precision.kind='fp8'", "fp8", "bf16"),
        (
            "--gpu h100 --gpus 6 parallel.tensor=4",
            "6 ranks cannot be divided by parallel.tensor=4",
            "nearest that works: 4 ranks; --search lists the layouts that fit",
        ),
        (
            "--gpu h100 --gpus 5000 train.global_batch_size=2",
            "train.global_batch_size=2 cannot be divided",
            "trainyard plan --search lists layouts of 5,000 ranks, if any",
        ),
    ],
)
def test_refusals(words: str, problem: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        run_plan(f"gpt3-125m train.batch_ramp=none {words}")
    assert error.value.exit_code == 2
    assert problem in error.value.problem
    assert hint in error.value.hint


def test_a_cluster_with_other_devices() -> None:
    polaris, other, h100 = (
        as_json(f"gpt3-125m train.batch_ramp=none {where} --gpus 8")
        for where in ("--cluster polaris", "--cluster polaris --gpu h100", "--gpu h100")
    )
    assert polaris["machine"]["device"] == "A100 40GB"
    assert other["machine"] == {"name": "polaris", "device": "H100", "devices_per_node": 4}
    assert other["usable_bytes"] == h100["usable_bytes"] > polaris["usable_bytes"]
    # The network of Polaris is slower than that of H100 nodes, which hold all 8.
    assert h100["step"]["seconds"] < other["step"]["seconds"] < polaris["step"]["seconds"]


def test_every_machine_gets_a_range() -> None:
    run = "gpt3-125m train.batch_ramp=none train.micro_batch_size=8"

    def spread(where: str, *changes: str) -> float:
        found = as_json(" ".join([run, where, *changes]))
        for part in ("step", "cost"):
            fast, slow = found[part]["seconds_between"]
            assert fast < found[part]["seconds"] < slow
        fast, slow = found["step"]["seconds_between"]
        return float(slow / found["step"]["seconds"])

    alone, several = (spread(f"--gpu h100 --gpus {n}") for n in (1, 8))
    unmeasured = spread("--gpu rtx-4090 --gpus 8")
    in_fp8 = spread("--gpu h100 --gpus 8", "precision.kind=fp8")
    assert 1 < alone < several < min(unmeasured, in_fp8)
    text = lines_of(run_plan(f"{run} --gpu h100 --gpus 8 --price 2"))
    assert "% to " in text["step"] and " to " in text["step"].split(":")[0]
    assert text["whole run"].count(" to ") == 3


def test_epochs_of_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedWriter(Path("corpus"), optimal_dtype(512)) as writer:
        writer.add_document(np.arange(800, dtype=writer.dtype) % 512)
    run = "tiny data.train.prefixes=\"['corpus']\""
    shown = lines_of(run_plan(run))["data"]
    assert shown == "corpus: 100.0% of the tokens read, 32 epochs of the training split of its 800"
    used = {"prefix": "corpus", "tokens": 800, "share": 1.0, "epochs": 32.0}
    assert as_json(run)["data"] == [used]


def test_search_lists_ten_and_why_they_lose() -> None:
    run = f"gpt3-125m train.batch_ramp=none train.micro_batch_size=1 {LUMI}"
    text = run_plan(f"{run} --search")
    rows = [line for line in text.splitlines() if line[:2].strip().isdigit()]
    assert len(rows) == 10
    assert all("%" in row for row in rows[1:])
    found = as_json(f"{run} --search")
    first, *others = found["candidates"]
    assert first["longer_than_first"] == 0
    assert all(other["longer_than_first"] >= 0 for other in others)
    given = shlex.join(f"{name}={json.dumps(value)}" for name, value in first["changes"].items())
    again = as_json(f"{run} {given}")
    assert again["step"]["seconds"] == pytest.approx(first["step"]["seconds"])
    # The run's own layout stands below, with what it loses.
    own = as_json(run)["step"]["seconds"]
    assert found["as_it_is"]["step"]["seconds"] == pytest.approx(own)
    assert found["as_it_is"]["fits"] is True
    (row,) = (line for line in text.splitlines() if line.startswith("as is"))
    assert f"+{own / first['step']['seconds'] - 1:.1%}: " in row
    assert "arguments for the first: " in text


@pytest.mark.parametrize(
    ("changes", "where", "deadline", "n_devices"),
    [
        ("", "--gpus 8", "1 week", [8, 8]),
        ("", "--gpus 1", "1 day", [1, 1]),
        ("train.batch_ramp=none 'train.length=1B tokens'", "--gpus 8", "1 week", [8, 8]),
        ("train.batch_ramp=none 'train.length=200B tokens'", "", "1 week", [8, 4]),
        ("train.batch_ramp=none 'train.length=600B tokens'", "", "1 week", [16, 8]),
    ],
)
def test_a_deadline(changes: str, where: str, deadline: str, n_devices: list[int]) -> None:
    """The largest model on 20 tokens a parameter, or as long as is said; or the fewest devices."""
    given = f"gpt3-125m {changes} --gpu rtx-4090"
    first, second = as_json(f"{given} {where} --deadline '{deadline}' --price 2")
    overrides = shlex.split(changes)
    run = load_run("gpt3-125m", [*overrides, *shlex.split(first["changes"])]).run
    expected = load_run("gpt3-125m", overrides).run.train.length.amount
    if not changes:
        expected = 20 * first["parameters"]
        assert run.schedule.decay == run.train.length
        assert run.schedule.warmup.amount == pytest.approx(expected / 100, rel=5e-3)
    assert first["tokens"] == pytest.approx(expected, rel=5e-3)
    assert run.train.batch_ramp is None
    width = run.model.d_model
    assert run.model.d_ff == 4 * width
    assert width // run.model.n_heads == (128 if width >= 2048 else 64)
    assert first["seconds"] <= parse_duration(deadline) < (second["seconds"] or math.inf)
    assert [first["n_devices"], second["n_devices"]] == n_devices
    assert not where or second["parameters"] > first["parameters"]
    plain = as_json(f"{given} {first['changes']} --gpus {first['n_devices']} --price 2")["cost"]
    # A deadline counts on the slow end.
    assert plain["seconds_between"][1] == pytest.approx(first["seconds"])
    assert first["seconds"] > plain["seconds"]
    assert first["device_hours"] == pytest.approx(first["seconds"] * first["n_devices"] / 3600)
    assert first["price"] == pytest.approx(2 * first["device_hours"])
    text = run_plan(f"{given} {where} --deadline '{deadline}'")
    assert "at the slow end of predictions" in text
    assert text.splitlines()[-1].endswith(f"--gpus {first['n_devices']} {first['changes']}".strip())


def test_a_search_for_what_nothing_holds() -> None:
    with pytest.raises(MachineError, match="no layout fits on 8 devices") as error:
        run_plan("polaris-gpt1t-1024l --cluster lumi --nodes 1 --search")
    assert error.value.hint


@pytest.mark.parametrize(
    ("asked", "is_dropped"),
    [
        ("gpt3-13b --gpu h100-80g --gpus 64", True),  # layouts that share it are 20 % slower
        ("gpt3-6.7b --gpu h100-80g --gpus 8", False),
    ],
)
def test_a_search_drops_the_ramp_that_a_plan_drops(asked: str, is_dropped: bool) -> None:
    chosen, found = as_json(asked), as_json(f"{asked} --search")["candidates"]
    assert found[0]["step"]["seconds"] == chosen["step"]["seconds"]
    assert ("train.batch_ramp=none" in chosen["chosen"]) == is_dropped
    for each in found:
        assert ("train.batch_ramp" in each["changes"]) == is_dropped
    for text in (run_plan(asked), run_plan(f"{asked} --search")):
        assert bool(re.search(r"batch ramp +dropped: ", text)) == is_dropped


def test_a_search_leaves_out_a_ramp_that_no_layout_shares() -> None:
    asked = "gpt3-175b --gpu h100 --gpus 1024 --search"
    text = run_plan(asked)
    assert text.splitlines()[-1].endswith("train.batch_ramp=none")
    assert as_json(asked)["candidates"][0]["changes"]["train.batch_ramp"] == "none"


@pytest.mark.exhaustive
def test_the_fastest_measured_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = 'extends = "tiny" # small\nname = "kept"\n\n[parallel]\ntensor = 2 # both\n'
    text += "[train]\nmicro_batch_size = 1\n\n"
    text += '[train.batch_ramp]\nstart = 1\nincrement = 1\nlength = "64 sequences"\n'
    path.write_text(text, encoding="utf-8")
    search = f"{path} --cluster local --gpus 2 --search"
    out = run_plan(f"{search} --measure 1")
    assert any(line.startswith(" 1 *") for line in out.splitlines())
    changed = path.read_text(encoding="utf-8")
    assert "# small" in changed and "# both" in changed
    assert as_json(search)["candidates"][0]["changes"] == {}
    assert f"wrote to {path}: " in out
    run = load_run(str(path)).run
    assert run.parallel.tensor == 1 and run.train.batch_ramp is None
    assert "\nbatch ramp dropped: " in out and "train.batch_ramp=none" in out


@pytest.mark.exhaustive
def test_pictures(tmp_path: Path) -> None:
    for name in ("plan.png", "plan.svg"):
        run_plan(f"{LUMI_13B} {LUMI} --picture {tmp_path / name}")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    for word in ("context and libraries", "usable: 62.7 GiB", "backward", "8 of 128"):
        assert word in svg


RUNS = [*preset_names(), *map(str, sorted(RECIPES.glob("*/*.toml")))]
SLOW = re.compile(r"(mds|azure).175b|polaris-gpt(145b|1t)|llama-70b")


@pytest.mark.parametrize(
    "name",
    everyday(RUNS, [name for name in RUNS if not SLOW.search(name)]),
    ids=lambda name: "-".join(Path(name).parts[-2:]),
)
def test_every_preset_and_recipe_gets_an_answer(name: str) -> None:
    try:
        found = as_json(f"{name} --gpu h100-80g")
    except UserError as error:
        assert error.exit_code == 2
        assert error.hint
    else:
        assert found["fits"] is True


def test_tflops_by_the_formula_of_a_guide() -> None:
    """One way to name them: the option is the field."""
    option = "--flop-formula megatron_deepspeed"
    plain, by_option, by_field = (
        as_json(f"{LUMI_13B} {LUMI} {words}")["step"]
        for words in ("", option, "log.flop_formula=megatron_deepspeed")
    )
    assert by_option == by_field
    assert by_field.pop("flop_formula") == "megatron_deepspeed"
    tflops, share = (by_field.pop(f"formula_{name}") for name in FORMULA_FIGURES)
    assert by_field == plain
    assert share == pytest.approx(tflops / 191.5)
    text = run_plan(f"{LUMI_13B} {LUMI} {option}")
    assert f"{tflops:.4g} TFLOP/s per device by megatron_deepspeed, {share:.2%} of the peak" in text


@pytest.mark.parametrize("verb", [plan, bench])
def test_help_lists_the_formulas(verb: Any) -> None:
    (option,) = get_type_hints(verb, include_extras=True)["flop_formula"].__metadata__
    assert all(name in option.help for name in get_args(FlopFormula))


def test_a_long_evaluation_is_said_with_what_leaves_it_out() -> None:
    run = f"{RECIPES / 'benchmark64' / 'tgs.toml'} --gpu a100-80g --gpus 64"
    hint = re.compile(r"evaluation takes \d+% of that: evaluate.batches=0 leaves it out")
    assert hint.search(run_plan(run))
    assert not hint.search(run_plan(f"{run} evaluate.batches=0"))


def test_the_fastest_layout_is_chosen_where_a_run_states_none() -> None:
    asked = "gpt3-13b --gpu h100-80g --gpus 64"
    text = run_plan(asked)
    assert "the fastest that fits, as the run states none" in text
    assert "batch ramp     dropped" in text
    (given,) = (line for line in text.splitlines() if line.startswith("arguments for it: "))
    arguments = given.removeprefix("arguments for it: ")
    assert "train.batch_ramp=none" in arguments
    # What was planned is what the arguments make, and the first that a search lists.
    chosen, stated = as_json(asked), as_json(f"{asked} {arguments}")
    assert chosen["chosen"] == arguments and stated["chosen"] is None
    assert chosen["step"] == stated["step"]
    found = as_json(f"{asked} train.batch_ramp=none --search")["candidates"][0]
    assert chosen["step"]["seconds"] == found["step"]["seconds"]


def test_a_batch_ramp_that_the_ranks_share_stays() -> None:
    text = run_plan("gpt3-6.7b --gpu h100-80g --gpus 8")
    assert "batch ramp" not in text and "train.batch_ramp" not in text


def test_a_run_that_this_computer_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.planning.clusters.free_memory_bytes", lambda line: 24 * 2**30)
    asked = "smollm2-135m --cluster local --gpus 4"
    assert re.search(r"node: \S+ GiB of 24.0 GiB: fits", run_plan(asked))
    refused = "in host memory: .* need 82.8 GiB, and a node of local has 24.0 GiB"
    with pytest.raises(MachineError, match=refused):
        run_plan(f"{asked} parallel.zero_stage=1")


def test_where_no_layout_fits_the_hint_says_on_how_many_devices_one_does() -> None:
    with pytest.raises(UserError, match="no layout fits on 8 devices") as refused:
        run_plan("gpt3-13b --gpu rtx-4090 --gpus 8")
    assert re.match(r"one fits on \d+ devices with parallel", refused.value.hint)


def test_experts_are_compared_with_a_dense_model() -> None:
    words = """llama-3.2-1b --gpu h100 --gpus 8 model.n_experts=16 model.n_active_experts=2
        model.d_expert=4096 parallel.expert=4 train.micro_batch_size=1 train.global_batch_size=32"""
    found, text = as_json(words), run_plan(words)
    dense = found["dense"]
    assert dense["d_ff"] == 2 * 4096, "the router is less than half of 64 features"
    assert found["parameters_active"] == pytest.approx(dense["parameters"], rel=0.01)
    assert dense["seconds"] < found["step"]["seconds"]
    assert dense["peak_bytes"] < max(memory["peak_bytes"] for memory in found["memory"])
    assert "; a token uses " in lines_of(text)["parameters"]
    assert "d_ff 8,192" in lines_of(text)["against dense"]
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["expert", "all-to-all"]]
    assert "inside nodes" in line
