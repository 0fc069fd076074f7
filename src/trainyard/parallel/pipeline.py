"""Pipeline parallelism: the blocks split into stages, with micro batches flowing through them.

    2 ranks, 2 chunks each:    rank 0: stages 0 and 2     rank 1: stages 1 and 3

PyTorch's schedules do the work. This module builds one for each number of micro batches of the run
(a batch ramp has several), over the same stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward

from trainyard.config.run import Parallel
from trainyard.model.gpt import GPT
from trainyard.model.linear import (
    Layer,
    Sums,
    add_to_gradients,
    cast_once,
    compute_sums,
    defer_sums,
)
from trainyard.parallel.data import add_to_accumulated, prepare_micro_batch

META = torch.device("meta")
_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}
# Logs the whole schedule on every rank when an action fails.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class _LeanStage(pipelining.PipelineStage):
    """A stage that allocates memory for a message only from its receive until its use.

    PyTorch's stage always holds a buffer for every micro batch of a step, in both directions. Here
    buffers live on the meta device, as shapes, and take memory in turn:

        before     get_..._recv_ops     ..._one_chunk                  end of the backward pass
        shape      buffer               shape; the stage has it        the stage drops it

    With ZeRO 2 and 3, every backward pass reduces its gradients, as without a pipeline; PyTorch's
    stage would keep whole ones until the end of the step.

    PyTorch's stage splits the backward pass of a zero bubble by its graph, which a compiled block
    does not show. Here the first part is a whole backward pass that leaves the matmuls of weight
    gradients to the second.

    A stage also does not connect to itself, which gloo cannot (torch 2.11).
    """

    shards_gradients = beside_exchange = False
    layers: Sequence[Layer] = ()
    _sums: Sums

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not self.shards_gradients:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        prepare_micro_batch(self.submod, 2, is_last=last_backward)
        inputs = bwd_kwargs["input_values"]
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], inputs), None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in operations if each.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, META
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        operations: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            _move_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        operations: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.has_backward and isinstance(self.submod, FSDPModule):
            if not self.shards_gradients:
                add_to_accumulated(self.submod)
        elif self.has_backward:
            add_to_gradients(self.layers, is_ahead=True)
        received = self.args_recv_info[fwd_chunk_id]
        for each in _buffers(received):
            each.buffer.requires_grad_(self.has_backward)  # torch 2.11 requires it in advance
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move_buffers(received, META)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        deferring: AbstractContextManager[Sums] = nullcontext([])
        if self.beside_exchange or not full_backward:
            deferring = defer_sums(for_exchange=full_backward)
        with deferring as self._sums:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.has_backward:  # PyTorch would keep an evaluation's inputs and outputs
            del self.fwd_cache[bwd_chunk_id]
        elif not self.is_last:
            _move_buffers(self.grad_recv_info[bwd_chunk_id], META)
        elif loss is not None:
            loss.detach_()  # the schedule keeps losses, whose graphs would keep received tensors

    def take_sums(self) -> Callable[[], None]:
        """Returns the second part of the last backward pass."""
        return partial(compute_sums, self._sums)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        for each in self.layers:
            each.sums = None
        super().perform_reduce_grad(grad_scale_factor)


class _SendingStage(_LeanStage):
    """A stage that sends by itself, and keeps a message only until the next send.

    Schedules for several stages per rank keep all sent messages until the end of the step. Waiting
    for one message before sending the next cannot deadlock: such a schedule adds a send and its
    receive to both ranks' lists at the same time, so each waits only for earlier ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: list[dist.Work] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Sends in place of the schedule, and leaves it nothing to send."""
        for work in self._sent:
            work.wait()
        self._sent = schedules._batch_p2p(operations)
        return []

    def clear_runtime_states(self) -> None:
        self._send([])
        super().clear_runtime_states()


def _buffers(inputs: Iterable[Any]) -> list[Any]:
    """Lists the inputs of a micro batch that are received, which token ids are not."""
    return [each for each in inputs if getattr(each, "buffer", None) is not None]


def _move_buffers(inputs: Iterable[Any], device: torch.device) -> None:
    """Replaces the buffers of a micro batch with empty ones on another device."""
    for each in _buffers(inputs):
        each.buffer = torch.empty_like(each.buffer, device=device)


