"""Checkpoints of Megatron-Core with experts, written from a model of ours by a layout of its own.

The imported model must have the same weights, bitwise, and the same logits.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.export.test_megatron_arguments import RECORDED
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size
from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.config.run import Model
from trainyard.errors import CheckpointError
from trainyard.export.from_megatron import import_megatron, read_arguments
from trainyard.export.torch_file import open_torch_file
from trainyard.model.gpt import GPT

V, T, D, L, F, E = 259, 48, 32, 4, 24, 8
SHAPE: dict[str, Any] = {
    **{"vocabulary_size": V, "sequence_length": T, "n_layers": L, "d_model": D, "n_heads": 4},
    **{"n_key_value_heads": 2, "d_ff": 48, "positions": "rotary", "norm": "rms", "mlp": "swiglu"},
    **{"bias": False, "tied_embeddings": False, "n_experts": E, "d_expert": F, "balance": "none"},
}
DEEPSEEK = {
    **{"router": "sigmoid", "balance": "bias", "balance_coefficient": 1e-3, "router_scale": 2.5},
    **{"n_shared_experts": 2, "n_dense_blocks": 1, "n_active_experts": 4},
    **{"n_expert_groups": 4, "n_active_groups": 2},
}


@dataclass
class Ours:
    model: Model
    gpt: GPT

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.gpt.state_dict(keep_vars=True).items()}


def random_ours(**changes: Any) -> Ours:
    model = Model(**SHAPE | changes)
    ours = Ours(model, GPT(model, padded_vocabulary_size(model)).eval())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in ours.weights.items():
            value.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            value[V:] = 0 if name in ("embedding.weight", "head.weight") else value[V:]
    return ours


def arguments(model: Model, tensor: int, pipeline: int, expert: int) -> dict[str, Any]:
    """Names what Megatron saves of such a model; of what it leaves out, the default."""
    return {
        **{"num_layers": L, "hidden_size": D, "num_attention_heads": 4, "ffn_hidden_size": 48},
        **{"group_query_attention": True, "num_query_groups": 2, "max_position_embeddings": T},
        **{"position_embedding_type": "rope", "normalization": "RMSNorm", "hidden_dropout": 0.0},
        **{"swiglu": model.mlp == "swiglu", "bias_gelu_fusion": True, "add_bias_linear": False},
        **{"vocab_size": V, "untie_embeddings_and_output_weights": not model.tied_embeddings},
        **{"tensor_model_parallel_size": tensor, "expert_tensor_parallel_size": tensor},
        **{"pipeline_model_parallel_size": pipeline, "expert_model_parallel_size": expert},
        **{"num_experts": E, "moe_ffn_hidden_size": F, "moe_router_topk": model.n_active_experts},
        "moe_layer_freq": [0] * model.n_dense_blocks + [1] * (L - model.n_dense_blocks),
        "moe_router_score_function": model.router,
        "moe_router_pre_softmax": not model.router_normalized,
        "moe_router_topk_scaling_factor": model.router_scale if model.router_scale != 1 else None,
        "moe_router_num_groups": model.n_expert_groups if model.n_expert_groups > 1 else None,
        "moe_router_group_topk": model.n_active_groups if model.n_expert_groups > 1 else None,
        "moe_shared_expert_intermediate_size": model.n_shared_experts * F or None,
        "moe_router_enable_expert_bias": model.balance == "bias",
        **{"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
        **{
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_z_loss_coeff": 0,
        },
    }


def rows(weight: Tensor, rank: int, n_ranks: int) -> Tensor:
    return weight.chunk(n_ranks)[rank]


def columns(weight: Tensor, rank: int, n_ranks: int) -> Tensor:
    return weight.chunk(n_ranks, 1)[rank]


def gates_upon_values(weight: Tensor, rank: int, n_ranks: int) -> Tensor:
    """Orders the alternating rows of our SwiGLU as theirs are."""
    return torch.cat([rows(weight[0::2], rank, n_ranks), rows(weight[1::2], rank, n_ranks)])


def block(ours: Ours, number: int, rank: int, n_ranks: int) -> dict[str, Tensor]:
    """Makes what all expert ranks have of a block."""
    weights, place = ours.weights, f"blocks.{number}"
    up_rows = gates_upon_values if ours.model.mlp == "swiglu" else rows
    found = {
        "input_layernorm.weight": weights[f"{place}.attention_norm.weight"],
        "pre_mlp_layernorm.weight": weights[f"{place}.mlp_norm.weight"],
        "self_attention.linear_qkv.weight": rows(
            weights[f"{place}.attention.qkv.weight"], rank, n_ranks
        ),
        "self_attention.linear_proj.weight": columns(
            weights[f"{place}.attention.out.weight"], rank, n_ranks
        ),
    }
    for ours_, theirs in {"mlp": "mlp", "mlp.shared": "mlp.shared_experts"}.items():
        if f"{place}.{ours_}.up.weight" in weights:
            up, down = (weights[f"{place}.{ours_}.{part}.weight"] for part in ("up", "down"))
            found[f"{theirs}.linear_fc1.weight"] = up_rows(up, rank, n_ranks)
            found[f"{theirs}.linear_fc2.weight"] = columns(down, rank, n_ranks)
    for ours_, theirs in {"weight": "weight", "balance": "expert_bias"}.items():
        if f"{place}.mlp.router.{ours_}" in weights:
            found[f"mlp.router.{theirs}"] = weights[f"{place}.mlp.router.{ours_}"]
            found["mlp.router.local_tokens_per_expert"] = torch.full((E,), 3.0)
    return found


def experts(
    ours: Ours, number: int, ranks: tuple[int, int], counts: tuple[int, int], spelling: str
) -> dict[str, Tensor]:
    """Makes the experts of a block on one of the tensor and expert ranks."""
    weights, (rank, expert_rank), (tensor, expert) = ours.weights, ranks, counts
    found: dict[str, Tensor] = {}
    if f"blocks.{number}.mlp.experts.up.weight" not in weights:
        return found
    local = E // expert
    ups, downs = [], []
    for index in range(local):
        up = weights[f"blocks.{number}.mlp.experts.up.weight"][expert_rank * local + index]
        parts = [rows(part, rank, tensor) for part in (up if up.dim() == 3 else [up])]
        down = weights[f"blocks.{number}.mlp.experts.down.weight"][expert_rank * local + index]
        ups.append(torch.cat(parts))
        downs.append(columns(down, rank, tensor))
        for name, value in (("linear_fc1", ups[-1]), ("linear_fc2", downs[-1])):
            if spelling == "sequential":
                found[f"mlp.experts.local_experts.{index}.{name}.weight"] = value
            elif spelling == "grouped":
                found[f"mlp.experts.{name}.weight{index}"] = value
                found[f"mlp.experts.{name}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    if spelling == "legacy":
        inputs_first = torch.stack([up.t() for up in ups])
        found["mlp.experts.weight1"] = inputs_first.reshape(D, -1)
        found["mlp.experts.weight2"] = torch.cat([down.t() for down in downs])
    return found


def save(
    folder: Path, ours: Ours, tensor: int = 1, pipeline: int = 1, expert: int = 1,
    spelling: str = "grouped", **changes: Any,
) -> None:  # fmt: skip
    weights = ours.weights
    args = argparse.Namespace(**arguments(ours.model, tensor, pipeline, expert) | changes)
    for rank in range(tensor):
        for place in range(pipeline):
            for expert_rank in range(expert):
                state: dict[str, Tensor] = {}
                first = place * L // pipeline
                for index, number in enumerate(range(first, (place + 1) * L // pipeline)):
                    of_block = block(ours, number, rank, tensor) | experts(
                        ours, number, (rank, expert_rank), (tensor, expert), spelling
                    )
                    for name, value in of_block.items():
                        state[f"decoder.layers.{index}.{name}"] = value
                n_rows = 128 * tensor * -(-V // (128 * tensor))
                for name, there in (
                    ("embedding.word_embeddings", 0),
                    ("output_layer", pipeline - 1),
                ):
                    weight = weights[f"{'head' if name == 'output_layer' else 'embedding'}.weight"]
                    padded = torch.full((n_rows, D), 9.0)
                    padded[:V] = weight[:V]
                    if there == place:
                        state[f"{name}.weight"] = rows(padded, rank, tensor)
                if place == pipeline - 1:
                    state["decoder.final_layernorm.weight"] = weights["final_norm.weight"]
                numbers = [f"{rank:02d}"] + [f"{place:03d}"] * (pipeline > 1)
                numbers += [f"{expert_rank:03d}"] * (expert > 1)
                path = folder / "iter_0000007" / f"mp_rank_{'_'.join(numbers)}"
                path.mkdir(parents=True)
                model = {name: value.clone() for name, value in state.items()}
                whole = {"args": args, "iteration": 7, "checkpoint_version": 3.0, "model": model}
                torch.save(whole, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "one rank, each expert a module": ({}, {"spelling": "sequential"}),
    "tp 2": ({"router_normalized": False}, {"tensor": 2}),
    "ep 2": ({"n_active_experts": 1}, {"expert": 2, "spelling": "sequential"}),
    "tp 2, ep 2": ({}, {"tensor": 2, "expert": 2}),
    "pp 2, ep 2": ({"mlp": "gelu"}, {"pipeline": 2, "expert": 2}),
    "DeepSeek": (DEEPSEEK, {}),
    "DeepSeek, ep 4": (DEEPSEEK, {"expert": 4}),
    "DeepSeek, tp 2, pp 2, ep 2": (
        DEEPSEEK,
        {"tensor": 2, "pipeline": 2, "expert": 2, "spelling": "sequential"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_model(tmp_path: Path, name: str) -> None:
    changes, layout = CASES[name]
    expected = random_ours(**changes)
    save(tmp_path / "theirs", expected, **layout)
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    check_checkpoint(checkpoint)
    gpt, run, _ = build_model_from_checkpoint(checkpoint)
    fields = Model.model_fields.keys() - {"init_std", "dropout", "router_z_loss"}
    for field in fields - {"vocabulary_multiple", "balance_coefficient"}:
        assert getattr(run.model, field) == getattr(expected.model, field), field
    weights, wanted = Ours(run.model, gpt).weights, expected.weights
    assert weights.keys() == wanted.keys()
    assert not [key for key, value in wanted.items() if not torch.equal(weights[key], value)]
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = gpt.logits(gpt(tokens))
        assert torch.equal(logits, expected.gpt.logits(expected.gpt(tokens)))
    assert logits[..., :V].std() > 0.1


LAYOUT = {"tensor": 2, "expert": 2}


def change(folder: Path, file: str, old: str, new: str) -> None:
    """Renames the tensor `old` of a file, or removes it."""
    path = folder / "iter_0000007" / file / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    value = state["model"].pop(f"decoder.layers.{old}")
    if new:
        state["model"][f"decoder.layers.{new}"] = value
    torch.save(state, path)


FC1 = "2.mlp.experts.linear_fc1.weight"
CHANGED: dict[str, tuple[str, str, str, str]] = {
    "an expert is missing": (
        "mp_rank_01_001", f"{FC1}3", "", "mp_rank_01_001.* hold different tensors",
    ),
    "a rank has one more": (
        "mp_rank_01_000", f"{FC1}3", f"{FC1}4", "weight0', a second one for blocks.2.*weight.4",
    ),
    "no such expert": (
        "mp_rank_00_001", f"{FC1}3", f"{FC1}9", "hold different tensors",
    ),
    "all in one tensor": (
        "mp_rank_00_000", f"{FC1}3", FC1, "hold different tensors",
    ),
    "a gate of the shared expert": (
        "mp_rank_00_001", f"{FC1}3", "2.mlp.shared_experts.gate_weight", "which our GPT lacks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_experts_that_do_not_fit_together_are_refused(tmp_path: Path, name: str) -> None:
    file, old, new, message = CHANGED[name]
    save(tmp_path / "theirs", random_ours(), **LAYOUT)
    change(tmp_path / "theirs", file, old, new)
    with pytest.raises(CheckpointError, match=message) as raised:
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert raised.value.hint
    assert not (tmp_path / "mine").exists()


def test_experts_of_older_kinds_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "theirs", random_ours(), spelling="legacy")
    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.weight1', which our GPT lacks"
    ) as raised:
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert "TEGroupedMLP" in raised.value.hint


def test_an_expert_that_every_tensor_rank_lacks_is_named(tmp_path: Path) -> None:
    save(tmp_path / "theirs", random_ours(), **LAYOUT)
    for rank in (0, 1):
        change(tmp_path / "theirs", f"mp_rank_0{rank}_001", f"{FC1}3", "")
    with pytest.raises(CheckpointError, match=r"no tensor for blocks\.2\.mlp\.experts\.up.*\.7"):
        import_megatron(tmp_path / "theirs", tmp_path / "mine")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer experts": ({}, {"num_experts": 4}, r"router\.weight in .* has shape \[8, 32\]"),
    "far more experts": ({}, {"num_experts": 10**12}, r"says? \[1000000000000, 32\]"),
    "other experts": ({}, {"moe_ffn_hidden_size": 16}, r"up\.weight\.0 in .* say \[32, 32\]"),
    "half a feature": ({"tensor": 2}, {"moe_ffn_hidden_size": 25}, "cannot split its heads and"),
    "no experts": ({}, {"num_experts": None}, "has an extra|no tensor for"),
    "biases": ({}, {"add_bias_linear": True}, "bias=true is not for experts"),
    "more ranks": (LAYOUT, {"expert_model_parallel_size": 4}, "2 expert ranks.*size is 4"),
    "no word of ranks": (
        {"expert": 2}, {"expert_model_parallel_size": None}, "mp_rank_00_001.* repeats embedding",
    ),
    "a word of ranks": (
        {"expert": 2}, {"expert_model_parallel_size": "x"}, "expert_model_parallel_size is 'x'",
    ),
    "experts are whole": (
        {"tensor": 2}, {"expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size=1 is not 2",
    ),
    "dense blocks between": ({}, {"moe_layer_freq": [0, 1, 0, 1]}, "only the first blocks can be"),
    "capacity": ({}, {"moe_expert_capacity_factor": 1.25}, "no token is dropped"),
    "capacity of a rank": ({}, {"moe_expert_rank_capacity_factor": 2.0}, "no such option"),
    "interleaved rows": ({}, {"moe_mlp_glu_interleave_size": 8}, "no such option"),
    "an option of tomorrow": ({}, {"moe_made_up": 8}, "args.moe_made_up: .*no such option"),
    "gate of the shared": ({}, {"moe_shared_expert_gate": True}, "a shared expert has no gate"),
    "another balance": (
        {}, {"moe_router_load_balancing_type": "sinkhorn"}, "supported: aux_loss, seq_aux_loss",
    ),
    "lists of DeepSpeed": ({}, {"num_experts": [4, 8]}, r"--num-experts needs a number.*\[4, 8\]"),
    "a bias that is a number": ({}, {"moe_router_enable_expert_bias": 3}, "it is on or off"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_ours_cannot_match_are_refused(tmp_path: Path, name: str) -> None:
    layout, changes, message = REFUSED[name]
    save(tmp_path / "theirs", random_ours(), **layout, **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert raised.value.hint
    assert not (tmp_path / "mine").exists()


def test_all_other_arguments_may_have_their_defaults(tmp_path: Path) -> None:
    ours = random_ours(**DEEPSEEK)
    own = arguments(ours.model, 1, 1, 1)
    defaults = {name: json.loads(found[-1]) for name, _, *found in RECORDED if found}
    assert len(defaults.keys() - own.keys()) > 500
    save(tmp_path / "theirs", ours, **defaults | own)
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    weights = build_model_from_checkpoint(checkpoint)[0].state_dict()
    assert torch.equal(
        weights["blocks.3.mlp.router.balance"], ours.weights["blocks.3.mlp.router.balance"]
    )


def test_a_list_of_many_blocks_is_read_whole(tmp_path: Path) -> None:
    given = arguments(random_ours().model, 1, 1, 1) | {"num_layers": 61}
    args = argparse.Namespace(**given | {"moe_layer_freq": [0] * 3 + [1] * 58})
    torch.save({"args": args}, tmp_path / "file.pt")
    fields, _ = read_arguments(open_torch_file(tmp_path / "file.pt").arguments, "file.pt")
    assert (fields["model.n_layers"], fields["model.n_dense_blocks"]) == (61, 3)


def test_a_missing_expert_rank_is_named(tmp_path: Path) -> None:
    save(tmp_path / "theirs", random_ours(), pipeline=2, expert=2)
    inner = tmp_path / "theirs" / "iter_0000007"
    (inner / "mp_rank_00_001_001").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"no file of .* layer 1, expert rank 1, but of 3"):
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    (inner / "mp_rank_00_000_001").rename(tmp_path / "kept too")
    with pytest.raises(CheckpointError, match=r"holds 2 layers; args\.num_layers is 4") as raised:
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert raised.value.hint == "copy the whole folder of one checkpoint"


def test_a_loss_beside_the_bias_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        save(tmp_path / "theirs", random_ours(**DEEPSEEK), moe_aux_loss_coeff=1e-4)
        checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert "moe_aux_loss_coeff is 0.0001; model.balance is the bias alone" in caplog.text
    assert build_model_from_checkpoint(checkpoint)[1].model.balance == "bias"
