"""Where tokens are: their positions and rotations, and the documents in a sequence.

    tokens       a  b  |  c  d  |  e     | is the end-of-document token
    ends         3  6  7  7              one past each, then the sequence's length
    starts       0  0  0  3  3  3  6     of each token's document
    positions    0  1  2  0  1  2  0

A token sees the tokens from the start of its document up to itself. So ends tell everything, on any
rank and without waiting for the device; they are few enough to travel with every micro batch.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.config.run import Model
from trainyard.model.dropout import SITES_PER_BLOCK, at_site


class Positions(NamedTuple):
    """Where the tokens of a micro batch are; every block of a pass takes them."""

    tokens: Tensor
    """Positions in the sequence of the tokens in the residual stream, (T,), int64."""
    rows: Tensor
    """The same for learned positions: from the start of each document, if any, (B, T)."""
    rotation: Tensor | None = None
    """Rotation of queries and keys, from `rotary_table`; None without rotary positions."""
    documents: Tensor | None = None
    """What attention takes: a mask or lengths; None to see all tokens before."""
    dropout_seeds: Tensor | None = None
    """Seeds of the sequences, (B,), for the model or a block; None for no dropout."""

    def in_block(self, number: int) -> Positions:
        """Advances the seeds to a block, so that blocks are alike and one compiled serves all."""
        seeds = self.dropout_seeds
        if seeds is None:
            return self
        return self._replace(dropout_seeds=at_site(seeds, SITES_PER_BLOCK * number))


class PositionTable:
    """Positions of this rank's tokens, the same in every sequence.

    Args:
        model: the shape of the whole.
        compute_dtype: precision of activations.

    Attributes:
        tokens: of the tokens that attention has, int64; on the CPU until a pass needs them.
        residual: of those in the residual stream, which tensor ranks may shard.
        rotation: of `tokens`, from `rotary_table`, or of all positions if attention is within
            documents; on the device after a pass.
    """

    def __init__(self, model: Model, compute_dtype: torch.dtype) -> None:
        # No buffers: a model built on "meta" gets uninitialized memory for its buffers.
        self.tokens = torch.arange(model.sequence_length, device="cpu")
        self.residual = self.tokens
        self.rotation = rotary_table(model)
        self._sequence_length, self._compute_dtype = model.sequence_length, compute_dtype

    def locate(
        self,
        x: Tensor,
        core: Any,
        ends: Tensor | None,
        lengths: Tensor | None,
        start: int | None,
    ) -> Positions:
        """Locates the tokens of a micro batch.

        Args:
            x: token ids, (B, T), or hidden states, (B, T, D).
            core: of attention; it decides in which form it takes the documents.
            ends: of the documents, from `find_document_ends`; None to see all tokens before.
            lengths: of `pack_lengths`, as (B, longest, P), for attention; absent: from the ends.
            start: where `x` continues what a cache holds; None without one.
        """
        # Kept there: each copy from ordinary memory would go through a buffer of the driver.
        self.residual = self.residual.to(x.device, non_blocking=True)
        n_all = len(self.tokens if x.ndim == 2 else self.residual)
        n_residual = x.shape[1] * len(self.residual) // n_all
        n_attended = x.shape[1] * len(self.tokens) // n_all
        n_whole = x.shape[1] * self._sequence_length // n_all
        first = start or 0
        tokens = self.residual[first : first + n_residual]
        documents = None
        if lengths is not None:
            documents = unpack_lengths(lengths)
        elif ends is not None and start is not None:
            keys = torch.arange(first + n_whole, device=x.device)
            documents = document_mask(ends, keys[first:], keys, self._compute_dtype)
        elif ends is not None:
            documents = core.describe(ends, n_whole, self._compute_dtype)
        if self.rotation is None:
            return Positions(tokens, _in_documents(tokens, ends), None, documents)
        precise = torch.promote_types(self._compute_dtype, torch.float32)
        self.rotation = self.rotation.to(x.device, precise, non_blocking=True)
        attended = slice(first, first + n_attended)
        if ends is None:
            return Positions(tokens, tokens, self.rotation[:, attended], documents)
        self.tokens = self.tokens.to(x.device, non_blocking=True)
        rows = _in_documents(self.tokens[attended], ends)
        return Positions(tokens, tokens, self.rotation[:, rows], documents)  # (2, B, T, 1, K)

    def locate_next(self, place: Tensor, starts: Tensor, n_keys: int) -> Positions:
        """Locates one token of each text, for `GPT.decode`, among as many keys as a cache takes."""
        keys = torch.arange(n_keys, device=place.device)
        seen = (keys >= starts[:, None]) & (keys <= place)
        rows = (place - starts)[:, None]  # (B, 1)
        rotation = None if self.rotation is None else self.rotation[:, rows]
        return Positions(place, rows, rotation, seen[:, None, None])


def _in_documents(positions: Tensor, ends: Tensor | None) -> Tensor:
    """Counts positions, (T,), from the start of the sequence, or of each document, (B, T)."""
    return positions if ends is None else positions - document_starts(ends, positions)


def rotary_table(model: Model) -> Tensor | None:
    """Returns cosines and sines of the angles by which rotary positions turn queries and keys.

    Features i and i + K/2 of a head are a pair, which position p turns by p / base^(2i/K), less if
    Llama 3's scaling lowers the frequency.

    Returns:
        (2, T, 1, K), each of the K/2 angles twice, fp64, on the CPU; None for learned positions.
    """
    if model.positions != "rotary":
        return None
    even = torch.arange(0, model.d_head, 2, dtype=torch.float64, device="cpu")
    frequencies = model.rotary_base ** (-even / model.d_head)
    scaling = model.rotary_scaling
    if scaling:
        turns = scaling.original_sequence_length * frequencies / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    positions = torch.arange(model.sequence_length, dtype=torch.float64, device="cpu")
    angles = (positions[:, None, None] * frequencies).repeat(1, 1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def find_document_ends(tokens: Tensor, end_id: int) -> Tensor:
    """Finds where the documents of whole sequences end.

    Args:
        tokens: ids, (B, T); those on a device are waited for.
        end_id: the last token of a document, which belongs to it.

    Returns:
        (B, M), int64, ascending: one past the end of each document, then T; M is a power of two, so
        that few sizes occur.
    """
    T = tokens.shape[1]
    is_end = tokens == end_id
    n_ended = is_end.cumsum(1)  # up to and with each token
    most = 1 << int(n_ended[:, -1].max()).bit_length()  # at least one more than end
    column = torch.where(is_end, n_ended - 1, most)  # tokens that end nothing: the last column
    past = torch.arange(1, T + 1, device=tokens.device).expand_as(tokens)
    ends = tokens.new_full((len(tokens), most + 1), T)
    return ends.scatter_(1, column, past)[:, :most]


def document_starts(ends: Tensor, positions: Tensor) -> Tensor:
    """Returns where the documents of the tokens at some positions start, (B, positions)."""
    of_tokens = positions.expand(len(ends), -1).contiguous()
    n_ended = torch.searchsorted(ends.contiguous(), of_tokens, right=True)
    return F.pad(ends, (1, 0)).gather(1, n_ended)


def document_mask(
    ends: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Builds what to add to attention scores: 0 where a query sees a key, else minus infinity.

    Args:
        ends: from `find_document_ends`, (B, M).
        queries: positions in the sequence, (Q,).
        keys: positions in the sequence, (N,).
        dtype: of the mask.

    Returns:
        (B, 1, Q, N): the same for all heads.
    """
    starts = document_starts(ends, queries)
    unseen = (keys < starts[..., None]) | (keys > queries[:, None])
    mask = torch.zeros(unseen.shape, dtype=dtype, device=ends.device)
    return mask.masked_fill_(unseen, -torch.inf)[:, None]


