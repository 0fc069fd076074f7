"""Models of Megatron-Core's own `GPTModel`, saved as Megatron-LM's `torch` format has them.

The other tests write Megatron's layouts themselves. `pip install --no-deps megatron-core` brings
this one; no set-up of this project does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.export.from_megatron import import_megatron

T, V = 32, 128
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA: tuple[dict[str, Any], dict[str, Any]] = (
    {"normalization": "RMSNorm", "num_query_groups": 2, "ffn_hidden_size": 48}
    | {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False},
    {"normalization": "RMSNorm", "num_query_groups": 2, "ffn_hidden_size": 48}
    | {"group_query_attention": True, "swiglu": True, "add_bias_linear": False}
    | {"position_embedding_type": "rope", "rotary_base": 500_000}
    | {"untie_embeddings_and_output_weights": True},
)
MIXTRAL = {"moe_ffn_hidden_size": 24, "moe_router_topk": 3, "moe_aux_loss_coeff": 0.01}
DEEPSEEK = {
    **{"moe_ffn_hidden_size": 24, "moe_router_topk": 4, "moe_layer_freq": [0, 1]},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 48},
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({"bias_activation_fusion": True}, {"bias_gelu_fusion": True}),
    "llama": LLAMA,
    "mixtral": (
        LLAMA[0] | MIXTRAL | {"num_moe_experts": 8},
        LLAMA[1] | MIXTRAL | {"num_experts": 8},
    ),
    "softmax of all": (
        LLAMA[0] | MIXTRAL | {"num_moe_experts": 8, "moe_router_pre_softmax": True},
        LLAMA[1] | MIXTRAL | {"num_experts": 8, "moe_router_pre_softmax": True},
    ),
    "deepseek": (
        LLAMA[0] | DEEPSEEK | {"num_moe_experts": 8},
        LLAMA[1] | DEEPSEEK | {"num_experts": 8},
    ),
}


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = pytest.importorskip("megatron.core.parallel_state", exc_type=ImportError)
    parallel = pytest.importorskip("megatron.core.tensor_parallel")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    no_tracker = SimpleNamespace(fork=nullcontext)  # of dropout on a GPU
    monkeypatch.setattr(parallel, "get_cuda_rng_tracker", lambda: no_tracker)
    router = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    monkeypatch.setattr(router, "te_general_gemm", None, raising=False)  # 0.16.1 asks for it
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    state.initialize_model_parallel()
    yield
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_megatron_core_computes_the_same(
    one_rank: None, tmp_path: Path, kind: str
) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    theirs, flags = KINDS[kind]
    config = TransformerConfig(**SHAPE, **theirs, use_cpu_initialization=True)
    norm = theirs.get("normalization")
    has_experts = "num_moe_experts" in theirs
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
        if has_experts
        else get_gpt_layer_local_spec(normalization=norm),
        vocab_size=V,
        max_sequence_length=T,
        position_embedding_type=flags.get("position_embedding_type", "learned_absolute"),
        rotary_base=flags.get("rotary_base", 10_000),
        share_embeddings_and_output_weights=kind == "gpt",
    ).eval()
    with torch.no_grad():
        biases = [each for name, each in model.named_buffers() if name.endswith("expert_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    args = argparse.Namespace(**SHAPE, **flags, max_position_embeddings=T, vocab_size=V)
    state = {"args": args, "iteration": 7, "checkpoint_version": 3.0}
    state["model"] = model.state_dict_for_save_checkpoint()
    path = tmp_path / "theirs" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
    ours, _, _ = build_model_from_checkpoint(import_megatron(tmp_path / "theirs", tmp_path / "me"))
    tokens = torch.randint(V, (2, T))
    masked = torch.ones(1, 1, T, T).triu(1).bool()
    with torch.no_grad():
        expected = model(tokens, torch.arange(T).expand(2, T), masked)
        found = ours.logits(ours(tokens))
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
