"""Compiles blocks, and checks that they have the gradients of eager ones.

A compiler that is wrong says nothing: torch 2.11 gave some functions a gradient of zero. So
before a run compiles its blocks on a device for the first time, a small block is compared there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.config.run import Model, Recompute
from trainyard.errors import MachineError
from trainyard.files import publish_text
from trainyard.model.dropout import sequence_seeds
from trainyard.model.experts import ExpertMLP
from trainyard.model.gpt import GPT, Block
from trainyard.model.linear import Layer, add_to_gradients, cast_once
from trainyard.model.positions import PositionTable

N_TOKENS = 128
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference from rounding, of a gradient's norm; of a wrong one it is near 1."""


def compile_blocks(model: GPT, *, in_order: bool = False, defers: bool = False) -> None:
    """Compiles each block in place, as one graph, and the loss; keeps parameter names.

    Args:
        model: this rank's part.
        in_order: keep the order of operations. Otherwise Inductor may change it to save memory, and
            computes weight gradients last instead of beside what ranks exchange.
        defers: memory must not be used again inside a block: a backward pass leaves sums of
            gradients for later (`defer_sums`), and what is sent is read until its exchange ends.
    """
    options = {"reorder_for_peak_memory": False} if in_order else {}
    if defers:
        options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    for block in model.blocks.values():
        compile_block(block, fullgraph=True, options=options or None)
    if model.cross_entropy is not None:
        model.cross_entropy.compiles = True


def compile_block(block: Any, **options: Any) -> None:
    """Compiles a block in place, of one with experts all before them; see `nn.Module.compile`."""
    if block.recompute != "none":
        _recompute_functions()
    if isinstance(block.mlp, ExpertMLP):  # shapes of what follows depend on the data
        block.attend = torch.compile(block.attend, **options)
    else:
        block.compile(**options)


@cache
def _recompute_functions() -> None:
    """Makes torch 2.11 recompute what autograd functions compute; without it, their inputs stay."""
    from torch._functorch.autograd_function import autograd_function_apply
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    tag_nodes = getattr(TagActivationCheckpoint, "tag_nodes", None)
    if tag_nodes is None:  # later ones do
        return

    def tag_all(graph: Any, is_sac: bool) -> Any:
        tag_nodes(graph, is_sac)
        for call in graph.graph.find_nodes(op="call_function", target=autograd_function_apply):
            for node in getattr(graph, call.args[0].target).graph.nodes:
                node.meta |= {name: call.meta[name] for name in ("ac_graph_id", "recompute")}
        return graph

    TagActivationCheckpoint.tag_nodes = staticmethod(tag_all)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Trial:
    """A small block with the parts of a model, to compare on a device.

    Args:
        model: whose parts it has.
        dtype: of activations and matmuls.
        recompute: what its backward pass recomputes.
        device: where it runs.
        takes_cudnn: whether cuDNN computes its attention.
    """

    model: Model
    dtype: torch.dtype
    recompute: Recompute
    device: torch.device
    takes_cudnn: bool = False

    @property
    def small(self) -> Model:
        """The model with few heads and features."""
        shares = self.model.n_heads > self.model.n_key_value_heads
        n_heads = 4 if shares else 2
        sizes = {"n_layers": 1, "n_heads": n_heads, "n_key_value_heads": 2, "n_experts": 0}
        sizes |= {"d_model": n_heads * self.model.d_head, "d_ff": 2 * n_heads * self.model.d_head}
        return self.model.model_copy(update=sizes | {"sequence_length": N_TOKENS})

    def gradients(self, *, compiled: bool) -> dict[str, Tensor]:
        """Computes the gradients of two micro batches, as a step does."""
        model, draw = self.small, torch.Generator().manual_seed(1)
        block = Block(model, self.recompute)
        for name, parameter in block.named_parameters():
            mean = 1.0 if "norm.weight" in name else 0.0
            torch.nn.init.normal_(parameter, mean, 0.1, draw)
        core = block.attention.core
        core.first_head = 2  # of the second tensor rank
        if self.device.type != "cpu":
            core.dropout = 0.0  # there it draws from the device's generator
        core.takes_cudnn = self.takes_cudnn
        block.to(self.device).train()
        if compiled:
            compile_block(block, fullgraph=self.recompute == "none")
        table = PositionTable(model, self.dtype)
        layers = [each for each in block.modules() if isinstance(each, Layer)]
        found = {}
        with cast_once(layers, self.dtype):
            for number in range(2):
                shape = (2, N_TOKENS, model.d_model)
                x, upstream = (
                    torch.randn(shape, generator=draw).to(self.device, self.dtype) for _ in range(2)
                )
                seeds = sequence_seeds(1, number, 0, 2).to(self.device) if model.dropout else None
                add_to_gradients(layers)
                positions = table.locate(x, None, None, None, None)
                x.requires_grad_()
                block(x, positions._replace(dropout_seeds=seeds)).backward(upstream)
                found[f"its input {number}"] = x.grad
        found |= {name: parameter.grad for name, parameter in block.named_parameters()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def refuse_wrong(self) -> None:
        """Compares all gradients.

        Raises:
            MachineError: one is another when compiled, or the compiler fails.
        """
        torch.compiler.reset()  # what was compiled for other sizes would make sizes dynamic
        place = f"on {_name(self.device)} with torch {torch.__version__}"
        hint = "train.compile=never; or a torch that docs/installing.md lists as tried"
        try:
            expected, found = (self.gradients(compiled=each) for each in (False, True))
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().splitlines()[0]
            raise MachineError(f"blocks cannot be compiled {place}: {first}", hint) from error
        finally:
            torch.compiler.reset()
        for name, gradient in expected.items():
            share = difference(gradient, found[name]) if name in found else 1.0
            if not share <= BOUNDS[self.dtype]:
                raise MachineError(
                    f"compiled blocks are wrong {place}: the gradient of {name} differs from the "
                    f"one that is not compiled by {share:.0%}",
                    hint,
                )


def difference(expected: Tensor, found: Tensor) -> float:
    """Returns the norm of the difference of two tensors, as a share of the larger one's."""
    a, b = expected.double(), found.double()
    largest = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / largest if largest else 0.0


def compare_compiled_once(trial: Trial, cache: Path) -> None:
    """Compares gradients where no earlier run has: the same parts, device and software.

    Args:
        trial: what to compare.
        cache: a folder that remembers what was right.

    Raises:
        MachineError: a gradient is wrong.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    code = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
    facts = f"{trial} {_name(trial.device)} {torch.__version__} {code}"
    right = cache / "compiled" / hashlib.sha256(facts.encode()).hexdigest()
    if right.exists():
        return
    trial.refuse_wrong()
    right.parent.mkdir(parents=True, exist_ok=True)
    publish_text(right, f"{facts}\n")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
