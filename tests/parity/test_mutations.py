"""The mutation table: faults that parallel code is known for, each seen by the parity table.

A fault is patched before the ranks start, after the single device was run, and must show in the row
of the table that it names, far above the bound of fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.data.loader import Loader
from trainyard.layout.resolve import Plan
from trainyard.model import attention, experts, linear, loss, positions
from trainyard.model.gpt import GPT
from trainyard.optim import clip, muon
from trainyard.optim.adamw import AdamW
from trainyard.parallel import collectives, context, data, mesh, tensor
from trainyard.parallel import experts as expert_ranks
from trainyard.parallel import model as parallel_model
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.simulate import parity
from trainyard.simulate.parity import BOUNDS, Outcome, compare
from trainyard.training import step

from .rows import TABLE, Row

Patch = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Patch, Row]] = {}
DATA, PIPELINE, RING = "dp2 zero0, dropout", "pp2 1f1b, dropout", "cp4 ring zero0, documents"
TENSOR = "tp2, grouped swiglu head-norm norm-after z-loss"
MUON = "tp2, muon all-norm dropout"
EXPERTS = "dp4 hsdp2 ep2 zero2, experts bias"
WITH_TENSORS = "dp2 ep2 tp2 pp2 zero1 1f1b, deepseek"


def seen_in(row: str) -> Callable[[Patch], Patch]:
    """Names the row of the parity table in which a fault must show."""

    def note(fault: Patch) -> Patch:
        FAULTS[fault.__name__.replace("_", " ")] = fault, TABLE[row]
        return fault

    return note


def around(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[..., None]:
    """Replaces a function by one that gets the right one before its arguments."""
    right = getattr(owner, name)

    def replace_by(wrong: Callable[..., Any]) -> None:
        patch.setattr(
            owner, name, lambda *arguments, **options: wrong(right, *arguments, **options)
        )

    return replace_by


@seen_in(TENSOR)
def missing_all_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "start_exchange", lambda x, *_, **__: x.clone())
    patch.setattr(collectives, "finish", lambda x: x)
    patch.setattr(tensor, "all_reduce", lambda x, *_: x)


@seen_in("tp2 sequence recompute-block, modern dropout")
def parts_of_sequences_instead_of_pieces(patch: pytest.MonkeyPatch) -> None:
    """A rank takes its residual stream for a run of tokens, which it is of each piece."""

    @around(patch, parallel_model, "apply_tensor_parallel")
    def wrong(right: Any, model: GPT, group: dist.ProcessGroup, *arguments: Any) -> None:
        right(model, group, *arguments)
        table = model.position_table
        table.residual = table.tokens.chunk(group.size())[group.rank()]


@seen_in("dp2 tp2 cp2 sequence ring zero1, modern")
def pieces_gathered_again_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """In the backward pass, gradients of outputs meet the inputs of another piece."""

    @around(patch, collectives.TensorRanks, "start_gather")
    def wrong(right: Any, ranks: Any, x: Tensor, gradient: Any = None, **options: Any) -> Any:
        pieces = right(ranks, x, gradient, **options)
        return pieces if gradient is None else pieces[::-1]


@seen_in("tp2 sequence, micro-batch-4")
def what_waits_for_an_exchange_is_computed_at_each(patch: pytest.MonkeyPatch) -> None:
    """A matmul of a weight's gradient waits for an exchange, and stays for the next one."""

    @around(patch, linear, "compute_sums")
    def wrong(right: Any, sums: linear.Sums) -> None:
        kept = list(sums)
        right(sums)
        sums += kept


@seen_in("tp2 sequence recompute-block, modern dropout")
def gradients_of_norms_not_added_up(patch: pytest.MonkeyPatch) -> None:
    @around(patch, ParallelModel, "__init__")
    def build(right: Any, model: Any, *arguments: Any) -> None:
        right(model, *arguments)
        model._parallel = model._parallel.model_copy(update={"sequence": False})


