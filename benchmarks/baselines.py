"""Baselines: training steps of other projects, on the same model, batches and machine.

    transformers   Hugging Face's GPT-2, Llama, Qwen3 or OLMo 2: GELU in its fastest form, scaled
                   dot product attention, bf16 by autocast, fused AdamW, compiled with the loss if
                   the run compiles
    litgpt         litgpt's Llama, trained in the same way
    plain-torch    a small GPT-2 in plain PyTorch (`plain_torch.py`), trained in the same way
    megatron-core  Megatron-Core's GPTModel with local layers (`megatron_core.py`), with its own
                   mixed precision, gradient buffers and optimizer; GPT-2 on an NVIDIA GPU

A baseline starts from our initial weights, and reads the same sequences with the same learning
rates. Without dropout all do the same mathematics: the record has their losses. `against.py` times
them beside ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from benchmarks.baseline_models import build_litgpt, build_transformers
from torch import Tensor, nn

from trainyard.bench.measure import BACKWARD, FORWARD, Timeline
from trainyard.config.run import Optimizer, Run
from trainyard.data.loader import Loader, build_orders
from trainyard.errors import ConfigError, MachineError
from trainyard.export.families import FAMILIES, GPT2, LLAMA, Family, find_family
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan, learning_rate
from trainyard.model.gpt import GPT, initialize

TRANSFORMERS, LITGPT = "transformers", "litgpt"
PLAIN_TORCH, MEGATRON_CORE = "plain-torch", "megatron-core"
BASELINES: dict[str, Sequence[Family]] = {
    TRANSFORMERS: FAMILIES,
    LITGPT: (LLAMA,),
    PLAIN_TORCH: (GPT2,),
    MEGATRON_CORE: (GPT2,),
}
"""The architectures that each has."""
PACKAGES = {
    TRANSFORMERS: ("transformers", "pip install transformers"),
    LITGPT: ("litgpt", "pip install --no-deps litgpt lightning lightning-utilities torchmetrics"),
    MEGATRON_CORE: ("megatron.core", "pip install --no-deps megatron-core==0.16.1"),
}
PRECISIONS = ("fp32", "bf16")


def refuse_baseline(baseline: str, run: Run) -> None:
    """Rejects a baseline that cannot do the step of a run.

    Raises:
        ConfigError: the name is unknown, or the baseline lacks an option of the run.
        MachineError: it is not installed, or needs another machine.
    """
    if baseline not in BASELINES:
        raise ConfigError(f"{baseline!r} is not a baseline", f"known: {', '.join(BASELINES)}")
    package, remedy = PACKAGES.get(baseline, ("torch", ""))
    if not _is_installed(package):
        raise MachineError(
            f"{baseline} needs the package {package}, which is not installed", remedy
        )
    if run.precision.kind not in PRECISIONS:
        raise ConfigError(
            f"precision.kind={run.precision.kind!r} is not available in {baseline}",
            f"one of {', '.join(PRECISIONS)}",
        )
    kind, documents = run.optimizer.kind, "model.attention_within_documents"
    for setting, instead, is_there in (
        (f"optimizer.kind={kind!r}", "optimizer.kind=adamw", kind != "adamw"),
        (f"train.z_loss={run.train.z_loss}", "train.z_loss=0", run.train.z_loss > 0),
        (f"{documents}=true", f"{documents}=false", run.model.attention_within_documents),
    ):
        if is_there:
            raise ConfigError(f"{setting} is not available in {baseline}", instead)
    find_family(run.model, BASELINES[baseline])
    if baseline == MEGATRON_CORE and not torch.cuda.is_available():
        raise MachineError(
            f"{baseline}: attention and optimizer of megatron-core need "
            "an NVIDIA GPU, and this machine has none",
            f"{TRANSFORMERS} and {PLAIN_TORCH} train on a CPU too",
        )


def baseline_run(baseline: str, run: Run) -> Run:
    """Returns a run as a baseline trains it: only Megatron-Core supports recomputation."""
    if baseline == MEGATRON_CORE:
        return run
    parallel = run.parallel.model_copy(update={"recompute": "none"})
    return run.model_copy(update={"parallel": parallel})


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


class Baseline(Protocol):
    """The interface of baselines."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross entropy of a micro batch, to be differentiated."""

    def update(self, rate: float) -> None:
        """Clips, updates with this learning rate, and forgets the gradients."""


