"""The decoder on a single device; names follow the GPT-3 paper (arXiv:2005.14165).

GPT-3 has learned positions, LayerNorm before each sub-layer, GELU (tanh approximation, as in
GPT-2), biases, and one matrix for embedding and head. Fields of a run choose other parts.
Parallelism is applied from outside; nothing here knows ranks.

Shapes: B micro batch, T sequence, D d_model, H heads, S heads of keys and values, K d_head, F d_ff,
V padded vocabulary, L n_layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainyard.architecture import Blocks, LayerSpec, block_layers, stage_layers
from trainyard.config.run import Model, Recompute
from trainyard.model.attention import Attention, KeyValueCache, attention_kernel, rotary_table
from trainyard.model.documents import document_mask, document_starts, find_document_ends
from trainyard.model.dropout import (
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    SITES_PER_BLOCK,
    Dropout,
    at_site,
)
from trainyard.model.linear import (
    Embedding,
    Linear,
    MatmulFunction,
    Norm,
    PlainProduct,
    apply,
    as_output,
    cached_blocks,
    split_pairs,
)
from trainyard.model.loss import CrossEntropy


class GPT(nn.Module):
    """Token embedding, a stack of blocks and final norm, or a stage of them.

    Weights are uninitialized: `initialize` or a checkpoint fills them.

    Args:
        model: the shape of the whole.
        padded_vocabulary_size: rows of the embedding, V.
        compute_dtype: precision of activations and matmuls; parameters are always fp32.
        recompute: what the backward pass recomputes instead of storing.
        blocks: those of the pipeline stage to build, the first and one past the last; absent: all.
            Parameters have the names of the whole.

    Attributes:
        layers: its layers by name, as `architecture.py` describes them.
        embedding: (V, D); also the tied head, if the stage ends with one.
        blocks: by number in the whole model.
        cross_entropy: of a stage with the loss.
        end_id: last token of a document, if attention is within documents.
        token_positions: of the tokens in a sequence, int64, on the CPU until a pass needs them.
        residual_positions: of the tokens in the residual stream, on the device after a pass.
        rotation: of the tokens, from `rotary_table`, or of all positions if attention is within
            documents; on the device after a pass.
    """

    def __init__(
        self,
        model: Model,
        padded_vocabulary_size: int,
        compute_dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__()
        blocks = blocks or (0, model.n_layers)
        self.layers = stage_layers(model, padded_vocabulary_size, blocks)
        self.compute_dtype = compute_dtype
        self.vocabulary_size = model.vocabulary_size
        self.d_model = model.d_model
        self.takes_tokens = blocks[0] == 0
        # None of random tokens, as benchmarks read, ends a document.
        end_id = -1 if model.end_of_document_id is None else model.end_of_document_id
        self.end_id = end_id if model.attention_within_documents else None
        self.sequence_length = model.sequence_length
        # No buffers: a model built on "meta" gets uninitialized memory for its buffers.
        self.token_positions = torch.arange(model.sequence_length, device="cpu")
        self.residual_positions = self.token_positions
        self.rotation = rotary_table(model)
        self.embedding = _embedding(self.layers.get("embedding"))
        self.positions = _embedding(self.layers.get("positions"))
        self.dropout = Dropout(model.dropout, site=0)
        self.blocks = nn.ModuleDict(
            {str(number): Block(model, recompute) for number in range(*blocks)}
        )
        gives_loss = blocks[1] == model.n_layers
        self.final_norm = Norm(self.layers["final_norm"], model) if gives_loss else None
        self.head = _embedding(self.layers.get("head"))
        self.cross_entropy: CrossEntropy | None = CrossEntropy() if gives_loss else None
        if gives_loss:
            self.output_layer.is_cast = True
        self.head_product: MatmulFunction = PlainProduct()

    @property
    def output_layer(self) -> Embedding:
        """The layer of the output matrix."""
        layer = self.embedding if self.head is None else self.head
        assert layer is not None, "this stage has no head"
        return layer

    @property
    def head_weight(self) -> Tensor:
        """The output matrix, (V, D)."""
        return self.output_layer.weight

    def forward(
        self,
        x: Tensor,
        dropout_seeds: Tensor | None = None,
        document_ends: Tensor | None = None,
        document_lengths: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """Computes the hidden states after this stage, (B, T, D).

        Args:
            x: token ids below the vocabulary size, (B, T), int64; or the hidden states before this
                stage, if it does not take tokens.
            dropout_seeds: one for each sequence, (B,), int64, from `sequence_seeds`; no dropout
                without them or in evaluation mode.
            document_ends: of whole sequences, from `find_document_ends`, if attention is within
                documents; absent: those of `x`, which then has whole sequences.
            document_lengths: those of `pack_lengths` for flash attention, as (B, longest, P);
                absent: computed from the ends, with empty documents among them.
            caches: one per block when generating; `x` then continues what they hold.
        """
        if not self.training or self.dropout.rate == 0:
            dropout_seeds = None
        start = caches[0].n_tokens if caches else 0
        if self.end_id is not None and document_ends is None:
            document_ends = find_document_ends(x, self.end_id)
        x = self.embedding(x) if self.takes_tokens and self.embedding is not None else x
        # Kept there: each copy from ordinary memory would go through a buffer of the driver.
        self.residual_positions = self.residual_positions.to(x.device, non_blocking=True)
        positions = self.residual_positions[start : start + x.shape[1]]
        rotation = self._rotation_of(start, x, document_ends)
        if document_lengths is None:
            documents = self._describe(start, x, document_ends, is_cached=caches is not None)
        else:
            documents = document_lengths[:, 0].flatten().expand(document_lengths.shape[1], -1)
            if "torch._dynamo" in sys.modules:  # compiled blocks serve all sizes
                torch._dynamo.maybe_mark_dynamic(documents, [0, 1])
        if self.positions is not None:
            x = x + self.positions(_in_documents(positions, document_ends))  # (B, T, D)
        if self.takes_tokens:
            x = self.dropout(x.to(self.compute_dtype), dropout_seeds, positions)
        for index, (number, block) in enumerate(self.blocks.items()):
            # Seeds that include the site keep blocks alike, so that one compiled block serves all.
            block_seeds = (
                None
                if dropout_seeds is None
                else at_site(dropout_seeds, SITES_PER_BLOCK * int(number))
            )
            cache = caches[index] if caches else None
            x = block(x, block_seeds, positions, rotation, documents, cache)
        return x if self.final_norm is None else self.final_norm(x)

    def _rotation_of(self, start: int, x: Tensor, ends: Tensor | None) -> Tensor | None:
        """Returns the rotation of the tokens of `x`, or of all that tensor ranks have of them."""
        if self.rotation is None:
            return None
        precise = torch.promote_types(self.compute_dtype, torch.float32)
        self.rotation = self.rotation.to(x.device, precise, non_blocking=True)
        n_tokens = x.shape[1] * len(self.token_positions) // len(self.residual_positions)
        if ends is None:
            return self.rotation[:, start : start + n_tokens]
        self.token_positions = self.token_positions.to(x.device, non_blocking=True)
        positions = self.token_positions[start : start + n_tokens]
        return self.rotation[:, _in_documents(positions, ends)]  # (2, B, T, 1, K)

    def _describe(
        self, start: int, x: Tensor, ends: Tensor | None, *, is_cached: bool
    ) -> Tensor | None:
        """Describes the documents for attention of the tokens of `x` from `start` on."""
        if ends is None:
            return None
        if is_cached:
            keys = torch.arange(start + x.shape[1], device=x.device)
            return document_mask(ends, keys[start:], keys, self.compute_dtype)
        attention: Any = next(iter(self.blocks.values())).attention
        kernel = attention_kernel(attention.d_head, self.compute_dtype, x.device)
        n_tokens = x.shape[1] * self.sequence_length // len(self.residual_positions)
        documents: Tensor = attention.core.describe(ends, n_tokens, self.compute_dtype, kernel)
        return documents

    def decode(
        self, tokens: Tensor, starts: Tensor, place: Tensor, caches: list[KeyValueCache]
    ) -> Tensor:
        """Computes the final hidden state of one more token of each text, (B, D), on a GPU.

        No shape depends on its place, and the host need not know it: a CUDA graph can repeat this.

        Args:
            tokens: ids, (B,).
            starts: where the document of each began, (B,).
            place: of the tokens in the texts, (1,), the `place` of all caches.
            caches: one per block, which saw the tokens before in `forward`.
        """
        assert self.embedding is not None and self.final_norm is not None, "this is a stage"
        keys = torch.arange(caches[0].most_tokens, device=place.device)
        seen = (keys >= starts[:, None]) & (keys <= place)
        positions = (place - starts)[:, None]  # (B, 1)
        rotation = None if self.rotation is None else self.rotation[:, positions]
        x = self.embedding(tokens[:, None])
        if self.positions is not None:
            x = x + self.positions(positions)
        x = x.to(self.compute_dtype)
        for block, kept in zip(self.blocks.values(), caches, strict=True):
            x = block(x, None, place, rotation, seen[:, None, None], kept)
        hidden: Tensor = self.final_norm(x)
        return hidden[:, 0]

    def summed_loss(self, hidden: Tensor, labels: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Sums the cross entropy of every labelled token, by `summed_cross_entropy`.

        Args:
            hidden: from `forward`, (B, T, D).
            labels: next token ids, (B, T), int64; -100 for no label.
            scale: multiplies the sum.
        """
        assert self.cross_entropy is not None, "this stage gives no loss"
        loss: Tensor = self.cross_entropy(
            hidden, self.output_layer, labels, self.vocabulary_size, scale
        )
        return loss

    def score_sequences(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Scores the labels of each sequence, (B, 2), by `score_sequences` of `model/loss.py`.

        Args:
            hidden: from `forward`, (B, T, D).
            labels: next token ids, (B, T), int64; -100 for no label.
        """
        assert self.cross_entropy is not None, "this stage gives no loss"
        return self.cross_entropy.score(hidden, self.head_weight, labels, self.vocabulary_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the real vocabulary: (..., D) -> (..., vocabulary_size), fp32."""
        weight = self.head_weight[: self.vocabulary_size].to(hidden.dtype)
        return self.head_product(hidden, weight).float()

    def build_caches(self, n_tokens: int) -> list[KeyValueCache]:
        """Makes empty KV caches for `n_tokens`, one per block."""
        return [KeyValueCache(n_tokens) for _ in self.blocks]


def _in_documents(positions: Tensor, ends: Tensor | None) -> Tensor:
    """Counts positions, (T,), from the start of the sequence, or of each document, (B, T)."""
    return positions if ends is None else positions - document_starts(ends, positions)


def _embedding(spec: LayerSpec | None) -> Embedding | None:
    return None if spec is None else Embedding(spec)


class Block(nn.Module):
    """Attention, then MLP, each on the residual stream and added back to it.

    The norm of each is before it or, if `model.norm_place` is "after", between it and the sum.
    """

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.recompute, self.norm_place = recompute, model.norm_place
        layers = block_layers(model)
        self.attention_norm = Norm(layers["attention_norm"], model)
        self.attention = Attention(model)
        self.attention_dropout = Dropout(model.dropout, ATTENTION_OUTPUT)
        self.mlp_norm = Norm(layers["mlp_norm"], model)
        self.mlp = MLP(model)
        self.mlp_dropout = Dropout(model.dropout, MLP_OUTPUT)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the block in place; see `nn.Module.compile`."""
        if self.recompute != "none":
            _recompute_functions()
        super().compile(*args, **kwargs)

    def forward(
        self,
        x: Tensor,
        dropout_seeds: Tensor | None,
        positions: Tensor,
        rotation: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Maps the residual stream, (B, T, D), to the next.

        Args:
            x: the residual stream.
            dropout_seeds: of this block, (B,); None for no dropout.
            positions: of the tokens of `x`, (T,).
            rotation: for attention.
            documents: for attention.
            cache: keys and values of the tokens before, when generating.
        """
        if self.recompute == "block" and self.training:
            arguments = x, dropout_seeds, positions, rotation, documents
            return _recompute(self._add_both, dropout_seeds, *arguments)
        return self._add_both(x, dropout_seeds, positions, rotation, documents, cache)

    def _add_both(
        self,
        x: Tensor,
        dropout_seeds: Tensor | None,
        positions: Tensor,
        rotation: Tensor | None,
        documents: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        is_before = self.norm_place == "before"
        seen = self.attention_norm(x) if is_before else x
        if self.recompute == "attention" and self.training:
            arguments = seen, dropout_seeds, rotation, documents
            mixed = _recompute(self.attention, dropout_seeds, *arguments)
        else:
            mixed = self.attention(seen, dropout_seeds, rotation, documents, cache)
        mixed = mixed if is_before else self.attention_norm(mixed)
        x = x + self.attention_dropout(mixed, dropout_seeds, positions)
        changed = self.mlp(self.mlp_norm(x)) if is_before else self.mlp_norm(self.mlp(x))
        out: Tensor = x + self.mlp_dropout(changed, dropout_seeds, positions)
        return out


@cache
def _recompute_functions() -> None:
    """Makes torch 2.11 recompute what autograd functions compute; without it, their inputs stay."""
    from torch._functorch.autograd_function import autograd_function_apply
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    tag_nodes = getattr(TagActivationCheckpoint, "tag_nodes", None)
    if tag_nodes is None:  # later ones do
        return

    def tag_all(graph: Any, is_sac: bool) -> Any:
        tag_nodes(graph, is_sac)
        for call in graph.graph.find_nodes(op="call_function", target=autograd_function_apply):
            for node in getattr(graph, call.args[0].target).graph.nodes:
                node.meta |= {name: call.meta[name] for name in ("ac_graph_id", "recompute")}
        return graph

    TagActivationCheckpoint.tag_nodes = staticmethod(tag_all)  # type: ignore[attr-defined]


def _recompute(
    function: Callable[..., Tensor], dropout_seeds: Tensor | None, *arguments: Tensor | None
) -> Tensor:
    # Only attention dropout on a GPU draws from a generator.
    draws = dropout_seeds is not None and not dropout_seeds.is_cpu
    out: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=draws)
    return out


class MLP(nn.Module):
    """Two linear layers with a GELU or SwiGLU between them.

    The rows of `up` for SwiGLU are ordered (F, 2): gate and value of a feature.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        layers = block_layers(model)
        self.up = Linear(layers["mlp.up"])
        self.down = Linear(layers["mlp.down"])
        self.is_gated = model.mlp == "swiglu"

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D) through (B, T, F)."""
        inner = self.up(x)
        inner = apply(_SwiGLU, inner, self.up.gives_halves) if self.is_gated else _gelu(inner)
        out: Tensor = self.down(inner)
        return out


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) x value, (..., F), of outputs of `up`, (..., 2F); keeps nothing else."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, are_halves: bool) -> Tensor:
        ctx.save_for_backward(outputs)
        ctx.are_halves = are_halves
        gate, value = split_pairs(outputs, are_halves=are_halves)
        return as_output(F.silu(gate).mul_(value))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (outputs,) = ctx.saved_tensors
        of_outputs = torch.empty_like(outputs)
        for block, of_block, of_out in cached_blocks(outputs, of_outputs, gradient):
            gate, value = split_pairs(block, are_halves=ctx.are_halves)
            of_gate, of_value = split_pairs(of_block, are_halves=ctx.are_halves)
            of_value.copy_(F.silu(gate).mul_(of_out))
            of_gate.copy_(torch.ops.aten.silu_backward(of_out * value, gate))
        return of_outputs, None


def compile_blocks(model: GPT, *, in_order: bool = False) -> None:
    """Compiles each block in place, and the loss; keeps parameter names.

    Args:
        model: this rank's part.
        in_order: keep the order of operations. Otherwise Inductor may change it to save memory, and
            computes weight gradients last instead of beside what ranks exchange.
    """
    options = {"reorder_for_peak_memory": False} if in_order else None
    for block in model.blocks.values():
        block.compile(options=options)
    if model.cross_entropy is not None:
        model.cross_entropy.compiles = True