@seen_in(DATA)
def scaled_by_the_micro_batch(patch: pytest.MonkeyPatch) -> None:
    @around(patch, ParallelModel, "forward_backward")
    def wrong(
        right: Any, model: Any, tokens: Tensor, labels: Tensor, seeds: Any, scale: Any
    ) -> Tensor:
        return right(model, tokens, labels, seeds, scale * len(tokens))


@seen_in(PIPELINE)
def unsynced_tied_embedding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mesh, "replace", lambda made, **_: made)  # without the group of both ends


@seen_in(TENSOR)
def clipped_by_the_local_norm(patch: pytest.MonkeyPatch) -> None:
    @around(patch, step, "reduce_step_stats")
    def local(right: Any, model: ParallelModel, *arguments: Any) -> clip.StepStats:
        stats = right(model, *arguments)
        squares = [each.gradient.square().sum() for each in model.local_parameters]
        return replace(stats, norm=torch.stack(squares).sum().sqrt() * stats.multiplier)


@seen_in(MUON)
def dropout_shared_across_the_cut(patch: pytest.MonkeyPatch) -> None:
    @around(patch, parallel_model, "apply_tensor_parallel")
    def wrong(right: Any, model: GPT, *arguments: Any) -> None:
        right(model, *arguments)
        for block in model.blocks.values():
            block.attention.core.first_head = 0


@seen_in(PIPELINE)
def stage_off_by_one(patch: pytest.MonkeyPatch) -> None:
    @around(patch, parity, "resolve")
    def wrong(right: Any, *arguments: Any) -> Plan:
        plan = right(*arguments)
        (start, end), *others = plan.stages
        return replace(plan, stages=((start, end + 1), *others))


@seen_in(TENSOR)
def wrong_vocabulary_offset(patch: pytest.MonkeyPatch) -> None:
    @around(patch, tensor.VocabularyShard, "__init__")
    def wrong(right: Any, shard: Any, group: Any, first_row: int, spread: Any) -> None:
        right(shard, group, first_row + (1 if first_row else 0), spread)


