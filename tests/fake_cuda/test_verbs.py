"""The verbs on the fake device, from text to an exported model; saves, loads, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.command import trainyard
from tests.fake_cuda.device import Counts, build_on_device, in_fork
from tests.fake_cuda.steps import DEVICE, SMALL
from tests.waiting import WATCHDOG_SECONDS

from trainyard.bench.measure import OurTraining
from trainyard.config.load import load_run
from trainyard.evaluation.generate import TOKENS_A_WAIT, Sampling, generate
from trainyard.training.checkpoints import build_saver, load_state, save_state

ROOT = Path(__file__).parents[2]
SENTENCE = "Once upon a time there was a small machine that learned to read what people wrote. "
RUN = (
    *("tiny", "name=web", "data.blend.prefixes=['web_text_document']", "data.split=80,10,10"),
    *("tokenizer.path=web_tokenizer", "model.vocabulary_size=512", "model.n_layers=2"),
    *("model.d_model=128", "model.n_heads=2", "model.d_ff=256", "model.sequence_length=64"),
    *("precision.kind=bf16", "train.micro_batch_size=2", "train.global_batch_size=4"),
    *("train.compile=never", "train.length=4 steps", "checkpoint.interval=2"),
    *("evaluate.interval=2", "evaluate.batches=1", "log.interval=1"),
    *("evaluate.sample_interval=2", "evaluate.sample_tokens=3"),
)
PATH = [
    ("evaluate", "runs/web"),
    ("generate", "runs/web", "--prompt", "Once", "--tokens", "5"),
    ("export", "runs/web", "--output", "web-gpt"),
]
OTHERS = {
    "bench": ("bench", "tiny", "--steps", "3", "--warm-up", "1", "train.compile=never"),
    "bench, profiled": (
        *("bench", "tiny", "--steps", "2", "--warm-up", "1", "train.compile=never", "--profile"),
    ),
    "doctor": ("doctor",),
}
REFUSED = {
    "two ranks on one device": (("train", *RUN, "--ranks", "2"), {}, "GPU"),
    "fp8 on sm_80": (
        ("train", *RUN, "precision.kind=fp8", "model.n_layers=3"),
        {"FAKE_CUDA_CAPABILITY": "80"},
        "compute capability 8.9",
    ),
}


def prepare(folder: Path) -> None:
    """Makes token files and a tokenizer."""
    texts = [f"{number} {SENTENCE * (number % 7 + 1)}" for number in range(400)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    call(folder, "prepare", "corpus.jsonl", "--output", "web", "--train-tokenizer", "512")


def call(folder: Path, *words: str, **settings: str) -> str:
    """Runs `trainyard WORDS`, which must succeed; gives all it says."""
    settings["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is zeros, and none an old text
    done = trainyard(*words, folder=folder, **settings)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "fake CUDA" not in said, said
    return said


def test_from_text_to_an_exported_model(tmp_path: Path) -> None:
    prepare(tmp_path)
    call(tmp_path, "train", *RUN)
    for words in PATH:
        call(tmp_path, *words)
    last = tmp_path / "runs/web/checkpoints/step-00000004"
    shutil.rmtree(last)
    assert "resumes at step 2" in call(tmp_path, "train", *RUN)
    assert (last / "manifest.json").exists()
    assert (tmp_path / "web-gpt/model.safetensors").exists()


@pytest.mark.parametrize("stage", ["0", "3"])
def test_two_ranks_train_and_save(stage: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    words = ("train", *RUN, f"parallel.zero_stage={stage}", "--ranks", "2")
    call(tmp_path, *words, FAKE_CUDA_DEVICES="2")
    assert (tmp_path / "runs/web/checkpoints/step-00000004/manifest.json").exists()


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_a_verb_gets_through(words: tuple[str, ...], tmp_path: Path) -> None:
    call(tmp_path, *words)


@pytest.mark.parametrize(("words", "settings", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_words(
    words: tuple[str, ...], settings: dict[str, str], why: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    done = trainyard(*words, folder=tmp_path, **settings)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr and "Traceback" not in done.stderr


# Not fp16, whose loss scale would be 0: the device computes it.
@pytest.mark.parametrize("kind", ["bf16", "fp8_lowbit"])
def test_a_save_in_the_background_is_loaded(kind: str) -> None:
    settings = (f"precision.kind={kind}", "checkpoint.background=true", "train.compile=never")

    def save_and_load() -> int:
        context = build_on_device(load_run("tiny", [*SMALL, *settings]).run, DEVICE)
        training, saver = OurTraining(context), build_saver(context)
        training.step()
        training.step()
        save_state(context, training.state, saver, None)
        training.step()
        saver.wait()
        return load_state(context).step

    assert in_fork(save_and_load, {}) == 2


def test_what_a_gpu_is_tested_for_without_numbers() -> None:
    names = "waits or kernel_of_attention or speed or expandable or memory or full"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_gpu.py"]
    done = subprocess.run(
        [*command, "-k", names, "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stdout


def test_the_gpu_benchmark_is_rehearsed(tmp_path: Path) -> None:
    items = ["device", "products", "greedy text", "gpt ours", "trace of 1.3b cudnn"]
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--fake", "--only", ",".join(items)),
            *("--output", str(tmp_path)),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=WATCHDOG_SECONDS,
    )
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ends = {row["item"]: (row["end"], row["said"]) for row in rows if "end" in row}
    assert ends == dict.fromkeys(items, ("done", ""))
    (timed,) = (row for row in rows if row.get("row") == "gpt ours")
    assert timed["gib"] > 0 and timed["gib_plan"] > 0 and timed["mfu_plan"] > 0


def count_generated(n_tokens: int) -> Counts:
    """Generates two texts; gives what the device was asked for."""
    run = load_run("tiny", [*SMALL, "model.dropout=0", "precision.kind=bf16"]).run
    model = build_on_device(run, DEVICE).model.stages[0]
    before = Counts.now()
    generate(model, [[1, 2, 3], [4, 5]], n_tokens, Sampling())
    return Counts.now().since(before)


def test_a_generated_token_is_one_launch_and_few_wait() -> None:
    few, more = (in_fork(partial(count_generated, n * TOKENS_A_WAIT), {}) for n in (2, 4))
    found = more.since(few)
    assert (found.waits, found.launches) == (2, 2 * (TOKENS_A_WAIT + 1))
