"""Fp8 matmuls: the four large ones of a block, forward and backward.

A linear layer becomes three fp8 matmuls with fp32 accumulation; everything else stays bf16:

    output                 input (e4m3)      times  weight (e4m3)
    gradient of input      gradient (e5m2)   times  weight (e4m3)
    gradient of weight     gradient (e5m2)   times  input (e4m3)

e4m3 has 4 significant bits and a maximum of 448, e5m2 has 3 and 57,344. Inputs are scaled by the
largest power of two that keeps their largest magnitude in range, computed anew each time; with
"rowwise" each row has its own scale, and gradients are e4m3 too. Scaling by a power of two is
exact: a value becomes the same in fp8 whatever its neighbours, and so in every layout, unless it is
2**14 times smaller than the largest (e4m3; those lose digits).

    largest 3.0    scale 128    0.3 * 128 = 38.4 -> 40 (steps of 4) -> 40 / 128 = 0.3125

torchao's float8 computes it with torch._scaled_mm, or in fp32 if emulated.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainyard.config.precisions import Fp8
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.model.gpt import GPT, Block
from trainyard.model.linear import Linear, MatmulFunction

FIRST_CAPABILITY = (8, 9)
"""Compute capabilities of NVIDIA GPUs with fp8: Ada, then Hopper."""
_AMD_WITH_FP8 = ("gfx94", "gfx95")


def convert_to_float8(model: GPT, run: Run) -> None:
    """Switches the blocks of a model, or of a part of it, to fp8 matmuls."""
    blocks = blocks_in_fp8(model, run).values()
    if not blocks:
        return
    product = build_product(run.precision.fp8)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Linear):
                module.product = product


def blocks_in_fp8(model: GPT, run: Run) -> dict[str, Block]:
    """Maps numbers to the blocks of `model` with fp8 matmuls; empty in other precisions."""
    chosen = fp8_blocks(run)
    return {
        number: block
        for number, block in model.blocks.items()
        if int(number) in chosen and isinstance(block, Block)
    }


@dataclass(frozen=True)
class _Float8Product:
    """A matmul and its gradients; see `MatmulFunction`."""

    matmul: Callable[[Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        out = self.matmul(x, weight)
        return out if bias is None else out + bias


def build_product(fp8: Fp8) -> MatmulFunction:
    """Builds an fp8 replacement of `F.linear`, for inputs of any precision."""
    with quiet_import():
        from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import (
            GemmInputRole,
            LinearMMConfig,
            ScaledMMConfig,
        )

    # What torchao's own `convert_to_float8_training` does, against NaN in compiled fp8 kernels of
    # torch 2.14 (triton-lang/triton#11111).
    _patch_inductor_min_max_codegen()
    recipe = Float8LinearConfig.from_recipe_name(fp8.scaling)
    config = replace(recipe, emulate=fp8.emulate, round_scales_to_power_of_2=True)
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    kernels = LinearMMConfig(*(ScaledMMConfig(fp8.emulate, gemm.use_fast_accum) for gemm in gemms))
    by_rows = fp8.scaling == "rowwise"

    def cast(x: Tensor, how: Any, role: Any, dimension: int) -> Tensor:
        out: Tensor = hp_tensor_to_float8_dynamic(
            x,
            how.target_dtype,
            kernels,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=dimension if by_rows else None,
            round_scales_to_power_of_2=True,
        )
        return out

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), kernels, config)
        return out

    # As in the backward pass of torchao's own function, which computes both gradients at once.
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        role, rows = GemmInputRole, gradient.flatten(0, -2)
        a = cast(rows, config.cast_config_grad_output, role.GRAD_OUTPUT, -1)
        b = cast(weight.t(), config.cast_config_weight_for_grad_input, role.WEIGHT, -1)
        return torch.mm(a, b.t()).view(*gradient.shape[:-1], -1)

    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        role, rows = GemmInputRole, gradient.flatten(0, -2)
        a = cast(rows, config.cast_config_grad_output_for_grad_weight, role.GRAD_OUTPUT, 0)
        b = cast(x.flatten(0, -2), config.cast_config_input_for_grad_weight, role.INPUT, 0)
        return torch.mm(a.t(), b)

    in_graph = torch.compiler.allow_in_graph  # as torchao's function is
    return _Float8Product(matmul, in_graph(input_gradient), in_graph(weight_gradient))  # type: ignore[no-untyped-call]


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silences torchao's warnings about kernels that we do not use and this machine cannot load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def refuse_device(run: Run, device: torch.device | None = None) -> None:
    """Rejects an fp8 run without torchao, or on a device without fp8 matmuls.

    Args:
        run: with `precision.fp8.emulate`, any device will do.
        device: of this rank; absent: any GPU of this machine.

    Raises:
        ConfigError: torchao is not installed.
        MachineError: names the device, and its compute capability.
    """
    kind = run.precision.kind
    if not run.precision.formats.multiplies_in_fp8:
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"precision.kind={kind!r} needs torchao, which is not installed",
            "pip install torchao, or precision.kind=bf16",
        )
    problem = "" if run.precision.fp8.emulate else _device_problem(device)
    if problem:
        raise MachineError(
            f"precision.kind={kind!r} needs fp8 matmuls: an NVIDIA GPU of compute "
            f"capability 8.9 or higher, or an AMD MI300; {problem}",
            "precision.kind=bf16; or precision.fp8.emulate=true, which computes the same, slowly",
        )


def _device_problem(device: torch.device | None) -> str:
    """Describes a device that lacks fp8 matmuls; empty if it has them."""
    if device is None:
        return "" if torch.cuda.is_available() else "this machine has no GPU"
    if device.type != "cuda":
        return f"this is the {device.type.upper()}"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return "" if architecture.startswith(_AMD_WITH_FP8) else f"{name} is {architecture}"
    major, minor = capability = torch.cuda.get_device_capability(device)
    has_fp8 = capability >= FIRST_CAPABILITY
    return "" if has_fp8 else f"{name} has compute capability {major}.{minor}"
