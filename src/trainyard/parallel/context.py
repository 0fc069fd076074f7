"""Context parallelism: shards each sequence's tokens; ranks communicate only in attention.

    method     rank r of p holds         in attention
    ulysses    r-th of p parts           all-to-all: all tokens of some heads, computed as usual
    ring       r-th of 2p chunks from    own queries, with circulating keys and values
               either end                (see ring.py)

Ulysses sends less and supports dropout; the ring is not limited by the number of heads, and no rank
holds a whole sequence. The rest of the model works per token, on this rank's tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.model.attention import Attention, CausalAttention
from trainyard.model.gpt import GPT
from trainyard.parallel.collectives import exchange_parts
from trainyard.parallel.ring import RingAttention

Method = Literal["ulysses", "ring"]


class UlyssesAttention(nn.Module):
    """Attention over a sharded sequence: each rank computes some heads, over all tokens.

    Args:
        core: computes attention.
        group: the ranks, each with its tokens from `take_shard`.
    """

    def __init__(self, core: CausalAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.first_head = core.first_head
        self._group = group

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_seeds: Tensor | None = None
    ) -> Tensor:
        """Attends from this rank's tokens, (B, H, T/p, K), to themselves and all before them.

        `dropout_seeds` are those of the block, for `core`.
        """
        n_ranks = self._group.size()
        B, H, n_tokens, K = q.shape
        heads = H // n_ranks  # fewer if tensor parallelism was applied later
        self.core.first_head = self.first_head + self._group.rank() * heads
        # Ranks and tokens first, so that heads and tokens merge without a copy on arrival.
        parts = [
            x.view(B, n_ranks, heads, n_tokens, K).permute(1, 3, 0, 2, 4) for x in (q, k, v)
        ]  # (p, T/p, B, H/p, K) each
        received = exchange_parts(torch.stack(parts, dim=2), self._group)
        q, k, v = received.flatten(0, 1).permute(1, 2, 3, 0, 4).unbind()  # (B, H/p, T, K)
        mixed = self.core(q, k, v, dropout_seeds)
        parts_of_tokens = mixed.view(B, heads, n_ranks, n_tokens, K).permute(2, 1, 0, 3, 4)
        received = exchange_parts(parts_of_tokens, self._group)  # (p, H/p, B, T/p, K)
        return received.flatten(0, 1).transpose(0, 1)


def take_shard(x: Tensor, rank: int, n_ranks: int, method: Method, dimension: int) -> Tensor:
    """Takes this rank's tokens of whole sequences.

    Args:
        x: tokens along `dimension`, a multiple of twice `n_ranks` for the ring.
        rank: in the context-parallel group.
        n_ranks: size of that group.
        method: how to shard.
        dimension: that of tokens.
    """
    n_chunks = n_ranks if method == "ulysses" else 2 * n_ranks
    assert x.shape[dimension] % n_chunks == 0, "rules.py refuses such lengths"
    chunks = x.chunk(n_chunks, dimension)
    if method == "ulysses":
        return chunks[rank]
    return torch.cat((chunks[rank], chunks[-1 - rank]), dimension)


def apply_context_parallel(model: GPT, group: dist.ProcessGroup, method: Method) -> None:
    """Makes `model` compute on this rank's tokens of each sequence, sharded as by `take_shard`.

    Call it before `apply_tensor_parallel`, which may shard the residual stream further.
    """
    positions = take_shard(model.token_positions, group.rank(), group.size(), method, 0)
    model.token_positions = model.residual_positions = positions
    for module in list(model.modules()):
        if not isinstance(module, Attention):
            continue
        if method == "ulysses":
            module.core = UlyssesAttention(module.core, group)  # type: ignore[assignment]
        else:
            module.core = RingAttention(group)  # type: ignore[assignment]
