"""Speed and memory of `trainyard prepare`, beside Megatron-LM's two preprocessing tools (Linux).

    python3 tools/set_up.py bench
    .venv-bench/bin/python benchmarks/tokenizing.py novels.jsonl --megabytes 1000

Two files are made of the corpus (absent: the source of Python's standard library). "repeated" is
the corpus again and again, so a tokenizer that remembers words knows nearly all of them. In "fresh"
every repetition has its own alphabet for all words outside the 4,096 most frequent, so each brings
as many new words as the first one did; web text lies between the two. Lengths in bytes are the
same.

A case is a whole process held to one core (or two, where it says so), from start to published
files; the cases take turns, round after round. What the default tool does takes minutes a GB, so
it is timed on a slice from the middle of the file and compared by rate. `work_seconds` is a
process's own clock without its imports: ours has none, so ratios called "without its start" favour
the peer. Ours in steady state is what half of a file more takes, joining included: it stands beside
the peer's own clock. MB are 10^6 bytes of text.

The peers are Megatron-LM's real scripts at the commit in `peers.toml`. Where they cannot run they
are left out, and the record says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from measuring import Figures, describe_machine, measure, render, write_source_corpus
from peers import find_peer

from trainyard.data.vocabulary import load_vocabulary

FREQUENT_WORDS = 4096
NOTES = (
    "ours: the installed command `trainyard prepare`; it also syncs its files to the disk and "
    "writes their checksums, which the peers do not",
    "default tool: Megatron-LM's tools/preprocess_data.py --workers 1; work_seconds is by its own "
    "clock, at the rate after its first chunk; its two processes share the one core",
    "fast tool: Megatron-LM's tools/preprocess_data_fast.py --use-gigatoken; work_seconds is by "
    "its own clock, without imports",
    "inputs were just written, so all cases read them from memory",
    "write alone: as many bytes as ids of 16 bits take where four bytes of text make one",
    "peak_mebibytes adds up all processes, sampled; pages they share count more than once",
)


AIMS = {
    "ours on all over default tool without its start": 60,
    "ours in steady state over fast tool without its start": 1.8,
    "two workers over one, in steady state": 1.8,
    "ours over encode alone": 0.4,
}
# The first pattern that a function's name matches says which stage it belongs to.
STAGES = {
    "joining of the parts": r"copy_file_range|sendfile",
    "waiting for other processes": r"poll|'recv|acquire|'select'",
    "checksum": r"hashlib|sha256|crc32|xxh|blake",
    "encode": r"encode_batch",
    "parse": r"msgspec|json|documents\.py|batch\.py|'(split|rfind|join)' of 'bytes'",
    "count bytes of text": r"'encode' of 'str'|unit\.py: (<genexpr>|count_bytes)",
    "read": r"'read(into)?' of|blocks\.py",
    "write and sync": r"'write' of|fsync|'flush'|truncate|writev",
    "end of document and 16 bits": r"numpy|ufunc|insert|astype|ndarray|_append_eod|array",
}


def ours(corpus: Path, workers: int) -> list[str]:
    command = Path(sys.executable).parent / "trainyard"
    options = ["-o", "out", "--tokenizer", "gpt2", "--workers", str(workers)]
    return [str(command), "prepare", str(corpus), *options]


def other(run: str, corpus: Path, *checkout: str) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).with_name("tokenizing_cases.py")),
        run,
        str(corpus),
        *checkout,
    ]


@dataclass(frozen=True)
class Case:
    """A command, the file it reads, and how many cores it may use."""

    command: list[str]
    text_bytes: int
    cores: int = 1
    rounds: int | None = None


def build_cases(corpus: Path, text_bytes: int, folder: Path, options: Any) -> dict[str, Case]:
    """The cases of one file; `folder` takes the slice and the file of one document."""
    middle, one, half = (folder / f"{name}.jsonl" for name in ("slice", "one", "half"))
    slice_bytes = cut_slice(corpus, middle, options.slice_megabytes * 10**6)
    one_bytes = cut_slice(corpus, one, 1)
    half_bytes = cut_slice(corpus, half, corpus.stat().st_size // 2)
    cases = {
        "ours": Case(ours(corpus, 1), text_bytes),
        "ours, two workers": Case(ours(corpus, 2), text_bytes, 2),
        "ours, half": Case(ours(half, 1), half_bytes),
        "ours, two workers, half": Case(ours(half, 2), half_bytes, 2),
        "ours, slice": Case(ours(middle, 1), slice_bytes),
        "ours, one document": Case(ours(one, 1), one_bytes),
    }
    for name in ("encode alone", "read and parse alone", "write alone"):
        cases[name] = Case(other(name, corpus), text_bytes)
    if options.peers_missing:
        return cases
    fast = other("fast tool", corpus, options.checkout)
    default = other("default tool", middle, options.checkout)
    cases["fast tool"] = Case(fast, text_bytes)
    cases["fast tool, two cores"] = Case(fast, text_bytes, 2)
    cases["default tool, slice"] = Case(default, slice_bytes, rounds=options.default_rounds)
    return cases


def make_repeated(corpus: bytes, repetitions: int, path: Path) -> Figures:
    with path.open("wb") as file:
        for _ in range(repetitions):
            file.write(corpus)
    return {"repetitions": repetitions}


def make_fresh(corpus: bytes, repetitions: int, path: Path) -> Figures:
    """Writes the corpus again and again, with other letters in its rarer words each time."""
    import numpy as np

    # Escapes such as \n are matched first, so that their letters belong to no word.
    found = re.compile(rb'\\u[0-9a-fA-F]{4}|\\.|"text":|[A-Za-z]+')
    counts = Counter(match[0] for match in found.finditer(corpus))
    frequent = {word for word, _ in counts.most_common(FREQUENT_WORDS)}
    data = np.frombuffer(corpus, np.uint8)
    changes = np.zeros(len(data), bool)
    for match in found.finditer(corpus):
        if match[0][:1].isalpha() and match[0] not in frequent:
            changes[match.start() : match.end()] = True
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(corpus)
        for _ in range(repetitions - 1):
            table = np.arange(256, dtype=np.uint8)
            for letters in (b"aeiou", b"bcdfghjklmnpqrstvwxyz"):
                small, other = np.frombuffer(letters, np.uint8), random.permutation(list(letters))
                table[small], table[small - 32] = other, other - 32
            file.write(np.where(changes, table[data], data).data)
    n_rarer = len(counts) - len(frequent)
    return {"repetitions": repetitions, "words_changed_each_time": n_rarer}


def cut_slice(corpus: Path, path: Path, n_bytes: int) -> int:
    """Copies whole lines from the middle on; gives the bytes of their text."""
    text_bytes = written = 0
    with corpus.open("rb") as lines, path.open("wb") as file:
        lines.seek(corpus.stat().st_size // 2)
        lines.readline()
        for line in lines:
            file.write(line)
            written += len(line)
            text_bytes += len(json.loads(line)["text"].encode())
            if written >= n_bytes:
                break
    return text_bytes


def measure_file(corpus: Path, text_bytes: int, folder: Path, options: Any) -> Figures:
    cases = build_cases(corpus, text_bytes, folder, options)
    rows: dict[str, list[Figures]] = {name: [] for name in cases}
    digests: dict[str, list[str]] = {}
    loads = []
    for number in range(options.rounds):
        loads.append(os.getloadavg()[0])
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            case = cases[name]
            if number >= (case.rounds or options.rounds):
                continue
            with scratch(folder, options.tokenizer) as place:
                rows[name].append(measure(case.command, case.cores, Path(place)))
                if number == 0 and name not in ("write alone", "ours, one document"):
                    digests[name] = digest_outputs(Path(place))
            print(f"{corpus.stem} {number} {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    found = {name: summarize(rows[name], cases[name].text_bytes) for name in cases}
    for name in ("ours", "ours, two workers"):
        half = f"{name}, half"
        found[name]["steady_megabytes_per_second"] = steady_rate(
            cases[name].text_bytes - cases[half].text_bytes,
            found[name]["wall_seconds"],
            found[half]["wall_seconds"],
        )
    return {
        "text_megabytes": round(text_bytes / 1e6, 1),
        "slice_megabytes": round(cases["ours, slice"].text_bytes / 1e6, 1),
        "load_average_before_rounds": loads,
        "cases": found,
        "ratios": compare(found),
        "same_bytes": compare_bytes(digests),
        "profile": profile(corpus, folder / "one.jsonl", folder, options),
    }


def write_tokenizer(folder: Path) -> None:
    """Writes the files of GPT-2's tokenizer, which ships with Trainyard."""
    vocabulary = load_vocabulary("gpt2")
    folder.mkdir()
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    lines = ["#version: 0.2", *map(" ".join, vocabulary.merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    # What AutoTokenizer wants to know, and the other files do not say.
    (folder / "config.json").write_text('{"model_type": "gpt2"}')


def scratch(folder: Path, tokenizer: Path) -> tempfile.TemporaryDirectory[str]:
    """Makes a folder with the tokenizer in it, under the name that all cases use."""
    place = tempfile.TemporaryDirectory(dir=folder)
    shutil.copytree(tokenizer, Path(place.name) / "gpt2")
    return place


def digest_outputs(folder: Path) -> list[str]:
    """The sha256 of the .bin and the .idx that a case left; empty where it writes none."""
    digests = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".idx")):
        with path.open("rb") as file:
            digests.append(file_digest(file, "sha256").hexdigest())
    return digests


