"""Peak memory of a `prepare` worker, under a limit, on a corpus twenty times that limit.

    python benchmarks/memory.py novels.jsonl gpt2/ --scratch . --output record.json

The corpus is packed (.jsonl.zst), so that it need not lie on the disk; shuffled letters make most
of its words new, which is the hard case for a tokenizer's cache. The kernel's limit on private
memory (`ulimit -d`) is set below the goal of 600 MB: a worker that wants more dies. Beside it,
hostile corpora without a limit: one word or one character as long as a document may be, and others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zstandard
from measuring import Figures, describe_machine, measure, render

LIMIT_BYTES = 560 * 10**6
LONGEST_TEXT = 32 * 2**20 - 100


def fresh_documents(novels: list[str], n_bytes: int) -> Iterator[str]:
    """Novels over and over, each time with their letters shuffled among themselves."""
    choice = random.Random(1)
    made = 0
    while made < n_bytes:
        letters = list(string.ascii_lowercase)
        choice.shuffle(letters)
        table = str.maketrans(string.ascii_lowercase, "".join(letters))
        for novel in novels:
            text = novel.translate(table)
            made += len(text)
            yield text


def hostile_documents() -> dict[str, list[str]]:
    choice = random.Random(2)
    letters = string.ascii_letters
    words = " ".join("".join(choices(choice, letters, 9)) for _ in range(3_000_000))
    return {
        "one word": [("".join(choices(choice, letters, 1 << 20)) * 33)[:LONGEST_TEXT]],
        "one letter": ["a" * LONGEST_TEXT],
        "newlines": ["\n" * (LONGEST_TEXT // 2)],
        "NULs": ["\0" * (LONGEST_TEXT // 6)],
        "prose and one emoji": [
            "\U0001f600" + ("It was a dark and stormy night. " * 2**20)[:LONGEST_TEXT]
        ],
        "CJK": ["的一是不了人我在有他这中大来上国" * (LONGEST_TEXT // 48)],
        "random words": [words],
        "a million words as documents": words.split()[:1_000_000],
    }


def choices(choice: random.Random, letters: str, count: int) -> list[str]:
    return choice.choices(letters, k=count)


def write(path: Path, documents: Iterator[str] | list[str]) -> int:
    n_bytes = 0
    with path.open("wb") as raw, zstandard.ZstdCompressor(1).stream_writer(raw) as file:
        for text in documents:
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            n_bytes += len(line)
            file.write(line)
    return n_bytes


def run(path: Path, tokenizer: Path, folder: Path, limit_bytes: int | None) -> Figures:
    limit = (
        ""
        if limit_bytes is None
        else f"resource.setrlimit(resource.RLIMIT_DATA, ({limit_bytes},) * 2);"
    )
    code = f"import resource;{limit} from trainyard.cli.main import main; main()"
    output = folder / "out"
    output.mkdir()
    arguments = ["prepare", str(path), "-o", str(output / "x"), "--tokenizer", str(tokenizer)]
    figures = measure([sys.executable, "-c", code, *arguments], 1, folder)
    shutil.rmtree(output)
    return {key: round(value, 1) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--times", type=float, default=20)
    parser.add_argument("--scratch", type=Path, default=Path())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer.resolve()
    lines = arguments.corpus.read_text(encoding="utf-8").splitlines()
    novels = [json.loads(line)["text"] for line in lines]
    cases = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch.resolve()) as name:
        folder = Path(name)
        for title, documents in hostile_documents().items():
            path = folder / "hostile.jsonl.zst"
            n_bytes = write(path, documents)
            figures = run(path, tokenizer, folder, None)
            cases.append({"corpus": title, "megabytes": n_bytes / 1e6, "limit": None, **figures})
            print(json.dumps(cases[-1]), flush=True)
        # Several files, as a single packed one is one unit of work.
        inputs = folder / "in"
        inputs.mkdir()
        total = int(arguments.times * LIMIT_BYTES)
        n_files = max(1, total // 10**9)
        made = sum(
            write(inputs / f"{number}.jsonl.zst", fresh_documents(novels, total // n_files))
            for number in range(n_files)
        )
        figures = run(inputs, tokenizer, folder, LIMIT_BYTES)
        title = f"{made / LIMIT_BYTES:.1f} times the limit"
        cases.append({"corpus": title, "megabytes": made / 1e6, "limit": LIMIT_BYTES, **figures})
        print(json.dumps(cases[-1]), flush=True)
    record = {
        **describe_machine(("gigatoken", "msgspec", "numpy", "zstandard")),
        "resident_limit": re.sub(
            r"\s+", " ", f"RLIMIT_DATA, {resource.RLIMIT_DATA}: {LIMIT_BYTES}"
        ),
        "cases": cases,
    }
    if arguments.output:
        arguments.output.write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
