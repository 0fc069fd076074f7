"""Applies a run's precision to a model, after the table in `config/precisions.py`.

`PrecisionPolicy` changes matmuls and weights of blocks; messages are in `parallel/data.py`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.config.devices import cpu_multiplies_bf16_natively, is_amd_with_avx512
from trainyard.config.precisions import BF16, FP16, FP32, Stored
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear, PlainProduct, multiply_by
from trainyard.precision.block_scaled import torch_dtype
from trainyard.precision.float8 import blocks_in_fp8, convert_to_float8

logger = logging.getLogger("trainyard")


class PrecisionPolicy:
    """What a precision changes in a model whose weights, gradients and messages are fp32.

    Args:
        run: the run.
        compute_dtype: of activations and most matmuls; absent: the run's. Another, such as fp64 to
            verify a layout, keeps weights, gradients and optimizer states as they are.
    """

    def __init__(self, run: Run, compute_dtype: torch.dtype | None = None) -> None:
        own = torch_dtype(run.precision.formats.compute)
        self.compute_dtype = compute_dtype or own
        self._run = run
        is_own = self.compute_dtype == own
        self._kept = run if is_own else change(run, {"precision.kind": "fp32"})

    def convert_matmuls(self, model: GPT) -> None:
        """Replaces matmuls of blocks."""
        convert_to_float8(model, self._run)

    def convert_weights(self, model: GPT) -> None:
        """Rounds the initial weights of blocks to the format they are kept in."""
        weight = self._kept.precision.formats.matrices.weight
        if weight != FP32:
            model.blocks.to(torch_dtype(weight))

    @property
    def reduces_in_8_bits(self) -> bool:
        """Whether ranks send gradients of blocks in 8 bits."""
        return self._kept.precision.formats.reduced.is_scaled

    @property
    def reduces_in_bf16(self) -> bool:
        """Whether ranks send all gradients in bf16."""
        return self._kept is self._run and self._run.parallel.reduce_format == "bf16"

    def gathered_in_fp8(self, model: GPT) -> list[nn.Module]:
        """Lists the blocks whose weights ranks send in fp8."""
        gathers = self._run.precision.fp8.all_gather and self._run.parallel.shards_state
        return [*blocks_in_fp8(model, self._run).values()] if gathers else []

    def stored(self, name: str, n_dimensions: int) -> Stored:
        """Returns the formats of a parameter between steps."""
        return self._kept.stored(name.startswith("blocks."), n_dimensions)


def warn_of_slow_precision(run: Run, device: torch.device) -> None:
    """Warns of matmuls that are slower on a device than those of fp32."""
    compute = run.precision.formats.compute
    if run.precision.formats.multiplies_in_fp8 and run.precision.fp8.emulate:
        logger.warning(
            "precision.fp8.emulate=true computes fp8 matmuls in fp32, slower than "
            "precision.kind=bf16"
        )
    elif compute == BF16 and device.type == "cpu" and not cpu_multiplies_bf16_natively():
        logger.warning(
            "this CPU has no bf16 matmuls: precision.kind=fp32 is several times as fast here"
        )
    elif compute == FP16 and device.type == "cpu":
        logger.warning(
            "few CPUs have fp16 matmuls: precision.kind=fp32 may be 100 times as fast here"
        )


FEW_ROWS = 512
"""An input with more rows is faster with MKL, on a CPU of AMD without AVX-512."""
LEAST_WORK = 2**25
"""Values of a weight times rows, at least 128: with less work, a call of oneDNN takes longer to
begin than it saves."""


class OneDnnProduct(PlainProduct):
    """`F.linear` in fp32 on a CPU by oneDNN, where torch would take Intel's MKL.

    Faster on CPUs of AMD: with AVX-512, and with few rows on all of them
    (docs/decisions/029-onednn.md, with the figures).
    The gradient of the weight stays with MKL: oneDNN would copy its transposed factors.

    Args:
        most_rows: of the input; with more, torch chooses.
    """

    def __init__(self, most_rows: int = sys.maxsize) -> None:
        self.most_rows = most_rows

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Multiplies."""
        n_rows = x.shape[:-1].numel()
        is_small = weight.numel() * max(n_rows, 128) < LEAST_WORK
        # For the compiler weights would have to be constants.
        if torch.compiler.is_compiling() or is_small or n_rows > self.most_rows:
            return super().__call__(x, weight, bias)
        if torch.is_grad_enabled():  # and not inside `multiply_by`
            return multiply_by(self, x, weight, bias)
        # Private: torch's compiler calls it for inference.
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def input_gradient(self, gradient: Tensor, weight: Tensor, /) -> Tensor:
        """Multiplies."""
        return self(gradient, weight.t())  # as of a weight (in, out)


def use_onednn(model: GPT) -> None:
    """Replaces the matmuls of a model on a CPU, if it computes in fp32; the loss keeps its own.

    One step of the backward pass then computes both gradients of a matmul.
    """
    on_cpu = all(weight.is_cpu for weight in model.parameters())  # none is in a simulation of a GPU
    if on_cpu and model.compute_dtype == torch.float32 and has_onednn():
        product = OneDnnProduct() if is_amd_with_avx512() else OneDnnProduct(FEW_ROWS)
        for module in model.modules():
            if isinstance(module, Linear):
                module.product = product
        model.head_product = product


def has_onednn() -> bool:
    """Returns whether this torch has matmuls of oneDNN in fp32."""
    library: Any = torch.backends.mkldnn
    return bool(library.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
