"""The cells and candidates of `cpu_step.py`, which says what they are."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainyard.architecture import matmuls
from trainyard.config.run import Model

Step = Callable[[], float]
PEERS = ("transformers", "transformers-compiled", "litgpt", "litgpt-compiled", "nanoGPT")
ALL = ("ours", *PEERS, "transformers-default", "products")
# Eight processes of 124M parameters do not fit in the memory of a small machine.
FEW = ("ours", "transformers", "transformers-compiled", "litgpt", "nanoGPT", "products")
LEAST = ("ours", "transformers", "litgpt", "nanoGPT", "products")


GPT2 = {"mlp": "gelu"}
LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}
SMALL = {"n_layers": 6, "d_model": 384, "n_heads": 6, "sequence_length": 256}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "10M-4k": GPT2 | SMALL | {"d_ff": 1536, "vocabulary_size": 4096},
        "10M-50k": GPT2 | SMALL | {"d_ff": 1536, "vocabulary_size": 50304},
        "124M-50k": GPT2
        | {"n_layers": 12, "d_model": 768, "n_heads": 12, "sequence_length": 512}
        | {"d_ff": 3072, "vocabulary_size": 50304},
    },
    "llama": {
        "10M-4k": LLAMA | SMALL | {"n_key_value_heads": 2, "d_ff": 1024, "vocabulary_size": 4096},
        "10M-50k": LLAMA | SMALL | {"n_key_value_heads": 2, "d_ff": 1024, "vocabulary_size": 50304},
        # SmolLM2 135M
        "135M-49k": LLAMA
        | {"n_layers": 30, "d_model": 576, "n_heads": 9, "n_key_value_heads": 3}
        | {"sequence_length": 512, "d_ff": 1536, "vocabulary_size": 49152, "rotary_base": 1e5},
    },
}
TINY = {"n_layers": 1, "d_model": 32, "n_heads": 4, "sequence_length": 16}
TINY |= {"d_ff": 128, "vocabulary_size": 96}


@dataclass(frozen=True)
class Cell:
    family: str
    fields: dict[str, Any]
    """Of `[model]`."""
    n_sequences: int
    dtype: str
    candidates: tuple[str, ...]

    @cached_property
    def model(self) -> Model:
        return Model(**self.fields, dropout=0.0)

    @property
    def n_tokens(self) -> int:
        return self.n_sequences * self.model.sequence_length

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """How often each product occurs, its inputs and its outputs."""
        model = self.model
        layers = [(model.n_layers, each.n_inputs, each.n_outputs) for each in matmuls(model)]
        return [*layers, (1, model.d_model, model.vocabulary_size)]

    @property
    def product_gflop(self) -> float:
        return 6e-9 * self.n_tokens * sum(math.prod(product) for product in self.products)

    @property
    def gflop(self) -> float:
        model = self.model
        square = self.n_tokens * model.sequence_length * model.n_heads * model.d_head
        return self.product_gflop + 12e-9 * model.n_layers * square


def name_cells() -> dict[str, Cell]:
    cells = {}
    for family, shapes in SHAPES.items():
        tiny = {"tiny": shapes["10M-4k"] | TINY}
        both = itertools.product(("float32", "bfloat16"), (shapes | tiny).items())
        for dtype, (name, fields) in both:
            is_large = fields["n_layers"] > 6
            few = FEW if is_large or dtype == "bfloat16" else ALL
            candidates = LEAST if name == "tiny" else few
            # Nine processes with all their logits must fit in 24 GB.
            n_sequences = 8 if fields["vocabulary_size"] > 10_000 else 16
            if is_large or name == "tiny":
                n_sequences = 2
            cells[f"{family}-{name}-{dtype}"] = Cell(family, fields, n_sequences, dtype, candidates)
    return cells


CELLS = name_cells()


def batch(cell: Cell) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (cell.n_sequences, cell.model.sequence_length + 1)
    ids = torch.randint(0, cell.model.vocabulary_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_our_model(cell: Cell) -> Any:
    import torch

    from trainyard.model.gpt import GPT, initialize

    model = GPT(cell.model, cell.model.vocabulary_size, getattr(torch, cell.dtype))
    initialize(model, seed=1)
    return model


def build_ours(cell: Cell) -> Step:
    from trainyard.config.devices import is_amd_with_avx512
    from trainyard.config.run import Optimizer
    from trainyard.optim.adamw import AdamW
    from trainyard.optim.clip import StepStats, norms_of
    from trainyard.precision.policy import use_onednn

    model = build_our_model(cell)
    if is_amd_with_avx512():
        use_onednn(model)
    optimizer = AdamW(list(model.parameters()), Optimizer(learning_rate=1e-4))
    tokens, labels = batch(cell)

    def step() -> float:
        hidden = model(tokens)
        loss = model.summed_loss(hidden, labels, 1 / labels.numel())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = norms_of(gradients).square().sum().sqrt().float()
        divisor = StepStats(loss, norm, loss.new_ones(())).divisor(1.0)
        optimizer.step(1e-4, divisor, (~norm.isfinite()).float())
        model.zero_grad()
        return float(loss)

    return step


def build_peer_model(cell: Cell, candidate: str) -> Any:
    from baseline_models import build_litgpt, build_transformers

    if candidate == "nanoGPT":
        return build_nanogpt(cell.model, build_our_model(cell))
    if candidate.startswith("litgpt") and cell.family == "gpt2":
        return build_similar_litgpt(cell.model)
    build = build_litgpt if candidate.startswith("litgpt") else build_transformers
    model: Any = build(cell.model, build_our_model(cell))
    if candidate.endswith("-default") and cell.family == "gpt2":
        from transformers.activations import ACT2FN

        for block in model.get_submodule("transformer.h").children():
            block.mlp.act = ACT2FN["gelu_new"]
    return model


def build_similar_litgpt(model: Model) -> Any:
    """Builds what litgpt has that is most like our GPT-2."""
    import torch
    from litgpt import GPT, Config

    config = Config(
        block_size=model.sequence_length,
        n_layer=model.n_layers,
        n_embd=model.d_model,
        n_head=model.n_heads,
        padded_vocab_size=model.vocabulary_size,
        parallel_residual=False,
        gelu_approximate="tanh",
    )
    torch.manual_seed(1)
    theirs = GPT(config)
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    theirs.lm_head.weight = theirs.transformer.wte.weight
    return theirs


def build_nanogpt(model: Model, ours: Any) -> Any:
    """Builds nanoGPT with our weights, found in the PYTHONPATH."""
    from model import GPT, GPTConfig
    from trainyard.export.families import GPT2

    config = GPTConfig(
        block_size=model.sequence_length,
        vocab_size=model.vocabulary_size,
        n_layer=model.n_layers,
        n_head=model.n_heads,
        n_embd=model.d_model,
    )
    with contextlib.redirect_stdout(sys.stderr):
        theirs = GPT(config)
    weights: dict[str, Any] = {}
    for name, parameter in ours.named_parameters():
        weights |= GPT2.to_theirs(name, parameter.detach(), model)
    for name, parameter in theirs.named_parameters():
        # transformers keeps the matrices of GPT-2 transposed.
        is_transposed = name.startswith("transformer.h.") and parameter.ndim == 2
        parameter.data.copy_(weights[name].t() if is_transposed else weights[name])
    return theirs


def build_peer(cell: Cell, candidate: str) -> Step:
    import torch
    import torch.nn.functional as F

    default = candidate.endswith("-default")
    lit = candidate.startswith("litgpt")
    model = build_peer_model(cell, candidate).train()
    run = torch.compile(model) if candidate.endswith("-compiled") else model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {} if default else {"fused": True}
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), **options)
    if candidate == "nanoGPT":
        with contextlib.redirect_stdout(sys.stderr):
            optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    tokens, labels = batch(cell)
    low = cell.dtype == "bfloat16" and not default
    precision = torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()

    def step() -> float:
        with precision:
            if candidate == "nanoGPT":
                _, loss = run(tokens, labels)
            else:
                out = run(tokens)
                logits = (out if lit else out.logits).flatten(0, 1)
                loss = F.cross_entropy(logits.float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def build_products(cell: Cell) -> Step:
    """Times one block's products and a quarter of the head's; gives seconds for the whole step."""
    import torch

    every, inputs, outputs = zip(*cell.products, strict=True)
    rows = [cell.n_tokens] * (len(every) - 1) + [cell.n_tokens // 4]
    repeats = [*every[:-1], 4]
    shapes = list(zip(rows, inputs, outputs, strict=True))
    dtype = getattr(torch, cell.dtype)
    sets = [[torch.randn(s).to(dtype) for s in ((m, k), (n, k), (m, n))] for m, k, n in shapes]
    outs = [[torch.empty(s, dtype=dtype) for s in ((m, n), (m, k), (n, k))] for m, k, n in shapes]

    def step() -> float:
        seconds = 0.0
        for (x, w, g), (y, dx, dw), repeat in zip(sets, outs, repeats, strict=True):
            start = time.perf_counter()
            torch.mm(x, w.t(), out=y)
            torch.mm(g, w, out=dx)
            torch.mm(g.t(), x, out=dw)
            seconds += repeat * (time.perf_counter() - start)
        return seconds

    return step


def build(cell: Cell, candidate: str) -> Step:
    if candidate == "products":
        return build_products(cell)
    if candidate == "ours":
        return build_ours(cell)
    return build_peer(cell, candidate)
