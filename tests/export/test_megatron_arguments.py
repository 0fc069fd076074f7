"""Flags of Megatron and what `import --from megatron-args` makes of them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainyard.cli.main import app
from trainyard.config.load import all_fields, field_value, load_run
from trainyard.errors import ConfigError
from trainyard.export.foreign import classify, flag_table, refusal
from trainyard.export.from_megatron import flag_of
from trainyard.export.megatron_flags import import_arguments, import_command
from trainyard.export.shell_script import read_command

ROOT = Path(__file__).parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100"
)
MUON = "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-use-nesterov"
GUIDES = tomllib.loads((Path(__file__).parent / "guides.toml").read_text(encoding="utf-8"))


def expand(text: str) -> str:
    return re.sub(r"\{([\w.-]+)\}", lambda match: expand(GUIDES["parts"][match[1]]), text)


COMMANDS = {recipe: expand(command) for recipe, command in GUIDES["commands"].items()}


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fields_of(folder: Path, text: str) -> dict[str, object]:
    (folder / "imported.toml").write_text(text, encoding="utf-8")
    run = load_run(str(folder / "imported.toml")).run
    return {field: field_value(run, field) for field in all_fields()}


def test_every_recipe_of_the_guides_has_its_command() -> None:
    guides = ("msamp", "polaris", "azure", "lumi", "benchmark64")
    recipes = {f"{g}/{path.stem}" for g in guides for path in (ROOT / "recipes" / g).glob("*.toml")}
    assert recipes == set(COMMANDS)


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_guides_command_gives_its_recipe(recipe: str, in_folder: Path) -> None:
    for name, text in GUIDES["deepspeed"].items():
        Path(name).write_text(text, encoding="utf-8")
    imported = import_command(f"torchrun pretrain_gpt.py {COMMANDS[recipe]}", [], "x")
    ours = load_run(str(ROOT / "recipes" / f"{recipe}.toml")).run
    readme = (ROOT / "recipes" / recipe).parent / "README.md"
    listed = readme.read_text(encoding="utf-8").partition("## Differences")[2]
    table = listed.partition("## What it publishes")[0]
    differing = {
        field: (value, field_value(ours, field))
        for field, value in fields_of(in_folder, imported.text).items()
        if value != field_value(ours, field) and field not in ("name", "description")
    }
    allowed = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", table))
    assert not {field: pair for field, pair in differing.items() if field not in allowed}


def test_every_flag_is_accounted_for(in_folder: Path) -> None:
    command = COMMANDS["azure/64m"]
    imported = import_command(f"pretrain_gpt.py {command}", [], "x")
    for flag in re.findall(r"--([\w-]+)", command):
        assert f"--{flag}" in imported.text.replace("_", "-"), flag


def test_fields_of_the_table_exist_and_patterns_do_not_hide_flags() -> None:
    table = flag_table()
    fields = all_fields()
    for flag, target in (table["field"] | table["rule"]).items():
        assert any(field == target or field.startswith(f"{target}.") for field in fields), flag
    for kind in ("field", "rule", "same", "none", "refused"):
        for flag in table[kind]:
            assert "*" in flag or classify(flag)[0] == kind, flag


RECORDED = [
    line.split("\t")
    for line in (Path(__file__).parent / "megatron_arguments.tsv").read_text().splitlines()
    if not line.startswith("#")
]


READ_OTHERWISE = {"seq_length", "vocab_size", "make_vocab_size_divisible_by"}
READ_OTHERWISE |= {"attention_dropout", "num_key_value_heads", "num_experts"}


def test_every_argument_of_megatron_is_read_harmless_or_refused() -> None:
    reached = set()
    for name, flags, *defaults in RECORDED:
        for flag in flags.split():
            assert classify(flag)[0], flag
        changed = "" if flag_of(name) else refusal(name, "changed")
        assert "unknown" not in changed, name
        reached |= {name} if changed else set()
        for default in map(json.loads, defaults):
            assert flag_of(name) or not refusal(name, default), name
        of_model = any(classify(flag)[1].startswith("model.") for flag in flags.split())
        is_read = flag_of(name) or name in READ_OTHERWISE or name.startswith("moe_")
        assert not of_model or is_read, name
    assert len(RECORDED) > 900 and len(reached) > 30
    assert reached >= {"softmax_type", "use_mup", "window_attn_skip_freq", "rotary_percent"}


@pytest.mark.parametrize("name", ["made_up", "log_softmax_scale", "no_use_norm", "bias_up_fusion"])
def test_a_name_that_megatron_lacks_is_refused(name: str) -> None:
    assert refusal(name, 3) == refusal(name, True) == "unknown to Megatron"
    assert refusal(name, None) == refusal(name, False) == ""
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 3: unknown flag"):
        import_command(f"pretrain_gpt.py {SMALL} --{name} 3", [], "x")


def test_an_unknown_flag_is_refused_with_the_nearest(in_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--numlayers 3: unknown flag; did you mean --num-layers"):
        import_command(f"p.py {SMALL} --numlayers 3", [], "x")


@pytest.mark.parametrize(
    ("flags", "table", "expected"),
    [
        (
            "--use-rotary-position-embeddings --rotary-position-embeddings-theta 500000 "
            "--no-position-embedding",
            "model",
            {"positions": "rotary", "rotary_base": 500_000},
        ),
        ("--softmax-type vanilla --rotary-percent 1", "model", {"n_layers": 2}),
        ("--pipeline-model-parallel-size 1 --no-pipeline-parallel", "parallel", {"pipeline": 1}),
        (
            "--data-path 1e0 a 1E-1 b",
            "data",
            {"blend": {"weights": [1, 0.1], "prefixes": ["a", "b"]}},
        ),
        ("--data-path 1e0 a b", "data", {"blend": {"prefixes": ["1e0", "a", "b"]}}),
    ],
)
def test_fields_of_flags(flags: str, table: str, expected: dict[str, Any]) -> None:
    found = tomllib.loads(import_command(f"pretrain_gpt.py {SMALL} {flags}", [], "x").text)[table]
    assert {name: found[name] for name in expected} == expected


def test_a_factor_that_megatron_ignored_is_said() -> None:
    flags = "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor"
    for factor, said in ((8, 0), (16, 1)):
        found = import_command(f"pretrain_gpt.py {SMALL} {flags} {factor}", [], "x")
        assert sum("before August 2026 ignored it" in note for note in found.warnings) == said


def test_what_a_script_says_of_its_cluster_is_named(in_folder: Path) -> None:
    head = "#SBATCH --nodes=2\n#SBATCH -t 1\nexport NCCL_DEBUG=INFO\nexport LR=1\n"
    Path("train.sh").write_text(f"{head}python pretrain_gpt.py {SMALL}", encoding="utf-8")
    note = "not imported: #SBATCH lines, NCCL_DEBUG: they belong in a cluster file"
    assert import_command("train.sh", [], "x").warnings == [note]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--softmax-type off-by-one", "--softmax-type off-by-one: attention is GPT's"),
        ("--step-batch-size-schedule '0:8 1B:16'", "8 1B:16: batches grow in equal increments"),
        ("--tokenizer-type Llama2Tokenizer", "Llama2Tokenizer: a byte-level BPE.* encode .* again"),
        ("--no-position-embedding", "--no-position-embedding"),
        (
            "--no-pipeline-parallel --pipeline-model-parallel-size 2",
            "--no-pipeline-parallel and --pipeline-model-parallel-size 2 contradict",
        ),
        (
            "--squared-relu --rotary-percent 0.5",
            "(?s)--squared-relu.*--rotary-percent",
        ),
        ("--qk-layernorm", "--qk-layernorm with --normalization LayerNorm has biases"),
        ("--reset-position-ids", "--reset-position-ids without --reset-attention-mask"),
        ("--reset-attention-mask", "--reset-attention-mask without --reset-position-ids"),
        ("--attention-dropout 0.0", "--attention-dropout 0.0 and --hidden-dropout 0.1 differ"),
        ("--seed x", "--seed needs a number"),
        ("--lr-decay-style inverse-square-root", "inverse-square-root is not supported"),
        ("--deepspeed --deepspeed_config none.json", "cannot read --deepspeed_config none.json"),
        (
            "--optimizer muon --muon-momentum 0.9 --tensor-model-parallel-size 2",
            "--optimizer muon without --muon-extra-scale-factor, --muon-use-nesterov, "
            "--muon-tp-mode: Megatron's defaults are not",
        ),
        (f"{MUON} --muon-no-split-qkv", "--muon-no-split-qkv: queries, keys and values are"),
        (f"{MUON} --muon-num-ns-steps 6", "6: 5 Newton-Schulz iterations; supported: 5"),
        ("--optimizer sgd", "--optimizer sgd: optimizer.kind; supported: adam, muon"),
        ("--tensor-model-parallel-size 3", "model.n_heads=2 must be divisible"),
    ],
)
def test_what_is_not_supported_is_refused(flags: str, problem: str, in_folder: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        import_command(f"pretrain_gpt.py {SMALL} {flags}", [], "x")


def test_parts_of_a_model_that_is_not_gpt3() -> None:
    flags = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm --kv-channels 48 "
        "--group-query-attention --num-query-groups 1 --position-embedding-type rope "
        "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0 "
        "--reset-position-ids --reset-attention-mask"
    )
    found = import_command(f"pretrain_gpt.py {SMALL} {flags}", [], "x")
    model = tomllib.loads(found.text)["model"]
    d_model = model["d_model"]
    expected = {
        "mlp": "swiglu",
        "d_ff": d_model * 8 // 3 // 64 * 64,
        "norm": "rms",
        "bias": False,
        "query_key_norm": "head",
        "d_head": 48,
        "n_key_value_heads": 1,
        "positions": "rotary",
        "rotary_base": 500_000,
        "rotary_scaling": {"factor": 32.0},
        "attention_within_documents": True,
    }
    assert {name: model[name] for name in expected} == expected
    assert len(found.warnings) == 1 and "rope-scaling-factor 32" in found.warnings[0]


def test_what_megatron_needs_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--seq-length is not given"):
        import_command(
            "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2", [], "x"
        )


EXPERTS = (
    "--disable-bias-linear --swiglu --num-experts 8 --moe-ffn-hidden-size 48 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
"""Of a model with two blocks."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"n_experts": 8, "n_active_experts": 2, "d_expert": 48, "balance": "none"}),
        ("", {"n_shared_experts": 0, "n_dense_blocks": 0}),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
            "--moe-router-topk 4 --moe-z-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5",
            {"balance": "loss", "balance_coefficient": 1e-3, "n_active_experts": 4}
            | {"router_z_loss": 1e-4, "router_scale": 2.5},
        ),
        ("--moe-aux-loss-coeff 1e-3", {"balance": "loss", "balance_coefficient": 1e-3}),
        ("--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type none", {"balance": "none"}),
        ("--moe-router-pre-softmax", {"router_normalized": False}),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            {"router": "sigmoid", "balance": "bias", "balance_coefficient": 1e-3},
        ),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-bias-update-rate 5e-4 --moe-router-topk 1",
            {"balance_coefficient": 5e-4, "router_normalized": False},
        ),
        (
            "--moe-router-score-function sigmoid --moe-router-num-groups 4 "
            "--moe-router-group-topk 2 --moe-router-topk 4",
            {"n_expert_groups": 4, "n_active_groups": 2},
        ),
        ("--moe-shared-expert-intermediate-size 96", {"n_shared_experts": 2}),
        ("--moe-layer-freq ([0]*1+[1]*1)", {"n_dense_blocks": 1}),
        ("--moe-layer-freq \"'([1]*2)'\"", {"n_dense_blocks": 0}),
        ("--moe-layer-freq [0,1]", {"n_dense_blocks": 1}),
        ("--moe-token-drop-policy probs --moe-router-dtype fp32", {"n_experts": 8}),
    ],
)
def test_flags_of_experts(flags: str, expected: dict[str, Any]) -> None:
    command = ["p.py", *f"{SMALL} {EXPERTS}".split(), *shlex.split(flags)]
    found = tomllib.loads(import_arguments(command, {}, "x").text)["model"]
    assert {name: found[name] for name in expected} == expected


