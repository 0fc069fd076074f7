"""`trainyard demo`: the whole way from text to an exported model, on text every machine has.

The corpus is the Python standard library's own source, found through `sysconfig`, so no network is
needed. Each stage prints the command it stands for.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import typer

FOLDER = Path("runs/demo")
VOCABULARY_SIZE = 2048
HELD_OUT_EVERY = 60
# Installed packages, and tables of characters that only look like programs.
NOT_PYTHONS_OWN_WRITING = {"site-packages", "dist-packages", "encodings"}


def demo() -> None:
    """Train a small GPT on Python's own source: text to report in a few minutes, no network.

    Example: trainyard demo

    An interrupted demo continues; a finished one starts anew.
    """
    started = time.monotonic()
    typer.echo(f"Trainyard demo: everything goes to {FOLDER}")
    if (FOLDER / "report.html").exists():
        shutil.rmtree(FOLDER)
    train_text, held_out_text = _write_corpus(FOLDER / "corpus")
    train_prefix, held_out_prefix = _prepare_tokens(train_text, held_out_text)
    _train(train_prefix, held_out_prefix)
    _use(held_out_prefix)
    typer.echo(f"\ndone in {time.monotonic() - started:.0f} s; open {FOLDER}/report.html")


def _write_corpus(folder: Path) -> tuple[Path, Path]:
    """Writes every source file of the standard library as a document; every 60th is held out."""
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if held_out.exists():
        return train, held_out
    folder.mkdir(parents=True, exist_ok=True)
    parts = [path.with_suffix(".partial") for path in (train, held_out)]
    counts = [0, 0]
    with parts[0].open("w", encoding="utf-8") as kept, parts[1].open("w", encoding="utf-8") as out:
        for number, text in enumerate(_standard_library_sources()):
            is_held_out = number % HELD_OUT_EVERY == 0
            (out if is_held_out else kept).write(json.dumps({"text": text}) + "\n")
            counts[is_held_out] += len(text)
    for part, path in zip(parts, (train, held_out), strict=True):
        part.replace(path)
    typer.echo(
        f"corpus: the Python standard library, {counts[0] / 1e6:.1f} MB to learn from, "
        f"{counts[1] / 1e6:.1f} MB held out"
    )
    return train, held_out


def _standard_library_sources() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if NOT_PYTHONS_OWN_WRITING & set(path.parts):
            continue
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files are in other encodings on purpose


def _prepare_tokens(train_text: Path, held_out_text: Path) -> tuple[str, str]:
    from trainyard.cli.prepare import prepare

    prefixes = []
    tokenizer = FOLDER / "data" / "train_tokenizer"
    (FOLDER / "data").mkdir(exist_ok=True)
    for text in (train_text, held_out_text):
        output = FOLDER / "data" / text.stem
        prefix = f"{output}_text_document"
        prefixes.append(prefix)
        if Path(f"{prefix}.json").exists():
            continue
        if text == train_text:
            _announce(f"prepare {text} --output {output} --train-tokenizer {VOCABULARY_SIZE}")
            prepare([str(text)], str(output), train_tokenizer=VOCABULARY_SIZE, overwrite=True)
        else:
            _announce(f"prepare {text} --output {output} --tokenizer {tokenizer}")
            prepare([str(text)], str(output), tokenizer=str(tokenizer), overwrite=True)
    return prefixes[0], prefixes[1]


def _train(train_prefix: str, held_out_prefix: str) -> None:
    from trainyard.cli.train import train
    from trainyard.plan.hardware import cpu_multiplies_bf16_natively

    precision = "bf16" if cpu_multiplies_bf16_natively() else "fp32"
    overrides = [
        f"data.train.prefixes=['{train_prefix}']",
        f"data.valid.prefixes=['{held_out_prefix}']",
        f"tokenizer.path='{FOLDER}/data/train_tokenizer'",
        f"precision.kind={precision}",
    ]
    _announce("train demo " + " ".join(f'"{override}"' for override in overrides))
    train("demo", overrides)


def _use(held_out_prefix: str) -> None:
    from trainyard.cli.evaluate import evaluate
    from trainyard.cli.export import export
    from trainyard.cli.generate import generate
    from trainyard.cli.report import report

    _announce(f"evaluate {FOLDER} --data {held_out_prefix}")
    evaluate(FOLDER, data=held_out_prefix)
    _announce(f'generate {FOLDER} --prompt "def"')
    generate(FOLDER, prompt="def")
    _announce(f"export {FOLDER} --to huggingface --output {FOLDER}/huggingface")
    export(FOLDER, output=FOLDER / "huggingface")
    _announce(f"report {FOLDER}")
    report([FOLDER])


def _announce(command: str) -> None:
    typer.echo(f"\n$ trainyard {command}")
