"""Context parallelism: shards each sequence's tokens; ranks communicate only in attention.

    method     rank r of p holds         in attention
    ulysses    r-th of p parts           all-to-all: all tokens of some heads, computed as usual
    ring       r-th of 2p chunks from    own queries, with circulating keys and values
               either end

Ulysses sends less and supports dropout; the ring is not limited by the number of heads, and no rank
holds a whole sequence. The rest of the model works per token, on this rank's tokens.

Ring attention keeps queries in place and circulates keys and values. With 3 ranks, after each shift
of keys to the next rank:

              holds       own keys    1 shift            2 shifts
    rank 0    0 and 5     causal      5 sees 2 and 3     5 sees 1 and 4
    rank 1    1 and 4     causal      both see 0         4 sees 2 and 3
    rank 2    2 and 3     causal      both see 1         both see 0

For keys of any other rank, exactly half of the pairs is visible: no mask is needed, and all ranks
do equal work at every step. Partial outputs are merged by the log of their summed exponentials
("lse"), so no rank ever holds a whole row of scores. A rank holds at most two shards of other
ranks' keys: it computes on one while it receives the next.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, library, nn

from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.model.attention import FLASH_HEAD_MULTIPLE, CausalAttention
from trainyard.model.gpt import GPT
from trainyard.model.linear import as_output
from trainyard.model.positions import document_mask
from trainyard.parallel.collectives import exchange_parts, finish, start_all_to_all

Method = Literal["ulysses", "ring"]
_c10d: Any = dist.distributed_c10d


class UlyssesAttention(nn.Module):
    """Attention over a sharded sequence: each rank computes some heads, over all tokens.

    Args:
        core: computes attention.
        group: the ranks, each with its tokens from `take_shard`.
    """

    def __init__(self, core: CausalAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.first_head = 0  # tensor ranks set it
        self._group = group

    def describe(self, ends: Tensor, n_tokens: int, dtype: torch.dtype) -> Tensor:
        """Describes the documents of whole sequences, for `core`."""
        return self.core.describe(ends, n_tokens, dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_seeds: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Attends from this rank's tokens, (B, H, T/p, K), to themselves and all before them.

        Keys and values are (B, S, T/p, K). `dropout_seeds` are those of the block, for `core`, as
        is what `describe` returned.
        """
        n_ranks = self._group.size()
        B, H, n_tokens, K = q.shape
        heads = H // n_ranks  # fewer if tensor parallelism was applied later
        n_before = self.first_head + self._group.rank() * heads
        # Ranks and tokens first, so that heads and tokens merge without a copy on arrival.
        parts = [
            x.view(B, n_ranks, -1, n_tokens, K).permute(1, 3, 2, 0, 4) for x in (q, k, v)
        ]  # (p, T/p, H/p, B, K), (p, T/p, S/p, B, K) twice
        received = exchange_parts(torch.cat(parts, dim=2), self._group)
        whole = received.flatten(0, 1).permute(2, 1, 0, 3)  # (B, (H + 2G)/p, T, K)
        q, k, v = torch.split(whole, [part.shape[2] for part in parts], dim=1)
        mixed = self.core(q, k, v, dropout_seeds, documents, n_before)
        parts_of_tokens = mixed.view(B, heads, n_ranks, n_tokens, K).permute(2, 1, 0, 3, 4)
        received = exchange_parts(parts_of_tokens, self._group)  # (p, H/p, B, T/p, K)
        return received.flatten(0, 1).transpose(0, 1)