@seen_in(DATA)
def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    @around(patch, step, "reduce_step_stats")
    def wrong(
        right: Any, model: ParallelModel, loss: Tensor, n_labelled: int, n_expected: int
    ) -> clip.StepStats:
        n_ranks = model.mesh.topology.data
        share = n_labelled * n_ranks / n_expected
        for each in model.local_parameters:
            each.gradient.div_(share)
        return right(model, loss / share, n_expected // n_ranks, n_expected)


@seen_in(TENSOR)
def padding_of_the_vocabulary_counts(patch: pytest.MonkeyPatch) -> None:
    @around(patch, loss.CrossEntropy, "forward")
    def wrong(right: Any, of: Any, hidden: Any, weight: Any, labels: Any, *rest: Any) -> Tensor:
        return right(of, hidden, weight, labels, 10**6, *rest[1:])


@seen_in("dp2 zero1")
def stale_shard(patch: pytest.MonkeyPatch) -> None:
    @around(patch, AdamW, "step")
    def wrong(right: Any, optimizer: AdamW, *arguments: Any) -> None:
        parameter = local_part(optimizer.parameters[0])
        before = parameter.detach().clone()
        right(optimizer, *arguments)
        if dist.is_initialized() and dist.get_rank() == 1:
            with torch.no_grad():
                parameter.copy_(before)


@seen_in(DATA)
def second_rank_reads_one_further(patch: pytest.MonkeyPatch) -> None:
    @around(patch, Loader, "_read")
    def wrong(right: Any, loader: Loader, step: int, offset: int) -> Any:
        return right(loader, step, offset + (loader.share[0] == 1))


@seen_in(RING)
def ring_sends_its_own_keys_again(patch: pytest.MonkeyPatch) -> None:
    @around(patch, context, "_finish_shift")
    def wrong(right: Any, arriving: Tensor, like: Any) -> Any:
        arrived: Any = right(arriving, like)
        if hasattr(like, "has_arrived"):  # then what arrived first does so once more
            return like
        arrived.has_arrived = True
        return arrived


@seen_in("tp4 sequence, modern few-keys dropout")
def gradients_of_shared_keys_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Of two ranks that share a key, the second does not send back its gradient."""

    @around(patch, collectives.SharedHeads, "_move")
    def wrong(right: Any, heads: Any, how: Any, x: Tensor) -> Tensor:
        if how[2] == heads._n_computed and dist.get_rank() % 2:  # back
            x = x.index_fill(2, torch.arange(x.shape[2] - 2 * 12, x.shape[2]), 0)
        out: Tensor = right(heads, how, x)
        return out


def gradients_of_replicas_not_added_up(patch: pytest.MonkeyPatch) -> None:
    """In no row: training refuses it by itself, as tests/cli/test_check_layout.py shows."""

    def wrong(model: Any, *_: Any, **__: Any) -> None:
        model.set_requires_all_reduce(False)

    patch.setattr(data, "prepare_micro_batch", wrong)


@seen_in("dp2 zero3, untied")
def gradients_of_norm_and_head_not_added_up(patch: pytest.MonkeyPatch) -> None:
    """Neither the message of blocks nor that of the embeddings has them."""

    @around(patch, data, "_share")
    def wrong(right: Any, module: Any, *arguments: Any) -> None:
        if not isinstance(module, linear.Norm):
            right(module, *arguments)


@seen_in("cp2 ring zero0, muon rotary")
def ring_turns_consecutive_positions(patch: pytest.MonkeyPatch) -> None:
    """Rotary positions count from this rank's part of the sequence, as without a ring's order."""

    @around(patch, parallel_model, "apply_context_parallel")
    def wrong(right: Any, model: GPT, group: dist.ProcessGroup, method: Any) -> None:
        rotation = model.position_table.rotation
        right(model, group, method)
        assert rotation is not None
        own = context.take_shard(rotation, group.rank(), group.size(), "ulysses", 1)
        model.position_table.rotation = own


@seen_in(TENSOR)
def keys_of_other_groups(patch: pytest.MonkeyPatch) -> None:
    """A rank's heads take the keys and values of its groups in turn, not in equal runs."""

    @around(patch, attention, "_attend")
    def wrong(right: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        n_times = q.shape[1] // k.shape[1]
        return right(q, k.repeat(1, n_times, 1, 1), v.repeat(1, n_times, 1, 1), **options)


@seen_in(TENSOR)
def halves_of_swiglu_exchanged(patch: pytest.MonkeyPatch) -> None:
    """A rank takes the first half of its rows as gates, as in a whole weight of two halves."""
    patch.setattr(linear, "_parts", lambda rows, n: rows.view(n, -1, *rows.shape[1:]))


@seen_in(TENSOR)
def gradients_of_head_norms_not_added_up(patch: pytest.MonkeyPatch) -> None:
    @around(patch, ParallelModel, "__init__")
    def build(right: Any, model: ParallelModel, *arguments: Any) -> None:
        right(model, *arguments)
        for each in model.local_parameters:
            each.is_partial = False


@seen_in(MUON)
def squares_of_all_heads_not_added_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor.AverageOfGroup, "__call__", lambda self, mean: mean)


@seen_in(TENSOR)
def norm_before_in_one_block(patch: pytest.MonkeyPatch) -> None:
    @around(patch, parallel_model, "apply_tensor_parallel")
    def wrong(right: Any, model: GPT, *arguments: Any) -> None:
        right(model, *arguments)
        model.blocks["1"].norm_place = "before"


@seen_in("cp2 ulysses zero0, documents rotary dropout")
def positions_from_the_start_of_a_shard(patch: pytest.MonkeyPatch) -> None:
    """A rank counts positions from its first token, as if a document began there."""

    @around(patch, positions, "_in_documents")
    def wrong(right: Any, tokens: Tensor, ends: Tensor | None) -> Tensor:
        return (right(tokens, ends) - tokens[0]).clamp(min=0)


@seen_in(RING)
def documents_of_the_next_tokens(patch: pytest.MonkeyPatch) -> None:
    """A ring's rank sees the keys of the rank before those that have come."""

    @around(patch, context, "_mask_of")
    def wrong(right: Any, documents: Any, group: Any, step: int, *rest: Any) -> Any:
        return right(documents, group, (step + 1) % group.size() if step else 0, *rest)


@seen_in(TENSOR)
def z_loss_of_a_shard(patch: pytest.MonkeyPatch) -> None:
    @around(patch, loss, "_exponentials")
    def wrong(right: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        exponentials, total, target, largest = right(logits, *rest)
        of_shard = exponentials.sum(1, keepdim=True)
        return exponentials, total, target, largest + (of_shard / total).log()


@seen_in("dp3 tp2 zero1, muon")
def orthogonalized_shards(patch: pytest.MonkeyPatch) -> None:
    def wrong(_self: muon.Muon, _matrices: Any, updates: list[Tensor]) -> list[Tensor]:
        return [muon.orthogonalize(update) for update in updates]

    patch.setattr(muon.Muon, "_orthogonalize", wrong)


@seen_in(MUON)
def momentum_put_together_in_the_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    def wrong(_self: Any, received: Tensor, shape: tuple[int, ...]) -> Tensor:
        return received.view(shape)

    patch.setattr(muon._Exchange, "put_together", wrong)


@seen_in(EXPERTS)
def tokens_returned_to_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    """Outputs of experts go back in the order in which rows arrived."""

    @around(patch, expert_ranks.TokenExchange, "send_back")
    def wrong(right: Any, exchange: Any, outputs: Tensor, rows: Any) -> Tensor:
        out: Tensor = right(
            exchange, outputs, replace(rows, order=rows.inverse, inverse=rows.order)
        )
        return out


@seen_in(EXPERTS)
def gates_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """The router learns from its balance and z-loss alone."""

    @around(patch, experts.Router, "_watch")
    def wrong(right: Any, router: Any, gates: Tensor, *others: Tensor) -> Tensor:
        out: Tensor = right(router, gates.detach(), *others)
        return out


@seen_in(EXPERTS)
def load_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank changes its balances by its own tokens."""
    patch.setattr(ParallelModel, "_add_up_load", lambda _: None)


@seen_in("cp2 ep2 ring zero3, rotary deepseek")
def balance_of_a_part_of_each_sequence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(expert_ranks._SumOfGroup, "__call__", lambda _, counts: counts)


@seen_in(WITH_TENSORS)
def shared_expert_twice(patch: pytest.MonkeyPatch) -> None:
    """It is among the outputs that tensor ranks sum, and added after the sum."""

    @around(patch, experts.ExpertMLP, "forward")
    def wrong(right: Any, mlp: Any, x: Tensor) -> Tensor:
        doubled = mlp.shared.register_forward_hook(lambda _mlp, _x, out: 2 * out)
        out: Tensor = right(mlp, x)
        doubled.remove()
        return out


@seen_in(WITH_TENSORS)
def gradients_of_routers_not_added_up(patch: pytest.MonkeyPatch) -> None:
    gradients_of_head_norms_not_added_up(patch)


@seen_in(WITH_TENSORS)
def balance_on_each_tensor_rank(patch: pytest.MonkeyPatch) -> None:
    @around(patch, experts.Router, "forward")
    def wrong(right: Any, router: Any, x: Tensor) -> Any:
        router.n_alike = 1
        return right(router, x)


@seen_in(EXPERTS)
def first_half_of_the_experts_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    """Ranks that share experts all start with the weights of the first of them."""

    @around(patch, ParallelModel, "_store")
    def wrong(right: Any, model: ParallelModel, parameter: Any, spec: Any, value: Tensor) -> None:
        if spec.of_experts:
            first, *others = value.chunk(model.mesh.topology.expert)
            value = torch.cat([first] * (1 + len(others)))
        right(model, parameter, spec, value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(
    name: str,
    train_alone: Callable[[Row], Outcome],
    train_sharded: Callable[[Row], list[Outcome]],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    patch, row = FAULTS[name]
    alone = train_alone(row)
    patch(monkeypatch)
    difference = compare(alone, train_sharded(row))
    record_property("difference", f"{difference}")
    seen = max(difference.worst, difference.between_ranks)
    assert seen > 1e4 * BOUNDS[row.computed_in], difference
