"""Flags of Megatron and what `import --from megatron-args` makes of them."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainyard.cli.main import app
from trainyard.config.load import all_fields, field_value, load_run
from trainyard.errors import ConfigError
from trainyard.export.from_megatron import flag_of
from trainyard.export.megatron_flags import (
    classify,
    flag_table,
    import_arguments,
    import_command,
    refusal,
)
from trainyard.export.shell_script import read_command

ROOT = Path(__file__).parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100"
)
DATA = "--vocab-file data/gpt2-vocab.json --merge-file data/gpt2-merges.txt --data-impl mmap"

# The five guides' commands: flags and values.
MSAMP = f"--split 949,50,1 --data-path data/wikipedia_text_document {DATA} --clip-grad 1.0"
MSAMP_345M = (
    f"{MSAMP} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 "
    "--log-interval 100 --eval-interval 1000 --eval-iters 10"
)
MUON = "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-use-nesterov"
MSAMP_LM = "--use-flash-attn --no-gradient-accumulation-fusion --use-distributed-optimizer --bf16"
MSAMP_345M_LM = f"{MSAMP_345M} {MSAMP_LM} --micro-batch-size 8 --global-batch-size 64"
MSAMP_345M_LM += " --save-interval 2000"
MSAMP_345M_DS = f"{MSAMP_345M} --micro-batch-size 4 --global-batch-size 8 --save-interval 10000"
MSAMP_345M_DS += " --fp16"
MSAMP_BIG = (
    f"{MSAMP} --distributed-backend nccl --no-query-key-layer-scaling --seed 43 --seq-length 2048 "
    "--max-position-embeddings 2048 --lr-decay-style cosine --weight-decay 0.1 --num-workers 1 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --optimizer adam --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.0099 --log-interval 1 --eval-iters 7"
)
MSAMP_6B7 = (
    f"{MSAMP_BIG} {MSAMP_LM} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--train-samples 48828125 --lr-decay-samples 43945312 --lr-warmup-samples 2048000 --lr 3.0e-4 "
    "--min-lr 3.0e-5 --micro-batch-size 1 --global-batch-size 2048 --sequence-parallel "
    "--save-interval 1000 --eval-interval 500 --tensor-model-parallel-size 1"
)
MSAMP_13B = (
    f"{MSAMP_BIG} --num-layers 40 --hidden-size 5120 --num-attention-heads 40 "
    "--train-samples 146484375 --lr-decay-samples 131835938 --lr-warmup-samples 4096000 "
    "--lr 2.0e-4 --min-lr 2.0e-5 --global-batch-size 1280 --tensor-model-parallel-size 2 "
    "--save-interval 2000 --eval-interval 200"
)
MSAMP_13B_LM = f"{MSAMP_13B} {MSAMP_LM} --micro-batch-size 1 --sequence-parallel"
MSAMP_13B_DS = (
    f"{MSAMP_13B} --bf16 --micro-batch-size 4 --checkpoint-activations --deepspeed "
    "--deepspeed_config msamp.json --zero-stage 1 --deepspeed-activation-checkpointing"
)
TE = " --fp8-hybrid --transformer-impl transformer_engine"
POLARIS = (
    "--no-async-tensor-model-parallel-allreduce --seed 17 --DDP-impl local "
    "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 64 "
    "--ds-sequence-parallel-size 1 --micro-batch-size 1 --global-batch-size 1 --train-iters 10 "
    "--lr-decay-iters 320000 --num-workers 0 --split 949,50,1 --distributed-backend nccl "
    "--lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 "
    "--lr-warmup-fraction .01 --log-interval 1 --save-interval 1000 --eval-interval 1000 "
    "--eval-iters 0 --override-opt_param-scheduler --tensorboard-dir tb "
    "--log-timers-to-tensorboard --tensorboard-log-interval 1 --checkpoint-activations "
    "--checkpoint-num-layers 1 --fp16 --sequence-parallel --cpu-optimizer "
    "--deepspeed-activation-checkpointing --no-pipeline-parallel --zero-stage=1 "
    "--deepspeed_config=polaris.json --deepspeed_mpi --deepspeed "
    f"--data-path data/genslm_subsample_200k_sequence_document {DATA}"
)
AZURE = (
    "--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
    "--global-batch-size 512 --train-iters 1500 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 "
    "--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 "
    "--sequence-parallel --use-distributed-optimizer --data-cache-path cache "
    "--train-data-path 'data/slimpajama/train_chunk_*_text_document[:-30]' "
    "--valid-data-path 'data/slimpajama/train_chunk_*_text_document[-15:]' "
    "--test-data-path 'data/slimpajama/train_chunk_*_text_document[-30:-15]' "
    "--vocab-file bpe/gpt2-vocab.json --merge-file bpe/gpt2-vocab.json --log-interval 10 "
    "--save-interval 100 --eval-interval 100 --save c --load c --eval-iters 10 "
    "--tensorboard-dir tb --ckpt-format torch_dist --ckpt-fully-parallel-load "
    "--use-persistent-ckpt-worker --ckpt-assume-constant-structure"
)
LUMI = (
    "--no-gradient-accumulation-fusion --override-opt_param-scheduler --adam-beta1 0.9 "
    "--adam-beta2 0.95 --tensor-model-parallel-size 2 --lr-decay-tokens 300000000000 "
    "--lr-warmup-tokens 3000000000 --micro-batch-size 2 --exit-duration-in-mins 30000000 "
    "--seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000 "
    "--train-samples 292968750 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 "
    "--log-interval 1 --eval-interval 100 --eval-iters 10 --save-interval 1000 "
    "--weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 "
    "--load c --save c --no-async-tensor-model-parallel-allreduce --use-flash-attn "
    "--tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --tensorboard-dir tb --checkpoint-activations "
    "--log-optimizer-states-to-tensorboard --deepspeed --deepspeed_config lumi.json "
    "--zero-stage 1 --pipeline-model-parallel-size 2 --deepspeed-activation-checkpointing "
    f"--data-path data/my-gpt2_text_document {DATA}"
)
B64 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5 "
    "--min-lr 6.0e-6 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --fp16 --use-flash-attn-v2 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --data-path "
    "0.35 data/wikipedia_20220301_en_text_document 0.65 data/openwebtext_Skylion007_text_document "
    f"--data-cache-path cache {DATA} --split 98,2,0 --save-interval 1000 --eval-interval 100 "
    "--save c --load c --eval-iters 40 --tensorboard-dir tb --log-validation-ppl-to-tensorboard"
)


def shape(layers: int, width: int, heads: int) -> str:
    return f" --num-layers {layers} --hidden-size {width} --num-attention-heads {heads}"


def layout(tensor: int, pipeline: int, length: int = 2048) -> str:
    return (
        f" --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        f" --seq-length {length}"
    )


def lumi(batch: int, rate: str, std: str) -> str:
    return f" --global-batch-size {batch} --lr {rate} --init-method-std {std}"


COMMANDS = {
    "msamp/345m-bf16": MSAMP_345M_LM,
    "msamp/345m-fp8": MSAMP_345M_LM + TE,
    "msamp/345m-fp8-lowbit": MSAMP_345M_LM + TE + " --msamp",
    "msamp/345m-deepspeed-fp16": MSAMP_345M_DS,
    "msamp/345m-deepspeed-fp8-lowbit": MSAMP_345M_DS
    + " --msamp --msamp-opt-level O2 --deepspeed --deepspeed_config msamp-fp16.json",
    "msamp/6.7b-bf16": MSAMP_6B7,
    "msamp/6.7b-fp8": MSAMP_6B7 + TE,
    "msamp/6.7b-fp8-lowbit": MSAMP_6B7 + TE + " --msamp",
    "msamp/13b-bf16": MSAMP_13B_LM,
    "msamp/13b-fp8": MSAMP_13B_LM + TE,
    "msamp/13b-fp8-lowbit": MSAMP_13B_LM + TE + " --msamp",
    "msamp/13b-deepspeed-bf16": MSAMP_13B_DS,
    "msamp/13b-deepspeed-fp8-lowbit": MSAMP_13B_DS + " --msamp --msamp-opt-level O3",
    "polaris/gpt13b": POLARIS + shape(40, 5120, 64) + " --seq-length 2048",
    "polaris/gpt25b": POLARIS + shape(64, 6144, 64) + " --seq-length 4096",
    "azure/64m": AZURE + shape(12, 512, 8) + layout(1, 1, 1024),
    "azure/125m": AZURE + shape(12, 768, 12) + layout(1, 1, 1024),
    "azure/356m": AZURE + shape(24, 1024, 16) + layout(1, 1),
    "azure/1.3b": AZURE + shape(24, 2048, 16) + layout(1, 2),
    "azure/13b": AZURE + shape(40, 5120, 40) + layout(2, 4),
    "azure/30b": AZURE + shape(48, 7168, 56) + layout(4, 8),
    "azure/175b": AZURE + shape(96, 12288, 96) + layout(8, 16),
    "lumi/125m": LUMI + shape(12, 768, 12) + lumi(256, "6.0e-4", "0.02"),
    "lumi/13b": LUMI + shape(40, 5120, 40) + lumi(1024, "1.0e-4", "0.008"),
    "lumi/175b": LUMI + shape(96, 12288, 96) + lumi(1536, "0.6e-4", "0.005"),
    "benchmark64/full": B64
    + " --rampup-batch-size 16 16 433870 --train-samples 10846761 --lr-decay-samples 9400526"
    " --lr-warmup-samples 13558 --log-interval 10",
    "benchmark64/tgs": B64
    + " --train-iters 10 --lr-warmup-fraction .001 --lr-decay-iters 8 --log-interval 1",
}
DEEPSPEED = {
    "msamp.json": '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "bf16": {}}',
    "msamp-fp16.json": '{"gradient_clipping": 1.0, "fp16": {"enabled": true}}',
    "polaris.json": '{"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR"}, '
    '"fp16": {"enabled": true, "initial_scale_power": 12}}',
    "lumi.json": '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "fp16": '
    '{"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "initial_scale_power": 11}}',
}


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
    for name, text in DEEPSPEED.items():
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
    imported = import_command(
        f"pretrain_gpt.py {AZURE} {shape(12, 512, 8)} {layout(1, 1)}", [], "x"
    )
    for flag in re.findall(r"--([\w-]+)", AZURE):
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
READ_OTHERWISE |= {"attention_dropout", "num_key_value_heads"}


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
        assert not of_model or flag_of(name) or name in READ_OTHERWISE, name
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
