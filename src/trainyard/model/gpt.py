"""The decoder on a single device; names follow the GPT-3 paper (arXiv:2005.14165).

GPT-3 has learned positions, LayerNorm before each sub-layer, GELU (tanh approximation, as in
GPT-2), biases, and one matrix for embedding and head. Fields of a run choose other parts.
Parallelism is applied from outside; nothing here knows ranks. Each parameter has a random generator
of its own, so that initial weights are the same in every layout.

Shapes: B micro batch, T sequence, D d_model, H heads, S heads of keys and values, K d_head, F d_ff,
V padded vocabulary, L n_layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.architecture import (
    MOST_DRAWN_BYTES,
    Blocks,
    LayerSpec,
    ParameterSpec,
    block_layers,
    model_of_block,
    parameters_of,
    stage_layers,
)
from trainyard.config.run import Model, Recompute
from trainyard.model.attention import Attention, KeyValueCache, recomputes
from trainyard.model.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, Dropout
from trainyard.model.experts import ExpertMLP
from trainyard.model.linear import (
    Embedding,
    Layer,
    Linear,
    MatmulFunction,
    Norm,
    PlainProduct,
)
from trainyard.model.loss import CrossEntropy, WholeVocabulary, score_sequences
from trainyard.model.positions import Positions, PositionTable, find_document_ends

Store = Callable[[nn.Parameter, ParameterSpec, Tensor], None]
"""Called with a parameter or a shard of it, its description, and the value of the whole."""


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
        blocks: this stage's blocks, by their number in the whole model.
        cross_entropy: the loss; None in stages before the last.
        position_table: what each token of a sequence needs to know of its position.
        end_id: last token of a document, if attention is within documents.
        share: multiplies the output of the final norm, and so logits.
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
        self.sequence_length = model.sequence_length
        self.position_table = PositionTable(model, compute_dtype)
        # Random tokens of benchmarks have no end of document: -1 matches no token.
        end_id = -1 if model.end_of_document_id is None else model.end_of_document_id
        self.end_id = end_id if model.attention_within_documents else None
        self.embedding = _embedding(self.layers.get("embedding"))
        self.positions = _embedding(self.layers.get("positions"))
        self.dropout = Dropout(model.dropout, site=0)
        self.blocks = nn.ModuleDict(
            {str(n): Block(model_of_block(model, n), recompute) for n in range(*blocks)}
        )
        gives_loss = blocks[1] == model.n_layers
        self.final_norm = Norm(self.layers["final_norm"], model) if gives_loss else None
        self.share = self.layers["final_norm"].multipliers.output if gives_loss else 1.0
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
        if document_ends is None and self.end_id is not None:
            document_ends = find_document_ends(x, self.end_id)
        attention: Any = next(iter(self.blocks.values())).attention
        start = caches[0].n_tokens if caches else None
        positions = self.position_table.locate(
            x, attention.core, document_ends, document_lengths, start
        )
        if self.training and self.dropout.rate > 0:
            positions = positions._replace(dropout_seeds=dropout_seeds)
        if self.takes_tokens:
            x = self._embed(x, positions)
        for index, (number, block) in enumerate(self.blocks.items()):
            x = block(x, positions.in_block(int(number)), caches[index] if caches else None)
        return x if self.final_norm is None else self._end(x)

    def _end(self, x: Tensor) -> Tensor:
        """Returns what the head multiplies."""
        assert self.final_norm is not None, "this stage gives no hidden states for the head"
        hidden: Tensor = self.final_norm(x)
        return hidden if self.share == 1 else hidden * self.share

    def _embed(self, tokens: Tensor, positions: Positions) -> Tensor:
        """Maps token ids, (B, T), to the residual stream, (B, T, D)."""
        assert self.embedding is not None, "this stage takes no tokens"
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(positions.rows)
        x = x.to(self.compute_dtype)
        x = self.dropout(x, positions.dropout_seeds, positions.tokens)
        return x

    def decode(
        self, tokens: Tensor, starts: Tensor, place: Tensor, caches: list[KeyValueCache]
    ) -> Tensor:
        """Computes the final hidden state of one more token of each text, (B, D), on a GPU.

        No tensor's shape depends on the position, so a CUDA graph can repeat this.

        Args:
            tokens: ids, (B,).
            starts: where the document of each began, (B,).
            place: of the tokens in the texts, (1,), the `place` of all caches.
            caches: one per block, which saw the tokens before in `forward`.
        """
        positions = self.position_table.locate_next(place, starts, caches[0].most_tokens)
        x = self._embed(tokens[:, None], positions)
        for block, cache in zip(self.blocks.values(), caches, strict=True):
            x = block(x, positions, cache)
        return self._end(x)[:, 0]

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
        """Scores each sequence by `score_sequences` of `model/loss.py`, which names both columns.

        Args:
            hidden: from `forward`, (B, T, D).
            labels: next token ids, (B, T), int64; -100 for no label.
        """
        assert self.cross_entropy is not None, "this stage gives no loss"
        shard = self.cross_entropy.shard or WholeVocabulary()
        hidden, weight = shard.spread(hidden), self.head_weight
        return score_sequences(hidden, weight, labels, self.vocabulary_size, shard)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the real vocabulary: (..., D) -> (..., vocabulary_size), fp32."""
        weight = self.head_weight[: self.vocabulary_size].to(hidden.dtype)
        return self.head_product(hidden, weight).float()

    def layers_with_shared_casts(self) -> list[Layer]:
        """Lists the layers whose casts the micro batches of a step share.

        Recomputed blocks keep none. On a CPU the embedding and the head are left out, so that their
        gradients are summed in the order of one micro batch after another.
        """
        recomputed = [each for each in self.blocks.values() if each.recompute == "block"]
        without = {layer for block in recomputed for layer in block.modules()}
        return [layer for layer in self.layers_that_add() if layer not in without]

    def layers_that_add(self) -> list[Layer]:
        """Lists the layers whose backward passes may add to a gradient themselves."""
        ends = [end for end in (self.embedding, self.head) if end and not end.weight.is_cpu]
        parts = [*self.blocks.values(), *ends]
        return [m for part in parts for m in part.modules() if isinstance(m, Layer)]

    def build_caches(self, n_tokens: int) -> list[KeyValueCache]:
        """Makes empty KV caches, one per block, for `n_tokens` or as many as a sequence has."""
        return [KeyValueCache(min(n_tokens, self.sequence_length)) for _ in self.blocks]