def compare_bytes(digests: dict[str, list[str]]) -> dict[str, bool]:
    """Whether each case wrote the bytes that ours wrote of the same file."""
    return {
        name: found == digests["ours, slice" if name.endswith("slice") else "ours"]
        for name, found in digests.items()
        if found and name not in ("ours", "ours, slice")
    }


def summarize(rows: list[Figures], text_bytes: int) -> Figures:
    """Gives the least and the median of every figure over the rounds, and rates of text."""
    found: Figures = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        found[key] = {"min": round(min(values), 3), "median": round(statistics.median(values), 3)}
        if key == "wall_seconds":
            found["all_wall_seconds"] = [round(value, 3) for value in values]
        if key.endswith("_seconds"):
            rate = key.replace("_seconds", "_megabytes_per_second")
            found[rate] = {
                "best": round(text_bytes / 1e6 / min(values), 2),
                "median": round(text_bytes / 1e6 / statistics.median(values), 2),
            }
    return found


def steady_rate(n_bytes: int, whole: Figures, half: Figures) -> Figures:
    """The rate of the `n_bytes` that a whole file has more than its half, without start and end."""
    return {
        name: round(n_bytes / 1e6 / (whole[key] - half[key]), 2)
        for name, key in (("best", "min"), ("median", "median"))
        if whole[key] > half[key]  # not so for a few MB
    }


