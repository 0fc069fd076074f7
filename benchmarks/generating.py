"""Tokens per second of greedy decoding, beside `generate` of transformers, in fp32 on a CPU.

    python3 tools/set_up.py bench
    .venv-bench/bin/python benchmarks/generating.py --rounds 5 --output record.json

Both have the same random weights, with a KV cache, and must choose the same tokens. In turn, each
continues one prompt of 32 tokens by 64, then eight such prompts in one batch, then reads a long
prompt in one pass: its rate is that of the prompt's tokens. Limits: for new tokens, how often the
memory can be read as long as all weights are; for a long prompt, the matmuls of the weights at the
rate of one large matmul.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baseline_models import build_transformers
from measuring import Figures, describe_machine, profile_operators, publish

from trainyard.config.devices import is_cpu_of_amd
from trainyard.config.load import load_run
from trainyard.config.run import Model
from trainyard.evaluation.generate import Sampling, generate
from trainyard.model.gpt import GPT, initialize
from trainyard.precision.policy import use_onednn

NEW_TOKENS = 64
PROMPT_TOKENS = 32
MATMUL_SIZE = 2048
CPU = {"vocabulary_size": 50257, "dropout": 0.0}
MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-124M": lambda: load_run("gpt3-125m", []).run.model.model_copy(
        update={**CPU, "sequence_length": 1024}
    ),
    "smollm2-135M": lambda: load_run("smollm2-135m", []).run.model,
    "tiny": lambda: load_run("tiny", []).run.model.model_copy(update={"dropout": 0.0}),
}


def build_cases(model: Model) -> dict[str, tuple[torch.Tensor, int]]:
    """Prompts, (B, T), and the number of new tokens."""
    generator = torch.Generator().manual_seed(1)

    def prompts(n: int, n_tokens: int) -> torch.Tensor:
        return torch.randint(model.vocabulary_size, (n, n_tokens), generator=generator)

    short = min(PROMPT_TOKENS, model.sequence_length // 4)
    n_new = min(NEW_TOKENS, model.sequence_length // 2)
    return {
        "1 prompt": (prompts(1, short), n_new),
        "8 prompts": (prompts(8, short), n_new),
        "long prompt": (prompts(1, model.sequence_length - 24), 1),
    }


def measure_model(model: Model, rounds: int) -> Figures:
    ours = GPT(model, model.vocabulary_size).eval()
    initialize(ours, seed=1)
    theirs: Any = build_transformers(model, ours).eval()
    theirs.generation_config.eos_token_id = None
    if is_cpu_of_amd():
        use_onednn(ours)

    def run_ours(prompts: torch.Tensor, n_new: int) -> list[list[int]]:
        return generate(ours, prompts.tolist(), n_new, Sampling(temperature=0))

    def run_theirs(prompts: torch.Tensor, n_new: int) -> list[list[int]]:
        found = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=n_new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        new: list[list[int]] = found[:, prompts.shape[1] :].tolist()
        return new

    weights = sum(each.numel() * each.element_size() for each in ours.parameters())
    found: Figures = {"weights_megabytes": round(weights / 1e6), "cases": {}}
    flat = torch.ones(weights // 4)
    reads_per_second = 1 / fastest(flat.sum, 5)
    side = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    seconds_of_matmul = fastest(lambda: ours.head_product(side, side), 5)
    gemm_rate = 2 * MATMUL_SIZE**3 / min(seconds_of_matmul, fastest(lambda: side @ side, 5))
    in_blocks = sum(each.numel() for each in ours.blocks.parameters())
    for name, (prompts, n_new) in build_cases(model).items():
        is_long = n_new == 1
        n_tokens = prompts.numel() if is_long else len(prompts) * n_new
        limit = gemm_rate / (2 * in_blocks) if is_long else reads_per_second * len(prompts)
        seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
        texts = {}
        for _ in range(rounds + 1):
            for who, run in (("ours", run_ours), ("transformers", run_theirs)):
                start = time.perf_counter()
                texts[who] = run(prompts, n_new)
                seconds[who].append(time.perf_counter() - start)
        found["cases"][name] = {
            "same_tokens": texts["ours"] == texts["transformers"],
            "limit_tokens_per_second": round(limit, 1),
            "profile": profile_operators(partial(run_ours, prompts, n_new)),
            **{
                who: {
                    "tokens_per_second": round(n_tokens / statistics.median(times[1:]), 1),
                    "best": round(n_tokens / min(times[1:]), 1),
                }
                for who, times in seconds.items()
            },
        }
    return found


def fastest(action: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="gpt2-124M,smollm2-135M")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record = describe_machine(("torch", "transformers")) | {"models": {}}
    with torch.no_grad():
        for name in options.models.split(","):
            record["models"][name] = measure_model(MODELS[name](), options.rounds)
    publish(record, options.output)


if __name__ == "__main__":
    main()