class BaselineTraining:
    """A training step of a baseline.

    Args:
        run: the run.
        plan: for one rank.
        device: for computation.
        timeline: receives the parts of a step.
        baseline: its model and optimizer.
    """

    def __init__(
        self, run: Run, plan: Plan, device: torch.device, timeline: Timeline, baseline: Baseline
    ) -> None:
        self._run, self._plan, self._timeline, self._device = run, plan, timeline, device
        self._batches = BatchSchedule(run)
        order = build_orders(run, plan, ("train", "valid"))["train"]
        assert order is not None, "the cache was filled with it just now"
        size = run.model.vocabulary_size
        self._data = Loader(order, self._batches, size, pin_memory=device.type == "cuda")
        self._baseline = baseline
        self._step = 0

    @property
    def models(self) -> Sequence[nn.Module]:
        """None: it reports to the timeline itself."""
        return []

    def step(self) -> Tensor:
        """Runs the next step; returns its loss, on the device."""
        run, timeline, step = self._run, self._timeline, self._step
        timeline.enter("data", step)
        tokens, labels = self._data.batch(step)
        timeline.enter("forward and backward", step)
        tokens, labels = (ids.to(self._device, non_blocking=True) for ids in (tokens, labels))
        size = run.train.micro_batch_size
        total = torch.zeros((), device=self._device)
        for start in range(0, len(tokens), size):
            timeline.begin(FORWARD)
            loss = self._baseline.loss(tokens[start : start + size], labels[start : start + size])
            loss = loss * size / len(tokens)
            timeline.begin(BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        timeline.enter("update", step)
        self._baseline.update(learning_rate(run, self._plan, self._batches.consumed(step + 1)))
        self._step += 1
        return total


class AutocastBaseline:
    """A model with logits, trained in plain PyTorch: autocast, clip_grad_norm_, fused AdamW.

    Args:
        run: the run.
        device: for computation.
        model: with its weights, on the CPU.
        logits: computes those of micro batches.
    """

    def __init__(
        self, run: Run, device: torch.device, model: nn.Module, logits: Callable[[Tensor], Tensor]
    ) -> None:
        self._clip_norm, self._precision = run.optimizer.clip_norm, run.precision.kind
        self._device = device
        model.to(device).train()

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits(tokens).flatten(0, 1).float(), labels.flatten())

        compiles = run.train.compile == "always"
        compiles |= run.train.compile == "gpu" and device.type == "cuda"
        self._loss: Any = torch.compile(loss) if compiles else loss
        self._parameters = list(model.parameters())
        self._optimizer = build_adamw(self._parameters, run.optimizer)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross entropy of a micro batch, to be differentiated."""
        with self._autocast():
            loss: Tensor = self._loss(tokens, labels)
        return loss

    def update(self, rate: float) -> None:
        """Clips, updates with this learning rate, and forgets the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


def build_baseline(
    name: str, run: Run, plan: Plan, device: torch.device, timeline: Timeline
) -> BaselineTraining:
    """Builds the training of a baseline accepted by `refuse_baseline`."""
    baseline: Baseline
    ours = GPT(run.model, plan.padded_vocabulary_size)
    initialize(ours, run.train.seed)
    if name == MEGATRON_CORE:
        from benchmarks.megatron_core import MegatronBaseline

        baseline = MegatronBaseline(run, device, ours)
    elif name == PLAIN_TORCH:
        from benchmarks.plain_torch import build_plain

        plain = build_plain(run.model, ours)
        baseline = AutocastBaseline(run, device, plain, plain)
    elif name == LITGPT:
        lit = build_litgpt(run.model, ours)
        baseline = AutocastBaseline(run, device, lit, lit)
    else:
        theirs = build_transformers(run.model, ours)
        baseline = AutocastBaseline(run, device, theirs, lambda tokens: theirs(tokens).logits)
    return BaselineTraining(run, plan, device, timeline, baseline)


def build_adamw(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> torch.optim.AdamW:
    """Builds torch's fused AdamW; one-dimensional parameters (biases and norms) are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.epsilon, fused=True
    )