def compare(found: dict[str, Figures]) -> Figures:
    """Gives ratios of rates: of the medians, and of the best rounds."""

    def ratio(first: str, second: str, clocks: tuple[str, str] = ("wall", "wall")) -> Figures:
        keys = [f"{clock}_megabytes_per_second" for clock in clocks]
        rates, others = found[first][keys[0]], found[second][keys[1]]
        return {what: round(rates[what] / others[what], 2) for what in rates if what in others}

    ratios = {
        "ours over encode alone": ratio("ours", "encode alone", ("wall", "work")),
        "two workers over one": ratio("ours, two workers", "ours"),
        "two workers over one, in steady state": ratio(
            "ours, two workers", "ours", ("steady", "steady")
        ),
    }
    if "fast tool" not in found:
        return add_aims(ratios)
    own = ("wall", "work")
    ratios |= {
        "ours over fast tool": ratio("ours", "fast tool"),
        "ours over fast tool without its start": ratio("ours", "fast tool", own),
        "ours in steady state over fast tool without its start": ratio(
            "ours", "fast tool", ("steady", "work")
        ),
        "two workers over fast tool on two cores": ratio(
            "ours, two workers", "fast tool, two cores"
        ),
        "ours on all over default tool on the slice": ratio("ours", "default tool, slice"),
        "ours on all over default tool without its start": ratio(
            "ours", "default tool, slice", own
        ),
        "ours over default tool, both the slice": ratio("ours, slice", "default tool, slice"),
        "memory of the fast tool over ours": {
            "median": round(
                found["fast tool"]["peak_mebibytes"]["median"]
                / found["ours"]["peak_mebibytes"]["median"],
                2,
            )
        },
    }
    return add_aims(ratios)


