"""How a GPU computes: choices between kernels, which change results by rounding only."""

from __future__ import annotations

from typing import Literal

from trainyard.config.section import Section

CUDNN_TOKENS = 128
"""cuDNN's attention takes multiples of it: of others, some gave NaN (pytorch/pytorch#196678)."""
CUDNN_HEAD_MULTIPLE, CUDNN_LARGEST_HEAD = 8, 128
"""Sizes of heads that it takes, forward and backward."""
CUDNN_CAPABILITIES = (9, 10)
"""Major compute capabilities where it is expected to be faster than flash attention."""


class Kernels(Section):
    """Kernels of a GPU, where several compute the same; the defaults are the fastest expected."""

    attention: Literal["auto", "flash", "cudnn"] = "auto"
    """Attention without dropout and documents: cuDNN's on GPUs of compute capability 9 and 10, else
    flash attention."""
    swiglu_halves: bool = True
    """Compute gates and values of SwiGLU as two halves, which kernels read in wide words."""
    reduced_precision: bool = False
    """Let matmuls add partial sums in bf16 or fp16 instead of fp32."""
