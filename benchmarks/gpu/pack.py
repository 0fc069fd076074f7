"""Gathers what a borrowed machine without network lacks: `python -m benchmarks.gpu --pack FOLDER`.

    *.whl              packages for Python 3.12; torch, triton and numpy are there
    inductor.tar.xz    the compiler's cache, filled by the rehearsal under the device's name
    tokens/            real text, with its tokenizer
    predictions.json   MFU of each timed run by the roofline

Run it in an environment with the fake GPU and the machine's torch: the cache serves no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.runs import DEVICE, PREDICTIONS, RUNS, TOKENS, load

from trainyard.bench.roofline import predict

ROOT = Path(__file__).parents[2]
CACHE = "inductor.tar.xz"
PACKAGES = (
    "annotated-doc annotated-types click gigatoken litgpt markdown-it-py mdurl msgspec pydantic "
    "pydantic_core Pygments rich shellingham tomli_w torchao typer typing-inspection "
    "typing_extensions"
)
"""Of constraints.txt and peers.txt: what the items import, and an image for deep learning lacks.

It has numpy, pytest, hypothesis, tensorboard, transformers and lightning.
"""
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2014", "1")
MOST_BYTES = 60 * 10**6
CORPUS = 5 * 10**6
"""Bytes of token files, at 2 bytes a token."""


def pack(folder: Path, corpus: Path) -> None:
    """Fills a folder, and prints its contents and size.

    Args:
        folder: made anew, but for wheels and cache that are there.
        corpus: JSON Lines of text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    download(folder)
    prepare(folder, corpus)
    store_predictions(folder)
    fill_cache(folder)
    print("\n".join(describe(folder)), flush=True)


def download(folder: Path) -> None:
    """Downloads wheels for the machine's Python, and builds our own."""
    pinned = [*read_pins("constraints.txt"), *read_pins("benchmarks/peers.txt")]
    wanted = {name.lower().replace("-", "_") for name in PACKAGES.split()}
    names = [pin for pin in pinned if pin.split("==")[0].lower().replace("-", "_") in wanted]
    assert len(names) == len(wanted), "a package of PACKAGES has no pin"
    pip = [sys.executable, "-m", "pip"]
    tags = []
    for each in PLATFORMS:
        tags += ["--platform", f"manylinux{'_' if '_' in each else ''}{each}_x86_64"]
    where = ["--python-version", "3.12", "--implementation", "cp", *tags]
    only = ["--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    subprocess.run([*pip, "download", *only, *where, *names], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True)


def read_pins(name: str) -> list[str]:
    """Reads the lines `package==version` of a file."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.split(";")[0].strip() for line in lines if "==" in line and line[0] != "#"]


def prepare(folder: Path, corpus: Path) -> None:
    """Makes token files of the beginning of a corpus."""
    target = folder / TOKENS
    target.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as name:
        part = Path(name) / "text.jsonl"
        with corpus.open(encoding="utf-8") as lines, part.open("w", encoding="utf-8") as to:
            n_bytes = 0
            for line in lines:
                to.write(line)
                n_bytes += len(line)
                if n_bytes > 2 * CORPUS:  # 4 bytes of text are a token of 2 bytes
                    break
        words = [
            "prepare",
            str(part),
            "--output",
            str(target),
            "--tokenizer",
            "gpt2",
            "--overwrite",
        ]
        subprocess.run([sys.executable, "-P", "-m", "trainyard.cli", *words], check=True)
    target.with_suffix(".toml").unlink()  # names this machine's folders


def store_predictions(folder: Path) -> None:
    """Writes the roofline's MFU of each run."""
    names = [name for name, timed in RUNS.items() if not timed.baseline]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(names, pool.map(_predict, names), strict=True))
    (folder / PREDICTIONS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _predict(name: str) -> float:
    return predict(load(name, is_small=False), DEVICE).mfu


def fill_cache(folder: Path) -> None:
    """Rehearses all items; keeps the graphs that were compiled."""
    with TemporaryDirectory() as name:
        inductor = Path(name) / "inductor"
        command = [sys.executable, "-m", "benchmarks.gpu", "--fake", "--output", "runs/gpu-pack"]
        triton = str(Path(name) / "triton")
        settings = {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": triton}
        subprocess.run(
            [*command, "--packed", str(folder)], check=True, env=os.environ | settings, cwd=ROOT
        )
        for chosen in inductor.rglob("*.best_config"):
            chosen.unlink()  # by timings of a fake device
        with tarfile.open(folder / CACHE, "w:xz") as archive:
            for part in ("fxgraph", "aotautograd"):
                archive.add(inductor / part, part)


def describe(folder: Path) -> Iterator[str]:
    """Yields a line for each file, and the sum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        yield f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(folder)}"
    n_bytes = sum(path.stat().st_size for path in files)
    fits = "fits" if n_bytes <= MOST_BYTES else "TOO LARGE"
    yield f"{n_bytes / 1e6:8.2f} MB in all, {fits}: at most {MOST_BYTES / 1e6:.0f} MB"