def test_ranks_share_experts_as_in_megatron(in_folder: Path) -> None:
    flags = "--expert-model-parallel-size 4 --tensor-model-parallel-size 2"
    fields = fields_of(
        in_folder,
        import_command(
            f"p.py {SMALL} {EXPERTS} {flags} --expert-tensor-parallel-size 2", [], "x"
        ).text,
    )
    assert (fields["parallel.expert"], fields["parallel.tensor"]) == (4, 2)


def test_one_expert_is_a_dense_block() -> None:
    """As Megatron-DeepSpeed says it."""
    flags = "--num-experts 1 --moe-expert-parallel-size 1 --moe-router-topk 2 --moe-z-loss-coeff 1"
    found = tomllib.loads(import_command(f"p.py {SMALL} {flags}", [], "x").text)["model"]
    dense = tomllib.loads(import_command(f"p.py {SMALL}", [], "x").text)["model"]
    assert found == dense


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--moe-expert-capacity-factor 1.25", "1.25: no token is dropped, which is what Megatron"),
        ("--moe-pad-expert-input-to-capacity", "no expert is padded"),
        ("--moe-token-drop-policy position", "position: no token is dropped"),
        ("--moe-shared-expert-gate", "a shared expert has no gate"),
        ("--moe-latent-size 8", "--moe-latent-size 8: experts and routers have no such option"),
        ("--moe-router-score-function sqrtsoftplus", "supported: softmax, sigmoid"),
        ("--moe-router-load-balancing-type sinkhorn", "supported: aux_loss, seq_aux_loss, none"),
        ("--moe-router-load-balancing-type aux_loss none", "needs one value"),
        ("--moe-shared-expert-intermediate-size 50", "(?s)50 is not.*--moe-ffn-hidden-size, 48"),
        ("--moe-layer-freq 2", "(?s)freq 2: only the first blocks.*for example .*0.*1.*1"),
        ("--moe-layer-freq [1]+[0]", "only the first blocks can be without experts"),
        ("--moe-layer-freq [1]*3", "only the first blocks can be without experts"),
        ("--moe-layer-freq 9**9**9", "only the first blocks can be without experts"),
        ("--moe-layer-freq [0]*2", "n_dense_blocks=2 leaves none of n_layers=2 blocks"),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-aux-loss-coeff 1e-4",
            "(?s)--moe-aux-loss-coeff with --moe-router-enable-expert-bias.*coeff 0",
        ),
        (
            "--moe-router-enable-expert-bias",
            "(?s)bias with softmax.*--moe-router-score-f.* sigmoid",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4",
            "with softmax of those chosen",
        ),
        (
            "--moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 2",
            "(?s)--moe-router-group-topk 2 with --moe-router-topk 2.*--moe-router-topk 4",
        ),
        ("--expert-tensor-parallel-size 2", "(?s)that of --tensor-model-parallel-size, 1"),
        ("--expert-model-parallel-size 3", "n_experts=8 must be divisible by parallel.expert=3"),
        ("--deepspeed", "--num-experts with --deepspeed, whose experts drop tokens"),
        ("--fp8-format hybrid", "precision.kind='fp8' is incompatible with model.n_experts=8"),
    ],
)
def test_experts_that_are_not_supported_are_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        import_command(f"pretrain_gpt.py {SMALL} {EXPERTS} {flags}", [], "x")
    assert re.search(problem, str(raised.value)), raised.value


