"""Forty mistakes of new users: what Trainyard answers, its exit code and time, before and after.

    python -m benchmarks.mistakes --before OTHER_CHECKOUT    a few minutes; writes record and page
    python -m benchmarks.mistakes                            the same, "before" as it was recorded
    python -m benchmarks.mistakes --page                     the page alone, from its record

Each command is a real process in a fresh copy of one small folder: a book, token files, a run of
four steps, and files as other programs leave them. OTHER_CHECKOUT has its own `.venv`. The time is
the median of three starts; a command that takes over three seconds runs once.
tests/cli/test_mistakes.py holds each answer to its exit code and its phrase.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "2026-11-25-mistakes.json"
PAGE = ROOT / "docs" / "mistakes.md"
STARTS = 3
SLOW_SECONDS = 3.0


class Mistake(NamedTuple):
    """What a user types after `trainyard`, and a phrase that the answer must have."""

    typed: str
    phrase: str
    code: int = 2


MISTAKES: dict[str, list[Mistake]] = {
    "The command": [
        Mistake("traiin small.toml", "Did you mean 'train'?"),
        Mistake("train", "missing argument 'run_file'"),
        Mistake("train small.toml --epochs 3", "no such option: --epochs"),
        Mistake("plan gpt3-13b --gpus four", "invalid value for '--gpus'"),
        Mistake("generate small --temperature hot", "invalid value for '--temperature'"),
    ],
    "The run file": [
        Mistake("plan gtp3-13b", "did you mean the preset gpt3-13b?"),
        Mistake("train smalll.toml", "no run file smalll.toml"),
        Mistake("train run.yaml", "a run file is TOML"),
        Mistake("train book.txt", "book.txt is not a run file"),
        Mistake("train corpus", "no run.toml in the folder corpus"),
        Mistake("train unquoted.toml", "texts need quotes"),
        Mistake("train british.toml", "did you mean 'optimizer'?"),
        Mistake("show notepad.toml", "notepad", 0),
        Mistake("show powershell.toml", "save it as UTF-8 text"),
    ],
    "Fields and values": [
        Mistake("train small.toml optimizer.lr=3e-4", "did you mean 'optimizer.learning_rate'?"),
        Mistake("train small.toml learning_rate=3e-4", "did you mean 'optimizer.learning_rate'?"),
        Mistake("train small.toml model.n_layers 4", "not of the form section.field=value"),
        Mistake("train small.toml model.n_layers=twelve", "valid integer (got 'twelve')"),
        Mistake("train small.toml train.length=500", "write an amount and a unit"),
        Mistake("train small.toml model.n_heads=5", "nearest n_heads that divides: 4"),
        Mistake("train small.toml train.global_batch_size=6", "train.micro_batch_size=3"),
        Mistake("train small.toml name=new model.vocabulary_size=100", "model.vocabulary_size=300"),
    ],
    "Text and token files": [
        Mistake("prepare bok.txt -o new", "bok.txt does not exist"),
        Mistake("prepare empty.txt -o new", "the corpus is empty"),
        Mistake("prepare latin1.txt -o new", "iconv -f LATIN1 -t UTF-8"),
        Mistake("prepare papers -o new", "only 1 .pdf"),
        Mistake("prepare pages.jsonl -o new", "the keys are: content"),
        Mistake("prepare book.txt -o web --tokenizer gpt2", "pass --overwrite, or another"),
        Mistake("prepare --fetch -o new", "--fetch needs a corpus"),
        Mistake(
            "train small.toml name=new \"data.blend.prefixes=['web']\"",
            "the prefix web_text_document",
        ),
        Mistake("train tiny", "there is nothing to train on"),
    ],
    "Runs and checkpoints": [
        Mistake("train small.toml --resume never", "--resume never would mix two runs"),
        Mistake("train small.toml model.d_model=128", "model.d_model: 64 in the checkpoint"),
        Mistake("train small.toml name=new train.start_from=small@99", "its checkpoints: 4"),
        Mistake("generate smalll", "did you mean small?"),
        Mistake("evaluate small --data bok.txt", "bok.txt does not exist"),
        Mistake("export small --output corpus", "corpus already exists"),
        Mistake("import corpus --output runs/new", "corpus is neither a folder with config.json"),
        Mistake("check checkpoint smalll", "did you mean small?"),
    ],
    "Machines": [
        Mistake(
            "train small.toml name=new model.sequence_length=300_000", "does not fit in memory"
        ),
        Mistake("plan gpt3-175b --gpu h100-80g --gpus 8", "no layout fits"),
        Mistake("train small.toml name=new --ranks 3", "nearest that works: 2 ranks"),
        Mistake("launch small.toml --cluster lummi", "did you mean lumi?"),
    ],
}

RUN_FILE = """name = "small"
extends = "tiny"

[data.blend]
prefixes = ["web_text_document"]

