"""Baseline: Megatron-Core's GPTModel, trained like Megatron-LM without Transformer Engine and Apex.

Its layers are those of `get_gpt_layer_local_spec`, whose attention keeps all scores (flash
attention needs Transformer Engine); `parallel.recompute` "attention" is its selective
recomputation, "block" its full one. bf16 weights, gradients in its fp32 buffers, fp32 master
weights in its optimizer; all fusions available without Apex are on. The loss includes vocabulary
padding, as in Megatron: 0.001 nats with 50,304 rows for 50,257 tokens.

Written for megatron-core 0.16.1. Its attention rows are interleaved by head, like ours, so weights
only change names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.config.run import Run
from trainyard.export.from_megatron import name_tables
from trainyard.model.gpt import GPT

NAMES = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "final_norm": "decoder.final_layernorm",
    "head.weight": "output_layer.weight",
    "blocks.": "decoder.layers.",
    **{ours: theirs for theirs, ours in name_tables()["block_of_core"].items()},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective"},
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


class MegatronBaseline:
    """Model, gradient buffers and optimizer of Megatron-Core, on one rank.

    Args:
        run: the run.
        device: for computation.
        ours: provides the weights.
    """

    def __init__(self, run: Run, device: torch.device, ours: GPT) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(run.train.seed)
        self._model = _build_model(run, device, ours)
        self._optimizer = _build_optimizer(run, self._model)
        self._finalize = finalize_model_grads
        T = run.model.sequence_length
        self._positions = torch.arange(T, device=device)[None]
        # True for masked tokens.
        self._mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=device).triu(1)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross entropy of a micro batch, to be differentiated."""
        positions = self._positions.expand_as(tokens)
        loss: Tensor = self._model(tokens, positions, self._mask, labels=labels).float().mean()
        return loss

    def update(self, rate: float) -> None:
        """Clips, updates with this learning rate, and forgets the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._finalize([self._model])
        self._optimizer.step()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()


def leave_group() -> None:
    """Destroys the process group, if there is one, in a process that goes on."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build_model(run: Run, device: torch.device, ours: GPT) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, is_low = run.model, run.precision.kind == "bf16"
    dtype = torch.bfloat16 if is_low else torch.float32
    config = TransformerConfig(
        num_layers=model.n_layers,
        hidden_size=model.d_model,
        num_attention_heads=model.n_heads,
        ffn_hidden_size=model.d_ff,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        layernorm_epsilon=model.layer_norm_epsilon,
        bf16=is_low,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=True,  # GELU in its tanh form, as ours
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=True,
        masked_softmax_fusion=False,  # Apex's
        gradient_accumulation_fusion=False,  # Apex's
        **RECOMPUTE[run.parallel.recompute],
    )
    theirs: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=ours.head_weight.shape[0],
        max_sequence_length=model.sequence_length,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="learned_absolute",
    )
    weights = {_their_name(name): weight.detach() for name, weight in ours.named_parameters()}
    own = dict(theirs.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    theirs = theirs.to(device)
    theirs = Float16Module(config, theirs) if is_low else theirs
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, buffers, theirs).train()


def _build_optimizer(run: Run, model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ours, is_low = run.optimizer, run.precision.kind == "bf16"
    config = OptimizerConfig(
        lr=ours.learning_rate,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.betas[0],
        adam_beta2=ours.betas[1],
        adam_eps=ours.epsilon,
        clip_grad=ours.clip_norm if math.isfinite(ours.clip_norm) else 0.0,
        bf16=is_low,
        params_dtype=torch.bfloat16 if is_low else torch.float32,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def _their_name(name: str) -> str:
    for mine, theirs in NAMES.items():
        name = name.replace(mine, theirs)
    return name