def test_biases_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="bias=true is not for experts"):
        import_command(f"p.py {SMALL} --num-experts 8", [], "x")


def test_megatrons_defaults_are_written(in_folder: Path) -> None:
    fields = fields_of(in_folder, import_command(f"pretrain_gpt.py {SMALL}", [], "x").text)
    assert fields["optimizer.betas"] == (0.9, 0.999)
    assert fields["optimizer.weight_decay"] == 0.01
    assert fields["precision.kind"] == "fp32"
    assert (fields["schedule.kind"], str(fields["schedule.decay"])) == ("linear", "100 steps")
    assert (fields["data.split"], fields["checkpoint.interval"]) == ("969,30,1", 0)


def test_muon_is_imported(in_folder: Path) -> None:
    command = (
        f"pretrain_gpt.py {SMALL} {MUON} --tensor-model-parallel-size 2 --muon-tp-mode distributed"
    )
    fields = fields_of(in_folder, import_command(command, [], "x").text)
    assert (fields["optimizer.kind"], fields["optimizer.momentum"]) == ("muon", 0.9)


SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
MODE=$1                      # a comment with "quotes
LAYERS=${LAYERS:-2}; HIDDEN=$((LAYERS * (30 + 2)))
if [ $SLURM_PROCID -eq 0 ]; then MAYBE=1; fi
HOST=$(scontrol show hostnames | head -1)
ARGS="--num-layers ${LAYERS} \
  --hidden-size $HIDDEN --num-attention-heads 2"