class RingAttention(nn.Module):
    """Causal attention, without dropout, over a sequence sharded across a group of ranks.

    On a GPU its kernels (flash attention) take bf16 and fp16, and head sizes in multiples of 8.

    Args:
        group: two ranks or more, each with the tokens that `take_shard` gives it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert group.size() > 1, "one rank has no neighbour"
        self._group = group

    def describe(self, ends: Tensor, n_tokens: int, dtype: torch.dtype) -> Tensor:
        """Describes the documents: the mask of this rank's tokens and all keys, rank by rank."""
        p = self._group.size()
        whole = torch.arange(n_tokens, device=ends.device)
        by_rank = [take_shard(whole, rank, p, "ring", 0) for rank in range(p)]
        return document_mask(ends, by_rank[self._group.rank()], torch.cat(by_rank), dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_seeds: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Attends from this rank's tokens, (B, H, T/p, K), to themselves and all before them.

        Keys and values are (B, S, T/p, K). Without dropout: `dropout_seeds` is None. `documents`
        are from `describe`; None to see all tokens before.
        """
        assert dropout_seeds is None, "rules.py refuses dropout with the ring"
        out: Tensor = _Ring.apply(q, k, v, documents, self._group)  # type: ignore[no-untyped-call]
        return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        kv = torch.stack((k, v))
        arriving = _start_shift(kv, group)
        mask = _mask_of(documents, group, 0, slice(None), slice(None))
        out, lse, random = _attend(q, kv, causal=True, mask=mask)
        # Merge in fp32 at least: rounding errors of half-precision merges would accumulate.
        out = out.to(torch.promote_types(q.dtype, torch.float32))
        for step in range(1, group.size()):
            kv = _finish_shift(arriving, kv)
            if step < group.size() - 1:
                arriving = _start_shift(kv, group)
            queries, seen = _visible(group.rank(), step, q.shape[2])
            mask = _mask_of(documents, group, step, queries, seen)
            more, more_lse, _ = _attend(
                q[:, :, queries], kv[:, :, :, seen], causal=False, mask=mask
            )
            part, part_lse = out[:, :, queries], lse[:, :, queries]
            part.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - part_lse)[..., None])
            part_lse.copy_(torch.logaddexp(part_lse, more_lse))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, lse, *random)
        ctx.group = group
        return as_output(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, documents, *saved = ctx.saved_tensors
        compute = torch.ops.trainyard.ring if torch.compiler.is_compiling() else _backward
        name = ctx.group.group_name
        of_q, of_kv = compute(gradient, q, torch.stack((k, v)), documents, saved, name)
        return of_q, *of_kv.unbind(), None, None


# An operation of its own: Inductor may delay messages of a backward pass until they are waited for,
# if it computes in one kernel what comes before them and what comes after.
_LIBRARY: Any = library.Library("trainyard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "ring(Tensor gradient, Tensor q, Tensor kv, Tensor? documents, Tensor[] saved, str group)"
    " -> (Tensor, Tensor)"
)


@library.impl(_LIBRARY, "ring", "CompositeExplicitAutograd")
def _backward(
    gradient: Tensor,
    q: Tensor,
    kv: Tensor,
    documents: Tensor | None,
    saved: list[Tensor],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of queries, and of keys and values.

    The second half of the tokens sees the first while the last message is under way.
    """
    group = _c10d._resolve_process_group(group_name)
    out, lse, *random = saved
    first, second = slice(q.shape[2] // 2), slice(q.shape[2] // 2, None)
    q_gradient, kv_gradient = (
        torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, kv)
    )
    kv_own, arriving = kv, _start_shift(kv, group)

    def parts(kv: Tensor, step: int, queries: slice, seen: slice) -> tuple[Tensor, Tensor]:
        # Given the lse over all keys, each shard of keys yields its part of the whole gradient.
        rows = tuple(x[:, :, queries] for x in (gradient, q, out, lse))
        mask = _mask_of(documents, group, step, queries, seen)
        causal = step == 0 and queries == seen
        return _attend_backward(rows, kv[:, :, :, seen], random, causal=causal, mask=mask)

    for half in (first, second):
        q_gradient[:, :, half], kv_gradient[:, :, :, half] = parts(kv, 0, half, half)
    # Circulates with the keys, and is back once every other rank has added its part.
    following: Tensor | None = None
    for step in range(1, group.size()):
        kv = _finish_shift(arriving, kv)
        if step < group.size() - 1:
            arriving = _start_shift(kv, group)
        queries, seen = _visible(group.rank(), step, q.shape[2])
        q_part, kv_part = parts(kv, step, queries, seen)
        q_gradient[:, :, queries] += q_part
        # Wait only now: the transfer overlapped the computation above.
        if following is None:
            total = torch.zeros_like(kv_gradient)
        else:
            total = _finish_shift(following, kv_gradient)
        total[:, :, :, seen] += kv_part
        following = _start_shift(total, group)
    q_part, kv_part = parts(kv_own, 0, second, first)
    q_gradient[:, :, second] += q_part
    kv_gradient[:, :, :, first] += kv_part
    assert following is not None, "there are two ranks or more"
    kv_gradient += _finish_shift(following, kv_gradient)
    return q_gradient.to(q.dtype), kv_gradient.to(q.dtype)


library.register_fake("trainyard::ring", _backward, lib=_LIBRARY)


def _visible(rank: int, step: int, n_tokens: int) -> tuple[slice, slice]:
    """Returns which of this rank's queries see which keys from `step` ranks back."""
    whole, half = slice(None), n_tokens // 2
    came_from_before = step <= rank
    return (whole, slice(0, half)) if came_from_before else (slice(half, None), whole)


def _mask_of(
    documents: Tensor | None, group: dist.ProcessGroup, step: int, queries: slice, seen: slice
) -> Tensor | None:
    """Returns the mask of some of this rank's queries and of keys from `step` ranks back."""
    if documents is None:
        return None
    keys = documents.chunk(group.size(), -1)[group.rank() - step]
    return keys[:, :, queries, seen]


def _start_shift(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts sending `x` to the next rank; returns what the previous rank sends."""
    to_next, from_last = [0] * group.size(), [0] * group.size()
    to_next[(group.rank() + 1) % group.size()] = x.numel()
    from_last[group.rank() - 1] = x.numel()
    # One dimension, because gloo splits along the first.
    return start_all_to_all(x.flatten(), to_next, from_last, group)


def _finish_shift(arriving: Tensor, like: Tensor) -> Tensor:
    return finish(arriving).view_as(like)


def _attend(
    q: Tensor, kv: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns (B, H, queries, K), the lse (B, H, queries), and more state for the backward.

    A mask, only on a CPU, also says what is causal.
    """
    k, v = kv.unbind()
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask is None, attn_mask=mask
        )
        if mask is not None:  # the kernel returns 0 for a query that sees no key
            lse.masked_fill_(mask.amax(-1) == -torch.inf, -torch.inf)
        return out, lse, []
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    # Dropout's random state, unused.
    return results[0], results[1], list(results[6:8])


def _attend_backward(
    rows: tuple[Tensor, ...],
    kv: Tensor,
    random: list[Tensor],
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the parts of the gradients of queries and of keys and values.

    Args:
        rows: gradient of the output, queries, output and lse, of some queries.
        kv: the keys and values they saw.
        random: from the forward pass.
        causal: whether they saw only earlier keys.
        mask: as in `_attend`.
    """
    # Kernels read some of these as contiguous.
    gradient, q, out, lse = (x.contiguous() for x in rows)
    k, v = (x.contiguous() for x in kv.unbind())
    if q.device.type == "cpu":
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=mask
        )
    else:
        lengths = (None, None, q.shape[2], k.shape[2])
        parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, causal, *random
        )
    return parts[0], torch.stack((parts[1], parts[2]))


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


def refuse_ring(run: Run, device: torch.device) -> None:
    """Rejects ring attention that has no kernel on a GPU.

    Raises:
        ConfigError: names the precision, the head size, or the documents.
    """
    if run.parallel.context_method != "ring" or device.type != "cuda":
        return
    problems = {
        "model.attention_within_documents=true": run.model.attention_within_documents,
        "precision.kind='fp32'": run.precision.kind == "fp32",
        f"heads of {run.model.d_head} values": run.model.d_head % FLASH_HEAD_MULTIPLE > 0,
    }
    if any(problems.values()):
        names = " and ".join(name for name, is_there in problems.items() if is_there)
        raise ConfigError(
            f"parallel.context_method='ring' on a GPU is incompatible with {names}: flash attention"
            f" needs bf16 or fp16, a multiple of {FLASH_HEAD_MULTIPLE}, and takes no mask",
            "parallel.context_method=ulysses",
        )


def apply_context_parallel(model: GPT, group: dist.ProcessGroup, method: Method) -> None:
    """Makes `model` compute on this rank's tokens of each sequence, sharded as by `take_shard`.

    Call it before `apply_tensor_parallel`, which may shard the residual stream further.
    """
    table = model.position_table
    table.tokens = table.residual = take_shard(
        table.tokens, group.rank(), group.size(), method, dimension=0
    )
    if table.rotation is not None and model.end_id is None:  # else positions choose in a pass
        table.rotation = take_shard(table.rotation, group.rank(), group.size(), method, dimension=1)
    for block in model.blocks.values():
        attention: Any = block.attention
        is_ring = method == "ring"
        attention.core = (
            RingAttention(group) if is_ring else UlyssesAttention(attention.core, group)
        )
