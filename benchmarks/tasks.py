"""Scores questions with `evaluate --tasks` and with lm-eval, in turn, in one process on the CPU.

    python -m benchmarks.tasks [OUTPUT.json]

It needs lm-eval[hf]. Both score the same 16 made-up questions in HellaSwag's format, 4 endings
each, with the same weights in fp32: 4 blocks of width 256, GPT-2's vocabulary, 256 tokens. To load
the model counts for Trainyard, and not for lm-eval.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.evaluation.lm_eval_scores import save_model

from trainyard.data.tokenizer import Tokenizer
from trainyard.evaluation.likelihood import answer_tasks
from trainyard.evaluation.tasks import read_tasks
from trainyard.evaluation.trained import TrainedRun, open_predictor, read_trained_run
from trainyard.export.huggingface import export_huggingface
from trainyard.launch.environment import Process

N_QUESTIONS, N_ROUNDS = 16, 3
SIZE = ["model.d_model=256", "model.d_ff=1024", "model.sequence_length=256"]
WORDS = ["the", "red", "cat", "dog", "house", "tree", "runs", "sits", "in", "on", "under", "river"]


def write_questions(path: Path) -> None:
    draw = random.Random(1)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    with path.open("w") as file:
        for _ in range(N_QUESTIONS):
            row = {"activity_label": "Made up", "ctx_a": text(30, 90), "ctx_b": text(2, 6)}
            endings = [text(8, 20) for _ in range(4)]
            file.write(json.dumps(row | {"endings": endings, "label": "0"}) + "\n")


def time_it(function: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return {name: N_QUESTIONS / value for name, value in seconds.items()}


def run_ours(trained: TrainedRun, tokenizer: Tokenizer, path: Path) -> Callable[[], object]:
    def run() -> None:
        with open_predictor(trained, Process(), [], "questions") as predictor:
            answer_tasks(predictor, tokenizer, read_tasks([path]), lambda _done, _total: None)

    return run


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = folder / "made_up.jsonl"
        write_questions(path)
        checkpoint = save_model(folder / "run", *SIZE)
        export_huggingface(checkpoint, folder / "gpt")
        own: dict[str, Any] = {
            "include": str(Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"),
            **{"task": "own", "dataset_path": "json", "training_split": None},
            "dataset_kwargs": {"data_files": {"validation": str(path)}, "cache_dir": place},
        }
        (folder / "own.yaml").write_text(json.dumps(own))
        manager = TaskManager(include_path=place, include_defaults=False)
        trained = read_trained_run(checkpoint)
        candidates = {"trainyard": run_ours(trained, trained.require_tokenizer(), path)}
        for size in (4, 32):
            model = HFLM(str(folder / "gpt"), device="cpu", dtype="float32", batch_size=size)
            candidates[f"lm-eval, batches of {size}"] = partial(
                lm_eval.simple_evaluate,
                model,
                tasks=["own"],
                task_manager=manager,
                bootstrap_iters=0,
            )
        rounds = [
            {name: time_it(function) for name, function in candidates.items()}
            for _ in range(N_ROUNDS)
        ]
    medians = {
        name: {
            key: statistics.median(each[name][key] for each in rounds) for key in ("wall", "cpu")
        }
        for name in candidates
    }
    figures = {
        "unit": "questions per second, of wall and of CPU time; medians of the rounds",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "medians": medians,
        "rounds": rounds,
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
