"""Labels a step's accounts with the current phase: which part, which block, whose tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.optim.optimizer import LocalOptimizer
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.simulate.accounting import Accounting


class PhaseLabels(Heartbeat):
    """Receives phases of a step like the parent process, and blocks by hooks on them.

    Args:
        books: the accounts to label.
        parallel_model: whose blocks to watch.
    """

    def __init__(self, books: Accounting, parallel_model: ParallelModel) -> None:
        super().__init__()
        self._books = books
        self._parallel_model = parallel_model
        self._n_micro_batches = 0
        self._n_forwards: dict[str, int] = {}
        for model in parallel_model.stages.values():
            if model.takes_tokens and model.embedding is not None:
                self._watch(model.embedding, "the embedding")
            for number, block in model.blocks.items():
                self._watch(block, f"block {number}")
            if model.cross_entropy is not None:
                self._watch(model.cross_entropy, "the loss")

    def begin_step(self, n_micro_batches: int, optimizer: LocalOptimizer) -> None:
        """Starts new accounts, and names the memory that persists between steps."""
        self._n_micro_batches = n_micro_batches
        self._n_forwards.clear()
        for local in self._parallel_model.local_parameters:
            named = [(f"weights: {local.name}", local_part(local.parameter))]
            for key, value in optimizer.state_of(local).items():
                named.append((f"{key}: {local.name}", value))
            self._books.name(named)
        self._books.start_over()

    def enter(self, phase: Phase, step: int) -> None:
        """Records a phase."""
        super().enter(phase, step)
        self._books.moment = phase
        # The only all-reduce of an update is that of the norm of all gradients.
        self._books.counts_all_reduces = phase != "update"

    def _watch(self, module: nn.Module, name: str) -> None:
        def before(_module: nn.Module, _arguments: Any) -> None:
            if _is_in_backward():  # recomputed
                return
            self._n_forwards[name] = self._n_forwards.get(name, 0) + 1
            self._say("forward of", name, self._n_forwards[name])

        def after(_module: nn.Module, _arguments: Any, out: Tensor) -> None:
            if out.grad_fn is None or _is_in_backward():
                return
            number = self._n_forwards[name]
            out.grad_fn.register_prehook(lambda _: self._say("backward of", name, number))

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after)

    def _say(self, what: str, name: str, number: int) -> None:
        n = self._n_micro_batches
        self._books.moment = f"{what} {name}, micro batch {number} of {n}"


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
