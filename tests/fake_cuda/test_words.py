"""Triton's kernels move memory in wide words, and spill no registers."""

from __future__ import annotations

import logging
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
import triton
from tests.fake_cuda.device import build_on_device, in_fork
from tests.fake_cuda.steps import DEVICE, SMALL

from trainyard.bench.measure import OurTraining
from trainyard.config.load import load_run

RUN = (
    *(*SMALL, "model.n_layers=1", "model.dropout=0", "precision.kind=bf16"),
    "model.vocabulary_size=50000",  # the loss then reads its rows in a loop
)
MODERN = ("model.mlp=swiglu", "model.norm=rms", "model.positions=rotary", "model.bias=false")
BLOCKS = {
    "modern": (MODERN, ("mul_silu", "silu_backward", "rsqrt", "_div_", "stack", "exp")),
    "gpt3": ((), ("gelu_view", "gelu_backward", "layer_norm", "norm_backward", "exp")),
}
"""Settings, and words that names of kernels hold: without one a part was not compiled."""
NARROW = 2
"""Bytes of a narrow word: one value in bf16."""
LARGEST_SHARE = 0.15
"""Of a thread's bytes in narrow words. Outside its loop the loss gathers the logit of each row's
label alone: 0.07, and 0.12 by torch 2.11, whose loop has narrower words."""
ACCESS = re.compile(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s")
SOURCE = re.compile(r'\.file\s+1 "(.*)"')
TARGET = re.compile(r"\.target (\w+)")
STACK = re.compile(r"(\d+) bytes stack frame")
PTXAS = Path(torch.__file__).parent / "bin/ptxas"
"""Inductor takes it where it is there; else Triton its own."""
if not PTXAS.exists():
    PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


@dataclass(frozen=True)
class Kernel:
    """The PTX of a kernel in one configuration."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def source(self) -> str:
        """The file that it was compiled from, like the other configurations of it."""
        (found,) = SOURCE.findall(self.text)
        return str(found)

    @cached_property
    def widths(self) -> Counter[int]:
        """Counts the bytes that a thread loads and stores, by bytes of an instruction."""
        found: Counter[int] = Counter()
        for vector, bits in ACCESS.findall(self.text):
            width = int(vector or 1) * int(bits) // 8
            found[width] += width
        return found

    @property
    def narrow_share(self) -> float:
        return sum(n for width, n in self.widths.items() if width <= NARROW) / self.widths.total()

    @property
    def mean_width(self) -> float:
        return sum(width * n for width, n in self.widths.items()) / self.widths.total()

    @property
    def stack(self) -> int:
        """Bytes of local memory: arrays and spilled registers."""
        (target,) = TARGET.findall(self.text)
        order = [str(PTXAS), "-v", f"--gpu-name={target}", "-o", "/dev/null", str(self.path)]
        said = subprocess.run(order, capture_output=True, text=True, check=True).stderr
        return sum(map(int, STACK.findall(said)))


def train(settings: Sequence[str]) -> None:
    """Does a step; evaluation, which has no casts of its own, reads SwiGLU's pairs as stored."""
    run = load_run("tiny", [*RUN, *settings]).run
    OurTraining(build_on_device(run, DEVICE)).step()


def compile_kernels(folder: Path, settings: Sequence[str]) -> list[Kernel]:
    """Does a step with empty caches; gives each kernel in its widest configuration.

    Inductor times the configurations on the first call, which a fake device cannot.
    """
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    variables = {name: str(folder / cache) for name, cache in caches.items()}
    in_fork(lambda: train(settings), variables)
    widest: dict[str, Kernel] = {}
    for path in sorted(folder.glob("triton/*/*.ptx")):
        kernel = Kernel(path)
        known = widest.setdefault(kernel.source, kernel)
        if kernel.mean_width > known.mean_width:
            widest[kernel.source] = kernel
    return list(widest.values())


def complain(kernels: Sequence[Kernel]) -> list[str]:
    """Logs what each kernel moves; gives those with too many narrow words, or local memory."""
    found = []
    for kernel in kernels:
        line = f"{kernel.path.stem}: bytes by width {dict(sorted(kernel.widths.items()))}"
        line += f", {kernel.narrow_share:.0%} narrow, {kernel.stack} bytes of local memory"
        logging.info(line)
        if kernel.narrow_share > LARGEST_SHARE or kernel.stack:
            found.append(line)
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_words_are_wide_and_registers_enough(name: str, tmp_path: Path) -> None:
    settings, parts = BLOCKS[name]
    kernels = compile_kernels(tmp_path, settings)
    names = [kernel.path.stem for kernel in kernels]
    assert [part for part in parts if not any(part in name for name in names)] == []
    assert complain(kernels) == []


def test_narrow_words_of_pairs_are_seen(tmp_path: Path) -> None:
    found = complain(compile_kernels(tmp_path, (*MODERN, "kernels.swiglu_halves=false")))
    assert found and all("silu" in line for line in found)