def add_aims(ratios: Figures) -> Figures:
    return {
        name: figures | ({"aim": AIMS[name]} if name in AIMS else {})
        for name, figures in ratios.items()
    }


def profile(corpus: Path, one: Path, folder: Path, options: Any) -> Figures:
    """Where the time of one worker goes: by stage, less what a file of one document takes."""
    found = []
    for path in (one, one, corpus):  # the first warms what the disk holds of the packages
        with scratch(folder, options.tokenizer) as name:
            command = other("profile", path)
            found.append(measure(command, 1, Path(name))["self_seconds"])
    _, start, all_seconds = found
    seconds = {name: value - start.get(name, 0) for name, value in all_seconds.items()}
    stages: Counter[str] = Counter()
    for name, value in seconds.items():
        stage = next((at for at, pattern in STAGES.items() if re.search(pattern, name)), "other")
        stages[stage] += value
    total = sum(seconds.values())
    return {
        "start_seconds": round(sum(start.values()), 2),
        "seconds_after_start": round(total, 2),
        "shares": {stage: round(value / total, 3) for stage, value in stages.most_common()},
        "largest": {name: round(value, 3) for name, value in Counter(seconds).most_common(20)},
    }


def find_missing_peers(clones: Path | None, folder: Path) -> tuple[str, str]:
    """Returns the checkout of Megatron-LM, and why it cannot run; one of them is empty."""
    found = find_peer("Megatron-LM", clones)
    if isinstance(found, str):
        return "", found
    command = other("imports of Megatron-LM", folder, str(found))
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    return str(found), done.stderr.strip().splitlines()[-1] if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--slice-megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--default-rounds", type=int, default=3, help="of the default tool")
    parser.add_argument("--files", default="repeated,fresh")
    parser.add_argument("--peers", type=Path, help="folder with a clone of Megatron-LM")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure on")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.checkout, options.peers_missing = find_missing_peers(options.peers, Path(folder))
        options.tokenizer = Path(folder) / "gpt2"
        write_tokenizer(options.tokenizer)
        write_source_corpus(path := Path(folder) / "sources.jsonl", min(options.megabytes, 30))
        corpus = (options.corpus or path).read_bytes()
        write_record(corpus, options)


def write_record(corpus: bytes, options: argparse.Namespace) -> None:
    text_bytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.splitlines())
    repetitions = max(1, round(options.megabytes * 1e6 / text_bytes))
    packages = ("gigatoken", "awkward", "tokenizers", "transformers", "numpy", "msgspec")
    record = describe_machine(packages) | {
        "peers_missing": options.peers_missing,
        "notes": NOTES,
        "files": {},
    }
    for name in options.files.split(","):
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            path = Path(folder) / f"{name}.jsonl"
            made = MAKERS[name](corpus, repetitions, path)
            found = measure_file(path, text_bytes * repetitions, Path(folder), options)
        record["files"][name] = made | found
        if options.output:
            options.output.write_text(render(record), encoding="utf-8")
    print(render(record))


MAKERS = {"repeated": make_repeated, "fresh": make_fresh}

if __name__ == "__main__":
    main()
