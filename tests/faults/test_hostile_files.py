"""Every file that is read may have been made by somebody else: the table of what becomes of each.

Rows are the files that Trainyard reads, with a command that reads each; columns are hostile things
put in their place. Each cell runs the command in a process of its own, whose memory and time are
limited. The outcome is a message that names the place, exit code 2; or, where a file only saves
work, that it is made anew. Nothing in a file is ever executed.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import pickle
import re
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tests.command import Fork

from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import save_checkpoint
from trainyard.cli.main import main
from trainyard.config.corpus import load_corpus
from trainyard.config.load import load_run, render_run
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.export.huggingface import export_huggingface
from trainyard.layout.resolve import resolve
from trainyard.model.gpt import GPT, initialize

pytestmark = pytest.mark.exhaustive

# Loaded once, so that each fork has them.
HEAVY_MODULES = (
    *("trainyard.report.page", "trainyard.training.worker", "trainyard.evaluation.generate"),
    *("trainyard.export.huggingface", "trainyard.corpus.verify", "trainyard.cli.show_data"),
)
MEMORY_BYTES = 2 * 2**30
"""What a command may add to the address space of the test process."""
DEEP = 200_000
TEXTS = [f"the {number} trains leave the yard at noon and at night" for number in range(400)]
MARKER = "executed"
BARE = "data.blend.prefixes=['bare_text_document']"  # without a record
STEP = "runs/demo/checkpoints/step-00000001"


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (MARKER, "w")


def pickle_of_torch() -> bytes:
    """What torch.save writes, with something to execute in it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": Evil()}))
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


def array_of_objects() -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([Evil()] * 20, dtype=object), allow_pickle=True)
    return content.getvalue()


def npy_header(descr: str, shape: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": pickle.dumps(Evil()),
    "a pickle of torch": pickle_of_torch(),
    "an array of objects": array_of_objects(),
    "an array that would be huge": npy_header("'<i8'", "(4611686018427387904,)"),
    "an array whose header is code": npy_header(f"__import__('os').mkdir('{MARKER}')", "(1,)"),
    "a huge header of safetensors": struct.pack("<Q", 2**63) + b"{}",
    "a huge tensor": struct.pack("<Q", 64)
    + b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'[:64],
    "deep lists": b"[" * DEEP + b"]" * DEEP + b"\n",
    "deep objects": b'{"kind":' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "deep lists in TOML": b"a = " + b"[" * DEEP + b"]" * DEEP + b"\n",
    "a deep key in TOML": b".".join([b"a"] * DEEP) + b" = 1\n",
    "a huge number": b'{"kind": "train", "step": ' + b"9" * 100_000 + b"}\n",
    "a huge number in TOML": b"name = " + b"9" * 100_000 + b"\n",
    "numbers beyond all": b'{"kind": "train", "step": 1e999, "tokens": -1e999, "loss": NaN}\n',
    "YAML": f"!!python/object/apply:os.mkdir ['{MARKER}']\n".encode(),
    "a template": f"{{{{ __import__('os').mkdir('{MARKER}') }}}}\n".encode(),
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "entities": b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><mediawiki>&b;</mediawiki>',
}
IN_PLACE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to accounts": lambda path: path.symlink_to("/etc/passwd"),
}
# Whatever the format, and what is made for one of them.
GENERAL = ["nothing", "a pickle", "a pickle of torch", "zeros", *IN_PLACE]
OF_FORMAT = {
    ".toml": ["deep lists in TOML", "a deep key in TOML", "a huge number in TOML", "YAML"],
    ".json": ["deep lists", "deep objects", "a huge number", "numbers beyond all", "ones"],
    ".jsonl": ["deep lists", "deep objects", "a huge number", "numbers beyond all", "ones"],
    ".npy": [kind for kind in CONTENTS if kind.startswith("an array")],
    ".safetensors": ["a huge header of safetensors", "a huge tensor"],
    ".txt": ["a template", "ones"],
    ".xml": ["entities"],
}
# What is a good file of its kind after all, and what cannot be replaced: the exit codes.
OTHERWISE = {
    ("nothing", "run.toml"): (0, 2),  # a run of defaults, but without data
    ("nothing", "base.toml"): (0,),
    ("nothing", "runs/demo/run.toml"): (0,),
    ("nothing", "two/merges.txt"): (0,),
    ("zeros", "tokens_text_document.bin"): (0, 2),  # token 0, and more than the index asks for
    ("a folder", "cache/*.npy"): (2,),
    ("a folder", "cache/content-*.json"): (2,),
}