def cumulative_lengths(ends: Tensor) -> Tensor:
    """Returns the ends in a row of all sequences, after a 0: (B M + 1), int32; some are empty."""
    sequences = torch.arange(len(ends), device=ends.device)[:, None]
    return F.pad((ends + sequences * ends[:, -1:]).flatten(), (1, 0)).int()


def pack_lengths(ends: Tensor, micro_batch_size: int) -> tuple[Tensor, int]:
    """Computes the cumulative lengths of the documents of each micro batch, without empty ones.

    Both sizes are rounded up, so that few occur.

    Args:
        ends: of the sequences of whole micro batches, (N, M), on the CPU.
        micro_batch_size: sequences of each.

    Returns:
        (N, P), int32, whose rows of a micro batch are in a row what flash attention takes, with
        some empty documents at the end; and the longest document, a power of two or T.
    """
    n_sequences, T = len(ends), int(ends[0, -1])
    firsts = torch.arange(n_sequences) % micro_batch_size * T
    lengths = ends.diff(dim=1, prepend=ends.new_zeros(n_sequences, 1))
    is_real = (lengths > 0).view(-1, micro_batch_size * ends.shape[1])
    number = is_real.cumsum(1)  # from 1: the first place has a 0
    n_places = int(number[:, -1].max()) + 1
    for unit in (max(1, (1 << n_places.bit_length()) // 8), micro_batch_size):
        n_places = -(-n_places // unit) * unit  # up to a quarter more
    last = micro_batch_size * T
    packed = torch.full((len(is_real), n_places + 1), last, dtype=torch.int32)
    packed[:, 0] = 0
    column = torch.where(is_real, number, n_places)  # what is empty: past the end
    packed.scatter_(1, column, (ends + firsts[:, None]).view_as(is_real).int())
    longest = min(T, 1 << (int(lengths.max()) - 1).bit_length())
    return packed[:, :n_places].reshape(n_sequences, -1), longest


def unpack_lengths(lengths: Tensor) -> Tensor:
    """Returns the lengths of `pack_lengths`, (B, longest, P), as flash attention takes them."""
    documents = lengths[:, 0].flatten().expand(lengths.shape[1], -1)
    if "torch._dynamo" in sys.modules:  # compiled blocks serve all sizes
        torch._dynamo.maybe_mark_dynamic(documents, [0, 1])
    return documents