def _embedding(spec: LayerSpec | None) -> Embedding | None:
    return None if spec is None else Embedding(spec)


class Block(nn.Module):
    """Attention, then MLP or experts, each on the residual stream and added back to it.

    The norm of each is before it or, if `model.norm_place` is "after", between it and the sum.

    Attributes:
        share: multiplies what each adds.
    """

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.recompute, self.norm_place = recompute, model.norm_place
        layers = block_layers(model)
        last = "attention_norm" if model.norm_place == "after" else "attention.out"
        self.share = layers[last].multipliers.output
        self.attention_norm = Norm(layers["attention_norm"], model)
        self.attention = Attention(model, recompute)
        self.attention_dropout = Dropout(model.dropout, ATTENTION_OUTPUT)
        self.mlp_norm = Norm(layers["mlp_norm"], model)
        self.mlp = _build_mlp(model)
        self.mlp_dropout = Dropout(model.dropout, MLP_OUTPUT)

    @recomputes("block")
    def forward(
        self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Maps the residual stream, (B, T, D), to the next.

        Args:
            x: the residual stream.
            positions: of its tokens, with the dropout seeds of this block.
            cache: keys and values of the tokens before, when generating.
        """
        x = self.attend(x, positions, cache)
        if self.norm_place == "before":
            inner = self.mlp(self.mlp_norm(x))
        else:
            inner = self.mlp_norm(self.mlp(x))
        inner = self.mlp_dropout(inner, positions.dropout_seeds, positions.tokens)
        return torch.add(x, inner, alpha=self.share)

    def attend(self, x: Tensor, positions: Positions, cache: KeyValueCache | None) -> Tensor:
        """Adds attention to the residual stream."""
        if self.norm_place == "before":
            attended = self.attention(self.attention_norm(x), positions, cache)
        else:
            attended = self.attention_norm(self.attention(x, positions, cache))
        seeds, tokens = positions.dropout_seeds, positions.tokens
        attended = self.attention_dropout(attended, seeds, tokens)
        return torch.add(x, attended, alpha=self.share)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, or SwiGLU.

    For SwiGLU `up` holds both input matrices, its rows ordered (F, 2): gate and value of a feature.
    """

    def __init__(self, model: Model, name: str = "mlp") -> None:
        super().__init__()
        layers = block_layers(model)
        self.up = Linear(layers[f"{name}.up"])
        self.down = Linear(layers[f"{name}.down"])
        self.kind = model.mlp
        assert self.kind in ("gelu", "swiglu"), f"model.mlp={self.kind!r} has no computation"

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D) through (B, T, F)."""
        inner = self.up(x)
        inner = activate(*self.up.split(inner)) if self.kind == "swiglu" else activate(inner)
        out: Tensor = self.down(inner)
        return out


def activate(x: Tensor, value: Tensor | None = None) -> Tensor:
    """Computes GELU, or SwiGLU of a gate and a value."""
    return F.gelu(x, approximate="tanh") if value is None else F.silu(x) * value


def _build_mlp(model: Model) -> nn.Module:
    if not model.n_experts:
        return MLP(model)
    shared = MLP(model, "mlp.shared") if model.n_shared_experts else None
    return ExpertMLP(model, activate, shared)


def store_whole(parameter: nn.Parameter, _spec: ParameterSpec, value: Tensor) -> None:
    """Stores a value in a parameter that is not sharded."""
    parameter.copy_(value)


def initialize(model: GPT, seed: int, store: Store = store_whole) -> None:
    """Initializes every parameter like GPT-2 and Megatron-LM.

    Weights and embeddings are normal with `init_std`, residual outputs with init_std / sqrt(2 L);
    biases are zero, norms one; `model.parametrization` may scale them.

    Args:
        model: the model or a part of it.
        seed: the same seed gives the same weights in every layout.
        store: puts a value, or this rank's part of it, into its parameter.
    """
    specs = {n: each for n, each in parameters_of(model.layers).items() if each.is_trained}

    @torch.no_grad()
    def fill(name: str) -> None:
        store(model.get_parameter(name), specs[name], initial_value(name, specs[name], seed))

    # One core draws 85 million numbers a second: over a minute for a model of 7 billion.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for names in _batches((name, math.prod(specs[name].shape)) for name in specs):
            list(pool.map(fill, names))


def _batches(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Groups names in order, each group of `MOST_DRAWN_BYTES` of fp32 or of one name."""
    batch: list[str] = []
    n_bytes = 0
    for name, size in sizes:
        if batch and n_bytes + 4 * size > MOST_DRAWN_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(name)
        n_bytes += 4 * size
    yield batch


def initial_value(name: str, spec: ParameterSpec, seed: int) -> Tensor:
    """Draws one whole parameter, fp32 on the CPU, from (seed, name) only."""
    if not spec.std:
        return torch.full(spec.shape, spec.mean)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # torch draws in groups of sixteen, and a remainder differently: whole groups, so that padding
    # rows, whose number depends on the tensor ranks, do not change the rows before them.
    n_elements = math.prod(spec.shape)
    drawn = torch.empty(math.ceil(n_elements / 16) * 16)
    drawn.normal_(spec.mean, spec.std, generator=generator)
    return drawn[:n_elements].view(spec.shape)
