"""`trainyard demo`: from text to an exported model, on text every machine has.

The corpus is the source of the Python standard library, found through `sysconfig`, so the demo
needs no network. Each stage prints the equivalent command. Training has a time budget: the demo
first measures the machine, and ends training early if it slows down. Every stage runs either way.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import typer

from trainyard import __version__
from trainyard.cli.help import PROGRAM
from trainyard.errors import ConfigError, explain_failure
from trainyard.extras import require
from trainyard.files import publish_text

FOLDER = Path("runs/demo")
RUN_FILE = FOLDER / "demo.toml"
REPORT = FOLDER / "report.html"
FIRST_WORDS = "# Written by trainyard demo"
VOCABULARY_SIZE = 2048
MINUTES = 2.5
MOST_MINUTES = 3.75
HELD_OUT_EVERY = 60
PROMPT = "class Stack:\n    def"
TEMPERATURE = 0.6
# Installed packages, and character tables in the form of programs.
NOT_PYTHONS_OWN_WRITING = {"site-packages", "dist-packages", "encodings"}


def demo() -> None:
    """Train a small GPT on Python's source code, in minutes.

    The whole path from text to report, without a network.

    Example: trainyard demo

    The same command continues an interrupted demo, and restarts a finished one.
    """
    require("torch")
    started = time.monotonic()
    typer.echo(
        "Trainyard demo: trains a small GPT on the Python standard library.\n"
        f"It takes about {MINUTES + 0.7:.0f} minutes on two idle cores, longer on a busy machine; "
        f"all files go to {FOLDER}."
    )
    with explain_failure(f"cannot write to {FOLDER}", "make it writable"):
        _begin()
    try:
        held_out = _write_corpus(FOLDER / "corpus")
        _prepare_tokens()
        _train()
        gzip_bits = _use(held_out)
    except (KeyboardInterrupt, typer.Exit):
        typer.echo("\nThe demo stopped early; the same command continues it.", err=True)
        raise
    _print_ending(time.monotonic() - started, gzip_bits)


def _begin() -> None:
    """Creates the folder of the demo, unless an interrupted demo left one."""
    run_file = _render_run_file()
    earlier = RUN_FILE.read_text(encoding="utf-8") if RUN_FILE.exists() else ""
    if earlier == run_file and not REPORT.exists():
        typer.echo("The last demo was interrupted; this one continues it.")
        return
    if FOLDER.exists() and not earlier.startswith(FIRST_WORDS):
        raise ConfigError(
            f"{FOLDER} exists and is not from a demo", f"move it: mv {FOLDER} runs/mine"
        )
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    FOLDER.mkdir(parents=True)
    RUN_FILE.write_text(run_file, encoding="utf-8")


def _render_run_file() -> str:
    from trainyard.config.devices import cpu_multiplies_bf16_natively

    preset = (resources.files("trainyard.config") / "presets" / "demo.toml").read_bytes()
    return f"""\
{FIRST_WORDS} {__version__}, preset {hashlib.sha256(preset).hexdigest()[:12]}
extends = "demo"

[data.train]
prefixes = ["{FOLDER}/data/train_text_document"]

[data.valid]
prefixes = ["{FOLDER}/data/held_out_text_document"]

[tokenizer]
path = "{FOLDER}/data/train_tokenizer"

[model]
vocabulary_size = {VOCABULARY_SIZE}

[train]
stop_after_minutes = {MOST_MINUTES}