MORE=(
  --seq-length 128   # inside an array
  --lr '1e-3' "--micro-batch-size 2"
)
MORE+=(--global-batch-size 8)
cat <<EOT > ds.json
{"zero_optimization": {"stage": $LAYERS}, "gradient_clipping": 0.5}
EOT
if [ "$MODE" = "long" ]; then
  MORE+=(--train-iters 1000)
elif [[ $MODE == short ]]; then
  MORE+=(--train-iters 10)
else
  exit 1
fi
for node in 1 2; do
  rm -rf /tmp/must-not-run
done
torchrun --master_addr $HOST pretrain_gpt.py $ARGS "${MORE[@]}" \
  --save $OUT/x --deepspeed --deepspeed_config ds.json 2>&1 | tee log
"""


def test_a_script_is_read_without_running_it(in_folder: Path) -> None:
    Path("train.sh").write_text(SCRIPT, encoding="utf-8")
    text = import_command("train.sh short", [], "x").text
    fields = fields_of(in_folder, text)
    assert (fields["model.n_layers"], fields["model.d_model"]) == (2, 64)
    assert (fields["parallel.zero_stage"], fields["optimizer.clip_norm"]) == (2, 0.5)
    assert str(fields["train.length"]) == "10 steps"
    assert "--save <OUT>/x" in text
    longer = import_command("bash train.sh long", ["LAYERS=1"], "x").text
    assert "n_layers = 1 " in longer and 'length = "1000 steps"' in longer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("num-attention-heads 2", "num-attention-heads $HEADS"), "cannot resolve HEADS"),
        (("--lr '1e-3'", "--lr $(cat rate)"), "cannot resolve"),
        (("--lr '1e-3'", "--lr $MAYBE"), "cannot resolve MAYBE"),
        (("pretrain_gpt.py", "other.py"), "no commands with pretrain_gpt.py"),
    ],
)
def test_what_a_script_leaves_open_is_named(
    change: tuple[str, str], problem: str, in_folder: Path
) -> None:
    Path("train.sh").write_text(SCRIPT.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError, match=problem) as raised:
        import_command("train.sh short", [], "x")
    assert "`source FILE`, functions and loops are not followed" in str(raised.value.hint)


def test_set_resolves_a_variable(in_folder: Path) -> None:
    Path("train.sh").write_text(SCRIPT.replace("heads 2", "heads $HEADS"), encoding="utf-8")
    assert "n_heads = 4 " in import_command("train.sh short", ["HEADS=4"], "x").text


def test_branches_that_stay_open_are_not_guessed() -> None:
    script = "if [ $A = 1 ]; then\np pretrain_gpt.py --lr 1\nelse\np pretrain_gpt.py --lr 2\nfi"
    with pytest.raises(ConfigError, match="2 commands"):
        read_command(script, [], {})
    assert read_command(script, [], {"A": "1"})[0] == ["--lr", "1"]


def test_a_file_is_written_once(in_folder: Path) -> None:
    command = [
        "import",
        "--from",
        "megatron-args",
        f"pretrain_gpt.py {SMALL}",
        "--output",
        "a.toml",
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert load_run("a.toml").run.name == "a"
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ConfigError) and "already exists" in str(again.exception)


@pytest.mark.parametrize("values", ["", "x", "0", "-1", "1.5", "nan", "1e999", "1 2", "a b c"])
def test_no_value_of_any_flag_is_a_traceback(values: str) -> None:
    of_rules = {"rampup-batch-size", "lr-warmup-fraction", "lr-decay-samples", "data-path"}
    for flag in of_rules.union(*(flag_table()[k] for k in ("field", "rule", "default", "value"))):
        with suppress(ConfigError):
            import_arguments([*SMALL.split(), f"--{flag}", *values.split()], {}, "run")


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"zero_optimization": 3}, "zero_optimization.stage"),
        ({"fp16": {"hysteresis": True}}, "fp16.hysteresis"),
        ({"fp16": {"loss_scale_window": 1e12}}, "fp16.loss_scale_window"),
    ],
)
def test_settings_of_deepspeed_that_are_no_numbers(settings: dict[str, Any], place: str) -> None:
    words = [*SMALL.split(), "--fp16", "--deepspeed", "--deepspeed_config", "d.json"]
    with pytest.raises(ConfigError, match=f"{place} needs a number"):
        import_arguments(words, {"d.json": json.dumps(settings)}, "run")


def test_quoted_values_keep_their_spaces() -> None:
    line = f"pretrain_gpt.py {SMALL} --split '949, 50, 1' --data-path 'my folder/x'"
    text = import_command(line, [], "x").text
    assert 'split = "949, 50, 1" # --split' in text
    assert 'prefixes = ["my folder/x"] # --data-path' in text


def test_a_sourced_file_is_reported(in_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = 'LR=1e-3\nsource "$HOME/conf.sh"\n. setup\npython pretrain_gpt.py --lr $LR\n'
    assert read_command(script, [], {})[0][-1] == "1e-3"
    assert "not followed: source" in caplog.text
    assert ". setup; if it sets values of the command: --set NAME=value" in caplog.text
