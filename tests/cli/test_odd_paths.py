"""Paths that no file can have, or that are not what a verb expects: a message, not a traceback."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command import trainyard
from tests.faults.small_run import write_tokens

LONG = "n" * 300  # most file systems allow 255 bytes


def dangling(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    (path / "inner").mkdir(parents=True)


ODD: dict[str, Callable[[Path], object] | None] = {
    LONG: None,
    f"{LONG}/inner": None,
    "file/inner": None,
    "absent": None,
    "\udcff\udcfe": None,  # not UTF-8
    "new\nline\x1b[31m": None,
    "folder": folder,
    "pipe": os.mkfifo,
    "dangling": dangling,
    "loop": loop,
}

COMMANDS = [
    "plan {}",
    "plan {}.toml",
    "show {}",
    "show order {}",
    "check data {}",
    "check checkpoint {}",
    "check layout {}.toml --ranks 2",
    "evaluate {}",
    "generate {} --prompt a",
    "generate {}/checkpoints/step-00000001 --prompt a",
    "report {}",
    "status {}",
    "export {} --output out",
    "import {} --output out",
    "import {} --output out --from megatron",
    "import {} --output out --from megatron-args",
    "prepare {} --output out",
    "prepare {}.jsonl --output out",
    "prepare file --output {}",
    "prepare file --output {}/web",
    "prepare file --output out --tokenizer {}",
    "new {} -o new.toml",
    "new corpus_text_document -o {}.toml",
    "launch {} --cluster {}.toml --dry-run",
    "launch tiny --cluster {} --dry-run data.blend.prefixes=['corpus_text_document']",
    "train {}",
    "train tiny data.blend.prefixes=['{}']",
    "train tiny data.blend.prefixes=['corpus_text_document'] train.start_from='{}'",
    "train tiny data.blend.prefixes=['corpus_text_document'] tokenizer.path='{}'",
    "train tiny data.blend.prefixes=['corpus_text_document'] data.cache_folder='{}/inner'",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_odd_path_gets_a_message(tmp_path: Path, command: str) -> None:
    wrong = []
    for number, (name, make) in enumerate(ODD.items()):
        here = tmp_path / str(number)
        here.mkdir()
        (here / "file").write_text("the trains leave the yard at noon\n" * 50)
        write_tokens(here)
        if make is not None:
            make(here / name)
        words = [word.replace("{}", name) for word in shlex.split(command)]
        done = trainyard(*words, folder=here)
        printed = done.stdout + done.stderr
        if done.returncode not in (0, 2) or "Traceback" in printed or "\x1b" in printed:
            wrong.append(f"{name[:20]!r}: {done.returncode}: {printed[-400:]}")
    assert not wrong, "\n".join(wrong)
