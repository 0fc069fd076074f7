"""Predicts a training step from its kernels, without the device: `trainyard bench --roofline`.

`simulate/kernels.py` counts the kernels; `Machine` in planning/hardware.py prices them, and the
host's time to launch them, as it does for `plan`. A kernel's limit is the longer of FLOP / peak and
bytes / memory bandwidth, by the datasheet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainyard.config.devices import TERA
from trainyard.config.rules import takes_cudnn
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout.flops import model_flops_per_token, model_flops_utilization
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import ALONE, CAST_SPEEDS, CUDNN_SPEED, Machine
from trainyard.simulate.kernels import COMPILED_FORWARD, Kernel, count_kernels

N_SHOWN = 24
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class PricedKernel:
    """Equal kernels of a step."""

    place: str
    name: str
    launches: int
    bytes: int
    flops: int
    limit_seconds: float
    """By datasheet figures."""
    seconds: float
    """Predicted."""
    bound: str
    """By "memory" or by "FLOP"."""


@dataclass(frozen=True)
class Roofline:
    """A predicted step; nothing here is measured."""

    run: str
    device: str
    sequences: int
    micro_batches: int
    kernels: tuple[PricedKernel, ...]
    """The longest first."""
    limit_seconds: float
    device_seconds: float
    host_seconds: float
    """To launch all kernels."""
    step_seconds: float
    limit_mfu: float
    mfu: float


def predict(run: Run, gpu: str) -> Roofline:
    """Predicts a step of train.global_batch_size on one GPU.

    Args:
        run: the run, for one device.
        gpu: a name that `plan --gpu` takes.

    Raises:
        UserError: there is no such GPU, its figures are unknown, or the run needs several.
    """
    machine = find_machine(gpu=gpu).at_speed(ALONE)
    plan = resolve(run)
    if plan.n_ranks > 1:
        raise ConfigError(
            f"--roofline predicts one device; the layout of {run.name} has {plan.n_ranks}",
            "set the parallel sizes to 1: the parts of a layout are in trainyard plan",
        )
    counted = count_kernels(run)
    kernels = price(run, counted, machine)
    device_seconds = sum(kernel.seconds for kernel in kernels)
    limit_seconds = sum(kernel.limit_seconds for kernel in kernels)
    # Passes through compiled blocks: each has one attention in its forward pass, and is called once
    # more in its backward pass, which recomputes inside.
    block_passes = 2 * sum(
        n
        for kernel, n in counted.items()
        if kernel.is_attention and kernel.place == COMPILED_FORWARD
    )
    host = sum(kernel.launches for kernel in kernels), block_passes
    step_seconds = machine.with_host(device_seconds, *host)
    n_tokens = run.train.global_batch_size * run.model.sequence_length
    flops = model_flops_per_token(run.model, plan.padded_vocabulary_size)
    peak = machine.device.peak_flops_per_second(run.precision.kind)
    limit_mfu, mfu = (
        model_flops_utilization(flops, n_tokens / seconds, peak) or 0.0
        for seconds in (limit_seconds, step_seconds)
    )
    return Roofline(
        run=run.name,
        device=machine.device.name,
        sequences=run.train.global_batch_size,
        micro_batches=run.train.global_batch_size // run.train.micro_batch_size,
        kernels=tuple(kernels),
        limit_seconds=limit_seconds,
        device_seconds=device_seconds,
        host_seconds=machine.with_host(0, *host),
        step_seconds=step_seconds,
        limit_mfu=limit_mfu,
        mfu=mfu,
    )


def price(run: Run, kernels: Counter[Kernel], machine: Machine) -> list[PricedKernel]:
    """Prices the kernels of a step; the longest first.

    Raises:
        MachineError: the device's bandwidth, or its peak for a kernel's format, is unknown.
    """
    speed = CUDNN_SPEED if takes_cudnn(run, machine.device.capability) else 1.0
    priced = []
    for kernel, n in kernels.items():
        bytes_limit, flops_limit = kernel.n_bytes / machine.memory_bandwidth, 0.0
        seconds = machine.memory_seconds(kernel.n_bytes)
        if kernel.flops:
            name = str(kernel.dtype).removeprefix("torch.")
            dtype = "fp8" if name.startswith("float8") else _FORMATS.get(name, name)
            flops_limit = kernel.flops / machine.peak(dtype)
            if kernel.is_attention:
                seconds = machine.attention_seconds(kernel.flops, dtype, speed)
            else:
                seconds += machine.matmul_seconds(kernel.flops, dtype)
        elif "log2" in kernel.name:  # a cast to fp8, as scales are powers of two
            seconds /= CAST_SPEEDS[run.precision.fp8.scaling]
        priced.append(
            PricedKernel(
                place=kernel.place,
                name=kernel.name,
                launches=n * kernel.n_launches,
                bytes=n * kernel.n_bytes,
                flops=n * kernel.flops,
                limit_seconds=n * max(bytes_limit, flops_limit),
                seconds=n * seconds,
                bound="memory" if bytes_limit >= flops_limit else "FLOP",
            )
        )
    return sorted(priced, key=lambda kernel: kernel.seconds, reverse=True)


def render(roofline: Roofline) -> Iterator[str]:
    """Yields the lines of a table."""
    kernels = roofline.kernels
    yield (
        f"{roofline.run} on one {roofline.device}: PREDICTED from the kernels of a step, "
        "not measured"
    )
    yield f"{roofline.sequences} sequences in {roofline.micro_batches} micro batches"
    yield ""
    yield f"{'ms':>9}{'limit':>9}{'launches':>10}{'GB':>9}{'TFLOP':>9}  bound   place and kernel"
    for kernel in kernels[:N_SHOWN]:
        yield _line([kernel], f"{kernel.bound:<7} {kernel.place}: {_shorten(kernel.name)}")
    if rest := kernels[N_SHOWN:]:
        yield _line(rest, f"        {len(rest)} other kernels")
    for place in dict.fromkeys(kernel.place for kernel in kernels):
        yield _line([k for k in kernels if k.place == place], f"        all of: {place}")
    yield _line(kernels, "        all on the device")
    yield ""
    launches = sum(kernel.launches for kernel in kernels)
    yield f"the host needs {1000 * roofline.host_seconds:,.1f} ms for {launches:,} launches"
    yield f"predicted step {1000 * roofline.step_seconds:,.1f} ms, MFU {roofline.mfu:.1%}"
    yield (
        f"limit of these kernels by the datasheet: {1000 * roofline.limit_seconds:,.1f} ms, "
        f"MFU {roofline.limit_mfu:.1%}"
    )


def _line(kernels: Sequence[PricedKernel], label: str) -> str:
    """Formats the sums of kernels."""
    return (
        f"{1000 * sum(k.seconds for k in kernels):>9.3f}"
        f"{1000 * sum(k.limit_seconds for k in kernels):>9.3f}"
        f"{sum(k.launches for k in kernels):>10,}"
        f"{sum(k.bytes for k in kernels) / 1e9:>9.3f}"
        f"{sum(k.flops for k in kernels) / TERA:>9.3f}  {label}"
    )


def _shorten(name: str) -> str:
    parts = name.split("+")
    return name if len(parts) <= 4 else f"{'+'.join(parts[:4])}+{len(parts) - 4} more"