# The file, the command that reads it, and what becomes of it: "refused"; "ignored", since it only
# saves work or is made of what anybody may say; "either", where what is there can be read as such a
# file: any bytes are a text, and every JSON line with a kind is of some later version.
READERS: list[tuple[str, str, str]] = [
    ("run.toml", "show run.toml", "refused"),
    ("run.toml", "train run.toml name=other", "refused"),
    ("base.toml", "show child.toml", "refused"),
    ("corpus.toml", "prepare corpus.toml -o out", "refused"),
    ("fetch.toml", "prepare --fetch fetch.toml -o got", "refused"),
    ("tok/tokenizer.json", "show tok", "refused"),
    ("tok/tokenizer.json", "prepare in.jsonl -o out --tokenizer tok", "refused"),
    ("two/vocab.json", "show two", "refused"),
    ("two/merges.txt", "show two", "refused"),
    ("in.jsonl", "prepare in.jsonl -o out --tokenizer tok", "refused"),
    *(
        (f"in.jsonl.{packed}", f"prepare in.jsonl.{packed} -o out --tokenizer tok", "refused")
        for packed in ("gz", "bz2", "xz", "zst")
    ),
    ("in.parquet", "prepare in.parquet -o out --tokenizer tok", "refused"),
    ("in.txt", "prepare in.txt -o out --tokenizer tok", "either"),
    ("in.xml", "prepare in.xml -o out --tokenizer tok", "either"),
    ("in.xml.bz2", "prepare in.xml.bz2 -o out --tokenizer tok", "either"),
    ("tokens_text_document.idx", "show order run.toml", "refused"),
    ("tokens_text_document.bin", "show order run.toml", "refused"),
    ("tokens_text_document.idx", "check data tokens_text_document", "refused"),
    ("tokens_text_document.bin", "check data tokens_text_document", "refused"),
    ("tokens_text_document.json", "check data tokens_text_document", "refused"),
    ("tokens_text_document.json", "train run.toml name=other", "refused"),
    ("tokens_text_document.json", "show order run.toml", "ignored"),
    ("cache/*.npy", "show order run.toml", "ignored"),
    ("cache/content-*.json", f"show order run.toml {BARE}", "ignored"),
    (f"{STEP}/manifest.json", "check checkpoint runs/demo", "refused"),
    (f"{STEP}/manifest.json", "show runs/demo", "refused"),
    *(
        (f"{STEP}/model-*.safetensors", command, "refused")
        for command in (
            *("check checkpoint runs/demo", "evaluate runs/demo", "generate runs/demo --tokens 2"),
            "export runs/demo --output hf2",
        )
    ),
    ("runs/demo/run.toml", "report runs/demo", "refused"),
    ("runs/demo/metrics.jsonl", "report runs/demo", "either"),
    ("runs/demo/plan.json", "report runs/demo", "either"),
    ("runs/demo/plan.json", "status runs/demo", "either"),
    ("runs/demo/versions.json", "report runs/demo", "either"),
    ("runs/demo/evaluation.json", "report runs/demo", "either"),
    ("text.txt", "evaluate runs/demo --data text.txt", "either"),
    ("hf/config.json", "import hf --output runs/new", "refused"),
    ("hf/model.safetensors", "import hf --output runs/new", "refused"),
    ("hf/tokenizer.json", "import hf --output runs/new", "either"),
    ("sharded/model.safetensors.index.json", "import sharded --output runs/new", "refused"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good file of every kind, to be copied to `work` beside it.

    That is where they were made: the cache knows token files by their path.
    """
    folder = tmp_path_factory.mktemp("hostile") / "work"
    folder.mkdir()
    for module in HEAVY_MODULES:
        importlib.import_module(module)
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_corpora()
        write_run()
        write_huggingface()
        for overrides in ("", f" {BARE}"):
            code, printed = run_alone("show order run.toml" + overrides)
            assert code == 0, printed
    finally:
        os.chdir(before)
    return folder.rename(folder.with_name("good"))


def write_corpora() -> None:
    train_tokenizer(TEXTS, 300, Path("tok"))
    model = json.loads(Path("tok/tokenizer.json").read_text())["model"]
    added = json.loads(Path("tok/tokenizer.json").read_text())["added_tokens"]
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
    Path("two").mkdir()
    Path("two/vocab.json").write_text(json.dumps(vocabulary))
    Path("two/merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    for ending, packed in {
        "": lines,
        ".gz": gzip.compress(lines),
        ".bz2": bz2.compress(lines),
        ".xz": lzma.compress(lines),
        ".zst": zstandard.ZstdCompressor().compress(lines),
    }.items():
        Path(f"in.jsonl{ending}").write_bytes(packed)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "in.parquet")
    Path("in.txt").write_text(TEXTS[0])
    Path("text.txt").write_text(" ".join(TEXTS))
    page = "<page><title>A</title><ns>0</ns><id>1</id><revision><id>2</id><text>It is.</text>"
    dump = f"<mediawiki>\n  {page}</revision></page>\n</mediawiki>\n".encode()
    Path("in.xml").write_bytes(dump)
    Path("in.xml.bz2").write_bytes(bz2.compress(dump))
    Path("corpus.toml").write_text('inputs = ["in.jsonl"]\ntokenizer = "tok"\n')
    Path("fetch.toml").write_text("")
    values = {"inputs": ["in.jsonl"], "output": "tokens", "tokenizer": "tok"}
    prepare(load_corpus(None, values))
    for ending in (".bin", ".idx"):
        shutil.copy(f"tokens_text_document{ending}", f"bare_text_document{ending}")


def write_run() -> None:
    shape = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32"]
    shape += ["model.vocabulary_size=300", "model.sequence_length=32", "train.length='4 steps'"]
    shape += ["schedule.warmup='1 steps'", "schedule.decay='4 steps'", "log.tensorboard=false"]
    data = ["data.blend.prefixes=['tokens_text_document']", "data.cache_folder=cache"]
    run = load_run("tiny", [*shape, *data, "data.split='80,10,10'", "name=demo"]).run
    run = run.model_copy(update={"tokenizer": run.tokenizer.model_copy(update={"path": "tok"})})
    Path("base.toml").write_text(render_run(run))
    Path("run.toml").write_text(render_run(run))
    Path("child.toml").write_text('extends = "base.toml"\n')
    model = GPT(run.model, resolve(run).padded_vocabulary_size)
    initialize(model, seed=1)
    facts = Facts(
        step=1,
        consumed_sequences=8,
        consumed_tokens=256,
        run=run.model_dump(mode="json"),
        plan=resolve(run).as_json(),
    )
    weights = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    Path("runs/demo").mkdir(parents=True, exist_ok=True)
    save_checkpoint(Path("runs/demo/checkpoints"), facts, weights)
    shutil.copy("run.toml", "runs/demo/run.toml")
    train = {"step": 1, "tokens": 256, "loss": 5.0, "milliseconds_per_step": 3.0}
    save = {"step": 1, "stall_seconds": 0.1, "seconds": 0.2, "bytes": 100}
    lines = [("start", {"step": 0, "resumed": False}), ("train", train), ("save", save)]
    text = "".join(json.dumps({"kind": kind, "time": 1.0, **rest}) + "\n" for kind, rest in lines)
    Path("runs/demo/metrics.jsonl").write_text(text)
    Path("runs/demo/plan.json").write_text(json.dumps(resolve(run).as_json()))
    Path("runs/demo/versions.json").write_text('{"torch": "2"}')
    Path("runs/demo/evaluation.json").write_text('{"loss": 5.0}')


def write_huggingface() -> None:
    export_huggingface(Path(STEP), Path("hf"))
    export_huggingface(Path(STEP), Path("sharded"), shard_limit_bytes=10_000)


def run_alone(command: str) -> tuple[int, str]:
    """Runs a command in a fork, within limits; gives its exit code and what it printed."""

    def run() -> None:
        os.setsid()  # no terminal can be opened
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        limit = in_use + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        main(command.split())

    done = Fork(run).wait()
    return done.returncode, done.stdout + done.stderr


def named(printed: str) -> set[str]:
    """Lists the parts of all paths in a text."""
    return set(re.split(r"[\s/:,;'\"]+", printed))


def hostile(path: Path, kind: str) -> None:
    path.unlink()
    if kind in IN_PLACE:
        IN_PLACE[kind](path)
    else:
        path.write_bytes(CONTENTS[kind])


@pytest.mark.parametrize("target, command, outcome", READERS, ids=lambda value: value)
def test_hostile_files(
    good: Path, monkeypatch: pytest.MonkeyPatch, target: str, command: str, outcome: str
) -> None:
    wrong = []
    monkeypatch.chdir(good)
    for kind in [*GENERAL, *OF_FORMAT.get(Path(target).suffix, [])]:
        folder = good.with_name("work")
        shutil.copytree(good, folder)
        monkeypatch.chdir(folder)
        paths = sorted(folder.glob(target))
        assert paths, target
        for path in paths:
            hostile(path, kind)
        code, printed = run_alone(command)
        expected = {"refused": (2,), "ignored": (0,), "either": (0, 2)}[outcome]
        expected = OTHERWISE.get((kind, target), expected)
        must_name = outcome == "refused" and kind != "nothing"  # nothing in it is wrong
        name, parent = Path(target).name.partition("*")[0], Path(target).parent.name or target
        if code not in expected or "Traceback" in printed:
            wrong.append(f"{kind}: exit code {code}: {printed[-300:]}")
        elif code == 2 and not re.search(r"^error: ", printed, re.MULTILINE):
            wrong.append(f"{kind}: no message: {printed[-300:]}")
        elif code == 2 and must_name and not {name, parent} & named(printed):
            wrong.append(f"{kind}: {name} is not named: {printed[-300:]}")
        if list(folder.rglob(MARKER)):
            wrong.append(f"{kind}: executed")
        os.chdir(good)
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", sorted({command for _, command, _ in READERS}))
def test_every_command_accepts_the_good_files(
    good: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Without it a command that always fails would pass above."""
    if "--fetch" in command:
        pytest.skip("there is no server to fetch from")
    folder = good.with_name("work")
    shutil.copytree(good, folder)
    monkeypatch.chdir(folder)
    code, printed = run_alone(command)
    monkeypatch.undo()
    shutil.rmtree(folder)
    assert code == 0, printed


def test_what_would_execute_does() -> None:
    """The hostile pickles work, where somebody reads them as pickles."""
    evil = pickle.loads(pickle.dumps(Evil()).replace(MARKER.encode(), b"/dev/nul"[:8]))  # noqa: S301
    evil.close()
    assert len(MARKER) == 8
