"""Training steps of other projects, on the same model, batches and machine, as their users do them.

gpt2-transformers is Hugging Face's GPT2LMHeadModel: GELU in its fastest form, scaled dot product
attention, fused AdamW with decay on matrices alone, bf16 by autocast, compiled where the run
compiles. megatron-core is not built in yet, and a message says so.

A peer starts from the weights that ours starts from, and reads the same sequences with the same
learning rates. Without dropout both do the same mathematics: their losses stand in the record.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.bench.timeline import BACKWARD, FORWARD, Timeline
from trainyard.config.run import Model, Run
from trainyard.data.loader import Loader, build_orders
from trainyard.errors import ConfigError, LaunchError, MachineError
from trainyard.export.gpt2 import config_of, their_name, to_theirs
from trainyard.model.gpt import GPT
from trainyard.model.init import initialise
from trainyard.optim.adamw import build_adamw
from trainyard.optim.schedule import learning_rate
from trainyard.plan.batches import BatchSchedule
from trainyard.plan.resolve import Plan

GPT2_TRANSFORMERS, MEGATRON_CORE = "gpt2-transformers", "megatron-core"
PEERS = (GPT2_TRANSFORMERS, MEGATRON_CORE)
PRECISIONS = ("fp32", "bf16")


def refuse_peer(peer: str, run: Run, n_ranks: int) -> None:
    """Refuses a peer that cannot do the step of a run.

    Raises:
        ConfigError: there is none of that name, or it cannot do this.
        LaunchError: it trains on one rank.
        MachineError: it is not installed.
    """
    if peer not in PEERS:
        raise ConfigError(f"--against {peer!r} is no peer", f"known: {', '.join(PEERS)}")
    if peer == MEGATRON_CORE:
        raise MachineError(
            f"--against {MEGATRON_CORE}: this version has no training step of it",
            f"--against {GPT2_TRANSFORMERS} has one",
        )
    if importlib.util.find_spec("transformers") is None:
        raise MachineError(
            f"--against {peer} needs the package transformers, which is not installed",
            "pip install transformers",
        )
    if n_ranks > 1:
        raise LaunchError(
            f"--against {peer} trains on one rank; this run is on {n_ranks}",
            "--ranks 1, with tensor, pipeline and context of the section parallel at 1",
        )
    if run.precision.kind not in PRECISIONS:
        raise ConfigError(
            f"precision.kind={run.precision.kind!r} is none of {peer}",
            f"one of {', '.join(PRECISIONS)}",
        )


class TransformersTraining:
    """A training step of `transformers`.

    Args:
        run: says everything.
        plan: of one rank.
        device: that computes.
        timeline: learns of the parts of a step.
    """

    def __init__(self, run: Run, plan: Plan, device: torch.device, timeline: Timeline) -> None:
        self._run, self._plan, self._timeline, self._device = run, plan, timeline, device
        self._batches = BatchSchedule(run)
        orders = build_orders(run, plan, ("train", "valid"))
        order = orders["train"]
        assert order is not None, "the cache was filled with it just now"
        on_gpu = device.type == "cuda"
        size = run.model.vocabulary_size
        self._data = Loader(order, self._batches, size, pin_memory=on_gpu)
        model = build_transformers(run.model, plan.padded_vocabulary_size, run.train.seed)
        model.to(device).train()
        compiles = run.train.compile == "always" or (run.train.compile == "gpu" and on_gpu)
        self._forward: Any = torch.compile(model) if compiles else model
        self._parameters = list(model.parameters())
        self._optimizer = build_adamw(self._parameters, run.optimizer)
        self._step = 0

    @property
    def models(self) -> Sequence[nn.Module]:
        """None: it tells the timeline everything itself."""
        return []

    def step(self) -> Tensor:
        """Does the next step; gives its loss, on the device."""
        run, timeline, step = self._run, self._timeline, self._step
        timeline.enter("data", step)
        tokens, labels = self._data.batch(step)
        timeline.enter("forward and backward", step)
        tokens, labels = (ids.to(self._device, non_blocking=True) for ids in (tokens, labels))
        size = run.train.micro_batch_size
        total = torch.zeros((), device=self._device)
        for start in range(0, len(tokens), size):
            timeline.begin(FORWARD)
            with self._precision():
                logits = self._forward(tokens[start : start + size]).logits.flatten(0, 1)
                loss = F.cross_entropy(logits.float(), labels[start : start + size].flatten())
                loss = loss * size / len(tokens)
            timeline.begin(BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        timeline.enter("update", step)
        rate = learning_rate(run, self._plan, self._batches.consumed(step + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self._parameters, run.optimizer.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return total

    def _precision(self) -> AbstractContextManager[Any]:
        if self._run.precision.kind == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


def build_transformers(model: Model, padded_vocabulary_size: int, seed: int) -> nn.Module:
    """Builds a GPT2LMHeadModel with the weights that ours begins with."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = GPT(model, padded_vocabulary_size)
    initialise(ours, model, seed)
    fields = config_of(model, None, "float32").model_dump()
    for name in ("model_type", "architectures", "torch_dtype"):
        del fields[name]
    config = GPT2Config(**fields | {"activation_function": "gelu_pytorch_tanh"}, use_cache=False)
    theirs: nn.Module = GPT2LMHeadModel(config)
    weights = {
        their_name(name): to_theirs(name, parameter.detach(), model)
        for name, parameter in ours.named_parameters()
    }
    if model.tied_embeddings:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return theirs