class Pipeline:
    """The stages of this rank, and their schedule.

    Args:
        stages: this rank's parts of the model, by stage number.
        n_stages: their number on all ranks.
        group: the ranks of the pipeline.
        parallel: names the schedule, and what data ranks shard.
        example: token ids of one micro batch, for shapes.
    """

    def __init__(
        self,
        stages: dict[int, GPT],
        n_stages: int,
        group: dist.ProcessGroup,
        parallel: Parallel,
        example: Tensor,
        layers: Sequence[Layer],
    ) -> None:
        self._schedule, self._shards_weights = parallel.schedule, parallel.shards_weights
        self._measure: Callable[..., Tensor] = GPT.summed_loss
        self._schedules: dict[int, Any] = {}
        self.has_first, self.has_last = 0 in stages, n_stages - 1 in stages
        stage_class = _LeanStage if self._schedule in ("gpipe", "1f1b") else _SendingStage
        self._stages: list[Any] = [
            stage_class(
                model,
                number,
                n_stages,
                example.device,
                input_args=_example_input(model, example),
                output_args=_example_hidden(model, example),
                group=group,
            )
            for number, model in stages.items()
        ]
        for stage in self._stages:
            stage.shards_gradients = parallel.shards_gradients and isinstance(
                stage.submod, FSDPModule
            )
            stage.layers = stage.submod.layers_that_add()
            stage.beside_exchange = parallel.tensor > 1
            if self._schedule == "zero_bubble":
                stage.dw_builder = stage.take_sums
        self._last = stages.get(n_stages - 1)
        self._layers = layers
        self._dtype = next(iter(stages.values())).compute_dtype

    def forward_backward(
        self,
        tokens: Tensor,
        labels: Tensor,
        inputs: dict[str, Tensor],
        n_micro_batches: int,
        scale: float | Tensor,
    ) -> Tensor | None:
        """Runs all micro batches of a step; returns the sum of their losses on the last stage.

        Args:
            tokens: ids of all micro batches, (n_micro_batches x B, T), read by the first stage.
            labels: the next ids, read by the last stage.
            inputs: what every stage takes besides, with a row for each sequence.
            n_micro_batches: the number of equal parts to split them into.
            scale: multiplies the loss.
        """
        self._measure = partial(GPT.summed_loss, scale=scale)
        losses: list[Tensor] = []
        self._run("step", (tokens, labels, inputs), n_micro_batches, losses)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.has_last else None

    def evaluate(
        self,
        measure: Callable[..., Tensor],
        tokens: Tensor,
        labels: Tensor,
        inputs: dict[str, Tensor],
        n_micro_batches: int,
    ) -> list[Tensor]:
        """Measures each micro batch on the last stage, without gradients; empty on the others.

        `measure` gets that stage, its hidden states and the labels.
        """
        self._measure = measure
        found: list[Tensor] = []
        self._run("eval", (tokens, labels, inputs), n_micro_batches, found)
        return found

    def _run(
        self,
        method: str,
        batch: tuple[Tensor, Tensor, dict[str, Tensor]],
        n: int,
        losses: list[Tensor],
    ) -> None:
        tokens, labels, inputs = batch
        arguments = (tokens,) if self.has_first else ()
        options: dict[str, Any] = {**inputs}
        if self.has_last:
            options |= {"target": labels, "losses": losses, "return_outputs": False}
        if n not in self._schedules:
            self._schedules[n] = self._build_schedule(n)
        with cast_once(self._layers, self._dtype):
            getattr(self._schedules[n], method)(*arguments, **options)
        for stage in self._stages:
            stage.clear_runtime_states()

    def _build_schedule(self, n_micro_batches: int) -> Any:
        kind: Any = _SCHEDULES[self._schedule]
        takes_several = issubclass(kind, schedules.PipelineScheduleMulti)
        stages = self._stages if takes_several else self._stages[0]
        schedule = kind(stages, n_micro_batches, loss_fn=self._loss, scale_grads=False)
        if takes_several and not self._shards_weights:
            # PyTorch keeps the weights of three stages, and gathers others again. Here each action
            # stays where it comes first, and weights are dropped at the end.
            order = schedule.pipeline_order_with_comms[schedule.rank]
            order[:] = sorted(dict.fromkeys(order), key=lambda each: each[1] is schedules.RESHARD)
        return schedule

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert self._last is not None
        return self._measure(self._last, hidden, labels)


def _example_hidden(model: GPT, tokens: Tensor) -> Tensor:
    shape = (len(tokens), len(model.position_table.residual), model.d_model)
    return torch.empty(shape, dtype=model.compute_dtype, device="meta", requires_grad=True)


def _example_input(model: GPT, tokens: Tensor) -> Tensor:
    if model.takes_tokens:
        return torch.empty_like(tokens, device="meta")
    return _example_hidden(model, tokens)
