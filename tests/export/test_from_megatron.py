from __future__ import annotations

import enum
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.export.models import require_equal_logits_of
from typer.testing import CliRunner

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_tokenizer_copy
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.cli.import_ import import_
from trainyard.config.load import load_run
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import CheckpointError, ConfigError
from trainyard.export.from_megatron import import_megatron

from .megatron_folder import (
    D,
    H,
    L,
    Theirs,
    V,
    around_the_model,
    core_names,
    random_gpt2,
    save_deepspeed,
    save_megatron,
    stage,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gpt2():
    return random_gpt2()


def require_same(model, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
    """Compares every weight bitwise, and logits."""
    check_checkpoint(checkpoint)
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    assert run.model.vocabulary_size == V
    weights = {name: value.to(dtype).float() for name, value in model.state_dict().items()}
    found = dict(ours.named_parameters())
    assert torch.equal(found["embedding.weight"][:V], weights["transformer.wte.weight"])
    assert torch.count_nonzero(found["embedding.weight"][V:]) == 0
    assert torch.equal(found["positions.weight"], weights["transformer.wpe.weight"])
    for number in range(L):
        for our, their in {
            "attention_norm": "ln_1",
            "attention.out": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        }.items():
            weight = weights[f"transformer.h.{number}.{their}.weight"]
            assert torch.equal(found[f"blocks.{number}.{our}.weight"], weight.t())
            bias = weights[f"transformer.h.{number}.{their}.bias"]
            assert torch.equal(found[f"blocks.{number}.{our}.bias"], bias)
        # ours: head by head its queries, keys and values
        fused = weights[f"transformer.h.{number}.attn.c_attn.weight"]
        for head in range(H):
            for kind in range(3):
                start = (3 * head + kind) * D // H
                rows = found[f"blocks.{number}.attention.qkv.weight"][start : start + D // H]
                column = kind * D + head * D // H
                assert torch.equal(rows, fused[:, column : column + D // H].t())
    if dtype == torch.float32:
        require_equal_logits_of(model, ours, 2e-6)


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_cut_and_version_gives_the_same_model(gpt2, tmp_path, tensor, pipeline, version):
    theirs = Theirs(tensor, pipeline, version=version, rows=128 * -(-V // (128 * tensor)) * tensor)
    save_megatron(tmp_path / "theirs", gpt2, theirs)
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "runs" / "mine")
    assert checkpoint == tmp_path / "runs" / "mine" / "checkpoints" / "step-00000000"
    require_same(gpt2, checkpoint)


def test_the_tokenizer_that_is_given_comes_with_the_model(gpt2, tmp_path, tokenizer_folder):
    save_megatron(tmp_path / "theirs", gpt2, Theirs(1, 1))
    output = tmp_path / "mine"
    checkpoint = import_megatron(tmp_path / "theirs", output, str(tokenizer_folder))
    require_same(gpt2, checkpoint)
    assert load_run(str(output / "run.toml")).run.tokenizer.path == str(output / "tokenizer")
    expected = load_vocabulary(tokenizer_folder)
    assert load_vocabulary(output / "tokenizer") == expected
    assert load_tokenizer_copy(checkpoint, read_manifest(checkpoint)) == expected


THEIRS = {
    "old names": Theirs(2, body="transformer", attention="attention"),
    "names between": Theirs(2),
    "new norms": Theirs(2, norms=("input_norm", "post_attention_norm", "final_norm")),
    "virtual stages": Theirs(1, 2, virtual=2),
    "float16": Theirs(2, 2, dtype=torch.float16),
    "bfloat16": Theirs(2, 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", THEIRS)
def test_spellings_virtual_stages_and_half_precision_are_read(gpt2, tmp_path, name):
    save_megatron(tmp_path / "theirs", gpt2, THEIRS[name])
    checkpoint = import_megatron(tmp_path / "theirs" / "iter_0001000", tmp_path / "mine")
    require_same(gpt2, checkpoint, THEIRS[name].dtype)


def test_an_untied_output_layer_is_the_head(tmp_path):
    model = random_gpt2(tie_word_embeddings=False)
    save_megatron(tmp_path / "theirs", model, Theirs(2, 2))
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    require_same(model, checkpoint)
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    assert not run.model.tied_embeddings
    assert torch.equal(ours.head.weight[:V], model.lm_head.weight)


def test_files_from_before_archives_and_before_versions_are_read(gpt2, tmp_path):
    theirs = Theirs(2, version=None)
    save_megatron(tmp_path / "theirs", gpt2, theirs, _use_new_zipfile_serialization=False)
    (tmp_path / "theirs" / "iter_0001000").rename(tmp_path / "theirs" / "release")
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("release\n")
    require_same(gpt2, import_megatron(tmp_path / "theirs", tmp_path / "mine"))


def test_the_names_of_megatron_core_are_read(gpt2, tmp_path):
    theirs = Theirs(2, 2)
    save_megatron(tmp_path / "theirs", gpt2, theirs)
    for path in (tmp_path / "theirs").glob("*/*/*.pt"):
        state = torch.load(path, weights_only=False)
        state["model"] = core_names(state["model"])
        torch.save(state, path)
    require_same(gpt2, import_megatron(tmp_path / "theirs", tmp_path / "mine"))


@pytest.mark.parametrize("tied", [True, False])
def test_deepspeed_layers_are_read(tmp_path, tied):
    model = random_gpt2(tie_word_embeddings=tied)
    save_deepspeed(tmp_path / "theirs", model, Theirs(2, 2))
    require_same(model, import_megatron(tmp_path / "theirs", tmp_path / "mine"))


def test_deepspeed_without_stages_is_read(gpt2, tmp_path):
    for rank in range(2):
        theirs = Theirs(2)
        state = around_the_model(gpt2, theirs) | {"module": stage(gpt2, theirs, 0, L, rank)}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    require_same(gpt2, import_megatron(tmp_path, tmp_path / "mine"))


@pytest.fixture
def their_enums():
    """Classes that can be named in a pickle while it is written, and not while it is read."""
    module = types.ModuleType("megatron.model.enums")
    members = {"rotary": 1, "absolute": 2, "alibi": 3}
    module.PositionEmbeddingType = enum.Enum(
        "PositionEmbeddingType", members, module="megatron.model.enums"
    )
    names = ("megatron", "megatron.model", "megatron.model.enums")
    sys.modules.update(dict.fromkeys(names, module))
    yield module.PositionEmbeddingType
    for name in names:
        sys.modules.pop(name, None)


def test_their_classes_are_never_imported(gpt2, tmp_path, their_enums):
    for member in ("absolute", "alibi"):
        given = {"position_embedding_type": their_enums[member]}
        form = {"_use_new_zipfile_serialization": member == "absolute"}
        save_megatron(tmp_path / member, gpt2, Theirs(arguments=given), **form)
    for name in [name for name in sys.modules if name.startswith("megatron")]:
        del sys.modules[name]
    require_same(gpt2, import_megatron(tmp_path / "absolute", tmp_path / "mine"))
    with pytest.raises(CheckpointError, match=r"position_embedding_type: .*alibi|\(3\)"):
        import_megatron(tmp_path / "alibi", tmp_path / "other")


def test_the_command_and_the_run_it_makes(gpt2, tmp_path, caplog):
    save_megatron(tmp_path / "theirs", gpt2, Theirs())
    app = typer.Typer()
    app.command()(import_)
    options = [str(tmp_path / "theirs"), "--output", str(tmp_path / "mine"), "--from", "megatron"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "weights only, without optimizer state" in " ".join(result.output.split())
    run = load_run(str(tmp_path / "mine" / "run.toml")).run
    assert run.description == "Imported from iter_0001000 of theirs."
    assert (run.model.init_std, run.model.dropout) == (0.006, 0.0)
    assert not caplog.records
    again = CliRunner().invoke(app, options)
    assert isinstance(again.exception, ConfigError)
    assert "mine already exists" in str(again.exception)


@pytest.mark.parametrize(
    "given, rows, size",
    [
        ({"vocab_size": None}, 384, 384),
        ({"vocab_size": None, "tokenizer_type": "NullTokenizer"}, 384, 384),
        ({"vocab_size": 258, "tokenizer_type": "NullTokenizer"}, 384, 259),
        ({"vocab_size": 50}, 384, 384),
        ({"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer"}, 50304, 50257),
    ],
)
def test_padding_counts_as_tokens_only_where_nothing_says_it(
    gpt2, tmp_path, caplog, given, rows, size
):
    save_megatron(tmp_path / "theirs", gpt2, Theirs(rows=rows, arguments=given))
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    _, run, _ = build_model_from_checkpoint(checkpoint)
    assert run.model.vocabulary_size == size
    assert ("has no vocabulary size" in caplog.text) == (size == rows)


REFUSED_ARGUMENTS = {
    "normalization": ("RMSNorm", r"has an extra blocks\.0\.attention_norm\.bias"),
    "position_embedding_type": ("rope", r"has an extra positions\.weight"),
    "rotary_percent": (0.5, "rotary_percent: rotary positions"),
    "add_position_embedding": (False, "--no-position-embedding"),
    "swiglu": (True, r"mlp\.up\.weight in .* has shape \[128, 32\]; its arguments say \[256, 32\]"),
    "squared_relu": (True, "squared_relu: .*got True"),
    "add_bias_linear": (False, r"has an extra blocks\.0\.attention\.out\.bias"),
    "add_qkv_bias": (True, "add_qkv_bias: .*got True"),
    "group_query_attention": (True, "group_query_attention without num_query_groups"),
    "qk_layernorm": (True, "--qk-layernorm with --normalization LayerNorm has biases"),
    "num_key_value_heads": (2, "num_key_value_heads=2 are not 4"),
    "num_experts": (8, "bias=true is not for experts"),
    "kv_channels": (16, r"qkv\.weight in .* has shape \[96, 32\]; its arguments say \[192, 32\]"),
    "bias_gelu_fusion": (False, "its GELU is exact"),
    "num_layers": (10**9, r"holds 4 layers; args\.num_layers is 1000000000"),
    "hidden_size": (64, r"embedding\.weight in .* has shape \[384, 32\]; its arguments say"),
    "num_attention_heads": (5, r"qkv\.weight in .* has shape \[96, 32\]; its arguments say"),
    "ffn_hidden_size": (10**12, r"mlp.up.weight in .* has shape \[128, 32\]; its arguments say"),
    "max_position_embeddings": (10**12, "positions.weight in .* has shape"),
    "untie_embeddings_and_output_weights": (True, r"no tensor for head\.weight"),
    "layernorm_epsilon": (-1.0, "layer_norm_epsilon: .*greater than 0"),
}


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_what_our_model_does_not_compute_is_refused(gpt2, tmp_path, name):
    value, message = REFUSED_ARGUMENTS[name]
    save_megatron(tmp_path / "theirs", gpt2, Theirs(arguments={name: value}))
    with pytest.raises(CheckpointError, match=message):
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def change(path: Path, **changes: Any) -> None:
    state = torch.load(path, weights_only=False)
    for name, value in changes.items():
        if value is None:
            del state[name]
        else:
            state[name] = value
    torch.save(state, path)


def test_folders_that_are_not_whole_are_refused(gpt2, tmp_path):
    save_megatron(tmp_path / "theirs", gpt2, Theirs(2, 2))
    inner = tmp_path / "theirs" / "iter_0001000"

    def refusal(folder: Path = tmp_path / "theirs") -> str:
        with pytest.raises(CheckpointError) as raised:
            import_megatron(folder, tmp_path / "mine")
        assert not (tmp_path / "mine").exists()
        return str(raised.value)

    file = inner / "mp_rank_01_001" / "model_optim_rng.pt"
    original = file.read_bytes()
    change(file, iteration=999)
    assert "files are from different iterations" in refusal()
    head = torch.load(inner / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)["model"]
    head["word_embeddings_for_head"]["weight"] += 1
    file.write_bytes(original)
    change(inner / "mp_rank_00_001" / "model_optim_rng.pt", model=head)
    assert "is not the embedding in" in refusal()
    file.write_bytes(original[: len(original) // 2])
    assert "model_optim_rng.pt cannot be read: it is malformed: BadZipFile" in refusal()
    file.unlink()
    assert "model_optim_rng.pt is missing" in refusal()
    os.mkfifo(file)
    assert "model_optim_rng.pt is missing or not a regular file" in refusal()
    file.unlink()
    file.parent.rmdir()
    assert "no file of tensor rank 1, pipeline stage or layer 1, but of 3 others" in refusal()
    for rank in (0, 1):
        (inner / f"mp_rank_{rank:02d}_000").rename(tmp_path / f"kept{rank}")
    (inner / "mp_rank_00_001").rename(inner / "mp_rank_00_002")
    assert "lacks some of its" in refusal()
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("../../etc")
    assert "reads '../../etc', which is neither an iteration nor a folder" in refusal()
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
    assert "no folder" in refusal()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has neither mp_rank_00/model_optim_rng.pt nor" in refusal(empty)
    os.mkfifo(empty / "latest")
    assert "has neither mp_rank_00/model_optim_rng.pt nor" in refusal(empty)
    (empty / "mp_rank_00_000_001").mkdir()
    assert "no file of tensor rank 0, pipeline stage or layer 0, expert rank 0" in refusal(empty)
    (empty / "mp_rank_00_000_001").rmdir()
    (empty / "metadata.json").touch()
    assert "is a torch_dist checkpoint" in refusal(empty)
    (empty / "metadata.json").unlink()
    (empty / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert "with ZeRO stage 3, which cannot be imported" in refusal(empty)


def test_missing_arguments_unknown_versions_and_tensors_are_named(gpt2, tmp_path):
    save_megatron(tmp_path / "theirs", gpt2, Theirs())
    file = tmp_path / "theirs" / "iter_0001000" / "mp_rank_00" / "model_optim_rng.pt"
    original = file.read_bytes()
    state = torch.load(file, weights_only=False)["model"]
    body = state["language_model"]["encoder"]
    second = {"layers.0.attention.dense.bias": body["layers.0.self_attention.dense.bias"]}
    fewer = dict(body)
    del fewer["layers.2.mlp.dense_4h_to_h.bias"]

    def model(encoder: dict[str, Any]) -> dict[str, Any]:
        return {"language_model": state["language_model"] | {"encoder": encoder}}

    for changes, problem in (
        ({"checkpoint_version": 4.0}, r"has checkpoint_version 4.0; known are 0, 1, 2, 3"),
        ({"args": None}, "rng.pt is not a GPT that can be imported: --num-layers is not given"),
        (
            {"model": model(body | {"layers.0.mlp.gate.weight": torch.ones(2)})},
            r"layers\.0\.mlp\.gate\.weight', which our GPT lacks",
        ),
        ({"model": model(body | second)}, r"a second one for blocks\.0\.attention\.out\.bias"),
        ({"model": model(fewer)}, r"has no tensor for blocks\.2\.mlp\.down\.bias"),
    ):
        file.write_bytes(original)
        change(file, **changes)
        with pytest.raises(CheckpointError, match=problem):
            import_megatron(tmp_path / "theirs", tmp_path / "mine")


def test_tensors_may_lie_anyhow_in_their_storage(gpt2, tmp_path):
    """Views of one buffer, transposed ones, and parameters are what training programs save."""
    save_megatron(tmp_path / "theirs", gpt2, Theirs())
    file = tmp_path / "theirs" / "iter_0001000" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)["model"]
    body = state["language_model"]["encoder"]
    buffer = torch.cat([value.flatten() for value in body.values()])
    start = 0
    for name, value in body.items():
        body[name] = buffer[start : start + value.numel()].view(value.shape)
        start += value.numel()
    dense = body["layers.1.mlp.dense_4h_to_h.weight"]
    body["layers.1.mlp.dense_4h_to_h.weight"] = dense.t().contiguous().t()
    body["final_layernorm.bias"] = torch.nn.Parameter(body["final_layernorm.bias"])
    change(file, model=state)
    require_same(gpt2, import_megatron(tmp_path / "theirs", tmp_path / "mine"))
