"""Pipeline parallelism: the stack of blocks cut into stages, micro batches flowing through them.

    2 ranks, 2 chunks each:    rank 0: stages 0 and 2     rank 1: stages 1 and 3

PyTorch's schedules do the work; here a schedule is built for each number of micro batches that the
run has (a batch ramp has several), over the same stages.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from trainyard.model.gpt import GPT

# Logs a whole schedule on every rank when one of its actions fails.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class _Stage(pipelining.PipelineStage):
    """A stage that does not try to connect to itself, as gloo cannot (torch 2.11)."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in operations if each.group_peer != self.group_rank]


class Pipeline:
    """The stages of this rank, and the order in which they take micro batches.

    Args:
        stages: the parts of the model this rank has, by number of stage.
        n_stages: how many there are on all ranks.
        group: the ranks of the pipeline.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        example: token ids of one micro batch, for shapes.
    """

    def __init__(
        self,
        stages: dict[int, GPT],
        n_stages: int,
        group: dist.ProcessGroup,
        schedule: str,
        example: Tensor,
    ) -> None:
        self._schedule = schedule
        self._models = stages
        self._scale: float | Tensor = 1.0
        self._schedules: dict[int, Any] = {}
        self.has_first, self.has_last = 0 in stages, n_stages - 1 in stages
        self._stages: list[Any] = [
            _Stage(
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
        self._last = stages.get(n_stages - 1)

    def forward_backward(
        self,
        tokens: Tensor,
        labels: Tensor,
        keys: Tensor | None,
        n_micro_batches: int,
        scale: float | Tensor,
    ) -> Tensor | None:
        """Runs all micro batches of a step; gives the sum of their losses on the last stage.

        Args:
            tokens: ids of all micro batches, (n_micro_batches x B, T), read by the first stage.
            labels: the ids that follow, read by the last stage.
            keys: dropout keys of the sequences.
            n_micro_batches: how many equal parts they are cut into.
            scale: multiplies the loss.
        """
        self._scale = scale
        losses: list[Tensor] = []
        self._run("step", (tokens, labels, keys), n_micro_batches, losses)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.has_last else None

    def evaluate(self, tokens: Tensor, labels: Tensor, n_micro_batches: int) -> Tensor | None:
        """Gives the summed loss on the last stage, without gradients."""
        self._scale = 1.0
        losses: list[Tensor] = []
        self._run("eval", (tokens, labels, None), n_micro_batches, losses)
        return torch.stack(losses).sum() if self.has_last else None

    def _run(
        self, method: str, batch: tuple[Tensor, Tensor, Tensor | None], n: int, losses: list[Tensor]
    ) -> None:
        tokens, labels, keys = batch
        arguments = (tokens,) if self.has_first else ()
        options: dict[str, Any] = {} if keys is None else {"keys": keys}
        if self.has_last:
            options |= {"target": labels, "losses": losses, "return_outputs": False}
        if n not in self._schedules:
            self._schedules[n] = self._build_schedule(n)
        getattr(self._schedules[n], method)(*arguments, **options)

    def _build_schedule(self, n_micro_batches: int) -> Any:
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self._schedule == "gpipe":
            return pipelining.ScheduleGPipe(self._stages[0], n_micro_batches, **options)
        if self._schedule == "1f1b":
            return pipelining.Schedule1F1B(self._stages[0], n_micro_batches, **options)
        if self._schedule == "interleaved":
            return pipelining.ScheduleInterleaved1F1B(self._stages, n_micro_batches, **options)
        return pipelining.ScheduleInterleavedZeroBubble(self._stages, n_micro_batches, **options)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert self._last is not None
        return self._last.summed_loss(hidden, labels, self._scale)


def _example_hidden(model: GPT, tokens: Tensor) -> Tensor:
    shape = (len(tokens), len(model.residual_positions), model.d_model)
    return torch.empty(shape, dtype=model.compute_dtype, device="meta", requires_grad=True)


def _example_input(model: GPT, tokens: Tensor) -> Tensor:
    if model.takes_tokens:
        return torch.empty_like(tokens, device="meta")
    return _example_hidden(model, tokens)
