"""Documents in a sequence: where each ends, and which tokens see each other.

    tokens       a  b  |  c  d  |  e     | is the end-of-document token
    ends         3  6  7  7              one past each, then the sequence's length
    starts       0  0  0  3  3  3  6     of each token's document
    positions    0  1  2  0  1  2  0

A token sees the tokens from the start of its document up to itself. So ends tell everything, on any
rank and without waiting for the device; they are few enough to travel with every micro batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