[tokenizer]
path = "web_tokenizer"
"""
WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain"),
    *("falls", "on", "old", "roofs", "and", "children", "sing"),
]


def write_files(folder: Path) -> None:
    """Writes what users have: a book, run files, and files as other programs leave them."""
    choose = random.Random(20)
    paragraphs = (" ".join(choose.choices(WORDS, k=60)) for _ in range(200))
    (folder / "corpus").mkdir(parents=True)
    (folder / "papers").mkdir()
    for name, content in {
        "book.txt": "\n\n".join(paragraphs).encode(),
        "corpus/one.txt": b"A text.\n",
        "empty.txt": b"",
        "latin1.txt": b"na\xefve caf\xe9\n",
        "papers/paper.pdf": b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n",
        "pages.jsonl": b'{"content": "hello"}\n',
        "small.toml": RUN_FILE.encode(),
        "notepad.toml": b'\xef\xbb\xbfname = "notepad"\nextends = "tiny"\n',
        "powershell.toml": 'extends = "tiny"\n'.encode("utf-16"),
        "unquoted.toml": b'extends = "tiny"\n\n[train]\nlength = 500 steps\n',
        "british.toml": b'extends = "tiny"\n\n[optimiser]\nlearning_rate = 3e-4\n',
        "run.yaml": b"extends: tiny\n",
    }.items():
        (folder / name).write_bytes(content)


def make_run(start: Callable[[str], Any]) -> None:
    """Prepares the book and trains `small` for four steps; `start` runs one command."""
    start("prepare book.txt -o web --train-tokenizer 300")
    start("train small.toml train.length='4 steps' evaluate.batches=1")


def measure(checkout: Path) -> dict[str, dict[str, Any]]:
    """Types every mistake with the Trainyard of a checkout; gives each answer by what is typed."""
    program = checkout / ".venv" / "bin" / "trainyard"
    answers = {}
    with tempfile.TemporaryDirectory(prefix="trainyard-mistakes-") as name:
        whole = Path(name) / "whole"
        write_files(whole)

        def start(words: str, folder: Path = whole) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [program, *shlex.split(words)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )

        make_run(start)
        for mistake in (each for group in MISTAKES.values() for each in group):
            seconds: list[float] = []
            while len(seconds) < STARTS and max(seconds, default=0) < SLOW_SECONDS:
                folder = Path(shutil.copytree(whole, Path(name) / "folder"))
                started = time.monotonic()
                done = start(mistake.typed, folder)
                seconds.append(time.monotonic() - started)
                answer = (done.stderr or done.stdout).replace(str(folder), "/home/me").strip()
                shutil.rmtree(folder)
            answers[mistake.typed] = {
                "exit_code": done.returncode,
                "seconds": round(statistics.median(seconds), 2),
                "answer": answer.splitlines()[-6:] if "Traceback" in answer else shorten(answer),
            }
            print(mistake.typed, answers[mistake.typed], flush=True)
    return answers


def shorten(answer: str, most: int = 4) -> list[str]:
    """Returns the first lines of an answer, each of at most 300 characters."""
    return [line if len(line) <= 300 else f"{line[:297]}..." for line in answer.splitlines()[:most]]


PAGE_HEAD = """# Mistakes

What new users type wrong, and what Trainyard answers. Exit code 2 says that the user can fix it.
Each command ran in a folder with a book, its token files, a run `small` of four steps, and files as
other programs leave them (`benchmarks/mistakes.py` makes it).
"Before" is commit {before} on {date_before}, "now" {now} on {date}: exit code and seconds, the
median of three starts (one start if over three seconds) on {machine}. Starting Python and the
command line takes about {floor} of these seconds. What a checkpoint or the memory decides takes
longer: it imports torch.

Written by `python -m benchmarks.mistakes` from `benchmarks/records/{record}`.
"""


def page() -> str:
    """Returns docs/mistakes.md, from its record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    facts = {key: record[key] for key in ("before", "date_before", "now", "date", "machine")}
    floor = min(each["seconds"] for each in record["answers_now"].values())
    parts = [PAGE_HEAD.format(**facts, floor=floor, record=RECORD.name)]
    for title, mistakes in MISTAKES.items():
        parts.append(f"\n## {title}\n\n| typed | answer | now | before |\n|---|---|---|---|\n")
        for mistake in mistakes:
            now, before = (record[f"answers_{when}"][mistake.typed] for when in ("now", "before"))
            shown = "<br>".join(map(_cell, now["answer"]))
            times = (f"{each['exit_code']}, {each['seconds']:.1f} s" for each in (now, before))
            parts.append(f"| `trainyard {mistake.typed}` | {shown} | {' | '.join(times)} |\n")
    return "".join(parts)


def _cell(line: str) -> str:
    return line.strip().replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    if not arguments.page:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        today = time.strftime("%Y-%m-%d")
        if arguments.before:
            record["before"], record["date_before"] = commit_of(arguments.before), today
            record["answers_before"] = measure(arguments.before)
        record |= {
            "date": today,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "command": "python -m benchmarks.mistakes --before OTHER_CHECKOUT",
            "now": commit_of(ROOT),
            "answers_now": measure(ROOT),
        }
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def commit_of(checkout: Path) -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        words, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