[precision]
kind = "{"bf16" if cpu_multiplies_bf16_natively() else "fp32"}"
"""


def _write_corpus(folder: Path) -> str:
    """Writes every source file of the standard library as a document; holds out every 60th.

    Returns:
        the text of all held-out files.
    """
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if not held_out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        documents: tuple[list[str], list[str]] = ([], [])
        for number, text in enumerate(_standard_library_sources()):
            documents[number % HELD_OUT_EVERY == 0].append(text)
        sizes = []
        for path, texts in zip((train, held_out), documents, strict=True):
            publish_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
            sizes.append(sum(len(text.encode()) for text in texts) / 1e6)
        typer.echo(f"\ncorpus: {sizes[0]:.1f} MB for training, {sizes[1]:.1f} MB held out")
    return "".join(json.loads(line)["text"] for line in held_out.open(encoding="utf-8"))


def _standard_library_sources() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if NOT_PYTHONS_OWN_WRITING & set(path.relative_to(root).parts):
            continue
        try:
            yield path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files use other encodings on purpose


def _prepare_tokens() -> None:
    from trainyard.cli.prepare import tokenize
    from trainyard.config.corpus import Corpus
    from trainyard.corpus.preparation.prepare import train_on_inputs

    tokenizer = FOLDER / "data" / "train_tokenizer"
    (FOLDER / "data").mkdir(exist_ok=True)
    for name in ("train", "held_out"):
        text, output = FOLDER / "corpus" / f"{name}.jsonl", FOLDER / "data" / name
        if Path(f"{output}_text_document.json").exists():
            continue
        corpus = Corpus(inputs=(str(text),), output=str(output), tokenizer=str(tokenizer))
        if name == "train":
            _announce(f"prepare {text} -o {output} --train-tokenizer {VOCABULARY_SIZE}")
            train_on_inputs(corpus, VOCABULARY_SIZE, overwrite=True)
        else:
            _announce(f"prepare {text} -o {output} --tokenizer {tokenizer}")
        tokenize(corpus, overwrite=True)


def _train() -> None:
    from trainyard.report.run_view import load_facts
    from trainyard.training.stop import out_of_time

    def is_out_of_time() -> bool:
        return load_facts(FOLDER / "outcome.json").get("reason") == out_of_time(MOST_MINUTES)

    if is_out_of_time():  # and interrupted later
        return
    try:
        # One rank: its batch is too small for several GPUs.
        _run("train", RUN_FILE, "--ranks", 1, "--minutes", f"{MINUTES:g}")
    except typer.Exit:
        if not is_out_of_time():
            raise
        typer.echo("The machine slowed down: the demo continues with the model trained so far.")


def _use(held_out: str) -> float:
    """Returns the bits per byte of gzip on the held-out text."""
    _run("evaluate", FOLDER, "--data", f"{FOLDER}/data/held_out_text_document")
    text = held_out.encode()
    by_gzip, by_xz = gzip.compress(text, 9), lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    for name, packed in (("gzip -9", by_gzip), ("xz -9e", by_xz)):
        typer.echo(f"{name:<14}{8 * len(packed) / len(text):.4f} bits per byte of the same text")
    _run("generate", FOLDER, "--prompt", PROMPT, "--temperature", TEMPERATURE)
    _run("export", FOLDER, "--to", "huggingface", "--output", f"{FOLDER}/huggingface")
    _run("report", FOLDER)
    return 8 * len(by_gzip) / len(text)


def _run(*words: object) -> None:
    """Shows and runs a command; ends the demo if it fails."""
    from trainyard.cli.main import app

    command = list(map(str, words))
    _announce(shlex.join(command))
    if code := app(command, prog_name=PROGRAM, standalone_mode=False):
        raise typer.Exit(code)


def _print_ending(seconds: float, gzip_bits: float) -> None:
    evaluation = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    bits = evaluation["bits_per_byte"]
    verdict = "so the model wins" if bits < gzip_bits else "so the model loses"
    command = "trainyard" if shutil.which("trainyard") else sys.argv[0]
    typer.echo(f"""
Done in {math.ceil(seconds)} s: {bits:.2f} bits per byte on held-out files.
gzip -9 needs {gzip_bits:.2f}, {verdict}.
  {REPORT}       curves and samples; open it in a browser
  {FOLDER}/checkpoints/      the trained model
  {FOLDER}/huggingface/      the same model for transformers

Your own text, .txt or .jsonl files:
  {command} prepare mytext/ -o mine
  {command} train mine.toml --minutes 10
  {command} generate runs/mine --prompt "Once"
""")


def _announce(command: str) -> None:
    typer.echo(f"\n$ trainyard {command}")
