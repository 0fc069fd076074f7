"""A tree of files with SlimPajama's names, fields and compression, made on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path

import zstandard

SETS = {
    "RedPajamaCommonCrawl": 0.5,
    "RedPajamaC4": 0.25,
    "RedPajamaGithub": 0.1,
    "RedPajamaBook": 0.02,
    "RedPajamaArXiv": 0.04,
    "RedPajamaWikipedia": 0.05,
    "RedPajamaStackExchange": 0.04,
}
WORDS = [first + last for first in ("ba", "no", "ri", "the", "wa") for last in "nsdltrkm"]


def write_slimpajama(folder: Path, n_files: int = 400, documents_per_file: int = 30) -> None:
    """Writes `train/chunk1..10/example_train_N.jsonl.zst`; one document in ten stood before."""
    choice = random.Random(42)
    earlier: list[str] = []
    for number in range(n_files):
        lines = []
        for _ in range(documents_per_file):
            words = choice.choices(WORDS, k=choice.randrange(5, 200))
            text = " ".join(words).capitalize() + "."
            if earlier and choice.random() < 0.1:
                text = choice.choice(earlier)
            earlier.append(text)
            name = choice.choices(list(SETS), list(SETS.values()))[0]
            lines.append(json.dumps({"text": text, "meta": {"redpajama_set_name": name}}))
        chunk = folder / "train" / f"chunk{number % 10 + 1}"
        chunk.mkdir(parents=True, exist_ok=True)
        data = zstandard.compress(("\n".join(lines) + "\n").encode())
        (chunk / f"example_train_{number // 10}.jsonl.zst").write_bytes(data)
