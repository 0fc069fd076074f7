"""The plan: what to find out, the most valuable first, and how long each may take on an H100.

Their sum is above the time of a call, as most take half of their allowance; what no longer fits is
done by `--continue`.
"""

from __future__ import annotations

from benchmarks.gpu.item import Item


def _run(name: str, allowance: float) -> Item:
    return Item(name, allowance, "benchmarks.gpu.runs:time_run", (name,))


def _device(name: str, allowance: float, function: str) -> Item:
    return Item(name, allowance, f"benchmarks.gpu.device:{function}")


def _check(name: str, allowance: float, function: str, *arguments: str) -> Item:
    return Item(name, allowance, f"benchmarks.gpu.checks:{function}", arguments)


def _trace(name: str, allowance: float) -> Item:
    return Item(f"trace of {name}", allowance, "benchmarks.gpu.runs:time_run", (name, "profiles"))


ITEMS = (
    _device("device", 15, "describe"),
    _check("compiled gradients", 40, "compare_gradients"),
    _device("products", 20, "multiply"),
    _device("attention", 20, "attend"),
    _device("elementwise", 20, "change"),
    _run("1.3b flash", 25),
    _run("1.3b cudnn", 25),
    _check("losses", 40, "compare_losses"),
    _check("resume", 25, "resume"),
    _check("greedy text", 15, "write_greedily"),
    _check("tests gpu", 50, "run_tests", "gpu"),
    _check("tests training", 50, "run_tests", "training"),
    _run("350m micro 16", 20),
    _run("modern-1.3b", 60),
    _run("llama-3.2-1b at 8k", 60),
    _run("350m micro 32", 20),
    _run("1.3b micro 16", 20),
    _run("2.7b", 25),
    _run("1.3b dropout", 25),
    _run("wide bf16", 20),
    _run("wide fp8", 60),
    _run("wide fp8_lowbit", 30),
    _run("gpt ours", 15),
    _run("gpt plain torch", 35),
    _run("gpt transformers", 35),
    _run("llama ours", 20),
    _run("llama transformers", 40),
    _run("llama litgpt", 40),
    _trace("1.3b cudnn", 20),
    _trace("llama-3.2-1b at 8k", 20),
    Item("doctor", 25, "benchmarks.gpu.verbs:examine"),
    Item("train and generate", 60, "benchmarks.gpu.verbs:train"),
    _run("350m muon", 25),
    _run("350m documents", 30),
    _run("125m", 15),
    _run("modern-1.3b pairs", 20),
    _run("1.3b reduced precision", 20),
    _check("tests rest", 120, "run_tests", "rest"),
)
