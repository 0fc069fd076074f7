"""lm-eval's own figures of the items in `tasks/`, from an exported folder.

`python -m tests.evaluation.lm_eval_scores FILE` writes them, as in `tasks/lm_eval.json`, the golden
file; it needs lm-eval[hf]. The tasks are those that lm-eval ships, pointed at local files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainyard.architecture import padded_vocabulary_size
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import save_checkpoint
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.export.huggingface import export_huggingface
from trainyard.model.gpt import GPT, initialize

ROOT = Path(__file__).parents[2]
ITEMS = Path(__file__).parent / "tasks"
GOLDEN = ITEMS / "lm_eval.json"
# The files of lm-eval's tasks.
TASKS = {
    "lambada": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc": "arc/arc_easy.yaml",
    "winogrande": "winogrande/default.yaml",
    "blimp": "blimp/adjunct_island.yaml",
}
SCORES = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "perplexity")
SETTINGS = [
    *("model.d_model=64", "model.d_ff=128", "model.n_layers=4", "model.init_std=0.05"),
    *("model.vocabulary_size=50257", "model.sequence_length=128", "tokenizer.path=gpt2"),
    *("train.micro_batch_size=4", "train.global_batch_size=4"),
]


def save_model(run_folder: Path, *overrides: str) -> Path:
    """Saves weights from a seed: near copies of the token before are the likeliest next ones."""
    run = load_run("tiny", [*SETTINGS, *overrides]).run
    return save_random(run, run_folder, step=3, seed=5, scales={"embedding.weight": 4.0})


def save_random(run: Run, folder: Path, step: int, seed: int, scales: dict[str, float]) -> Path:
    """Saves the initial weights of a seed as a checkpoint, some of them scaled; "" is for all."""
    model = GPT(run.model, padded_vocabulary_size(run.model))
    initialize(model, seed)
    tensors = {
        f"model.{name}": value.detach() * scales.get(name, scales.get("", 1.0))
        for name, value in model.named_parameters()
    }
    facts = Facts(
        step=step, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json")
    )
    folder.mkdir(parents=True, exist_ok=True)
    return save_checkpoint(folder / "checkpoints", facts, tensors)


def measure(checkpoint: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns lm-eval's scores by task, and of every item its log-likelihoods and decisions."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    export_huggingface(checkpoint, folder / "gpt")
    for name, path in TASKS.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in their_rows(name)), encoding="utf-8"
        )
        settings = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / path),
            "task": f"own_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            **{"training_split": None, "validation_split": None, "test_split": "test"},
            "dataset_kwargs": {
                "data_files": {"test": str(folder / f"{name}.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")
    model = HFLM(str(folder / "gpt"), device="cpu", dtype="float32", batch_size=4)
    found = lm_eval.simple_evaluate(
        model,
        tasks=[f"own_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=2,
        log_samples=True,
    )
    return {
        name: {
            "scores": {key: found["results"][f"own_{name}"].get(f"{key},none") for key in SCORES},
            "items": [_item(each) for each in found["samples"][f"own_{name}"]],
        }
        for name in TASKS
    }


def _item(sample: dict[str, Any]) -> dict[str, Any]:
    responses = [each for responses in sample["resps"] for each in responses]
    return {
        "log_likelihoods": [float(each[0]) for each in responses],
        "greedy": [str(each[1]) == "True" for each in responses],
        "acc": float(sample["acc"]),
        **({"acc_norm": float(sample["acc_norm"])} if "acc_norm" in sample else {}),
    }


def their_rows(name: str) -> list[dict[str, Any]]:
    """Returns the items with the columns of the Hugging Face Hub, which lm-eval reads."""
    lines = (ITEMS / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    for row in rows:
        if name == "hellaswag":
            row["label"] = str(row["label"])
        if name == "arc":
            question = row.pop("question")
            choices = {key: [c[key] for c in question["choices"]] for key in ("text", "label")}
            row |= {"question": question["stem"], "choices": choices}
        if name == "blimp":
            row.pop("UID", None), row.pop("field", None)
    if name == "piqa":
        labels = (ITEMS / "piqa-labels.lst").read_text().split()
        rows = [row | {"label": int(label)} for row, label in zip(rows, labels, strict=True)]
    return rows


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
    with tempfile.TemporaryDirectory() as place:
        found = measure(save_model(Path(place) / "run"), Path(place))
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
