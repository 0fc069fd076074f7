"""The run file that `prepare` writes next to its token files, ready for `trainyard train`.

    written = write_run_file(corpus, sidecars)
    written.command              # "trainyard train web.toml --minutes 5"

Its first line has a checksum of the rest, to detect and keep an edited file, and a fingerprint of
the data, to keep a file for the same data: repeating the command, on any machine, changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from trainyard.config.corpus import Corpus, output_prefixes
from trainyard.corpus.preparation.work_folder import name_process
from trainyard.data.sidecar import Sidecar
from trainyard.errors import printable
from trainyard.files import publish_text
from trainyard.planning.hardware import find_local_machine
from trainyard.planning.new_run import choose_local_run
from trainyard.units import format_figure

_FIRST_LINE = re.compile(
    r"# Written by trainyard prepare for the data ([0-9a-f]{16}); checksum ([0-9a-f]{16})\n"
)


@dataclass(frozen=True)
class RunFile:
    """The outcome of `write_run_file`."""

    path: Path
    note: str
    """One line about it."""
    command: str
    """Trains the run; empty if `prepare` did not write the file."""


def write_run_file(corpus: Corpus, sidecars: list[Sidecar]) -> RunFile:
    """Writes `<output>.toml` for the token files of a corpus, unless somebody has edited it.

    Raises:
        MachineError: the disk is full or the folder cannot be written.
    """
    path = Path(f"{corpus.output}.toml")
    data = sidecars[0].recipe[:16]
    body, minutes = _render(corpus, sidecars)
    command = f"trainyard train {shlex.quote(str(path))} --minutes {minutes}"
    try:
        existing = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        existing = ""
    except OSError as error:
        return RunFile(
            path, f"{printable(path)} cannot be read ({error.strerror}): left as it is", ""
        )
    first, rest = _FIRST_LINE.match(existing), existing.partition("\n")[2]
    if existing and first is None:
        return RunFile(path, f"{printable(path)} was not written by prepare: left as it is", "")
    if first is not None and first[2] != _checksum(rest):
        return RunFile(path, f"{printable(path)} has been edited: left as it is", command)
    if first is not None and first[1] == data:
        body = rest
    else:
        head = f"# Written by trainyard prepare for the data {data}; checksum {_checksum(body)}\n"
        own = path.with_name(f"{path.name}.{name_process(os.getpid())}")  # of many at once
        publish_text(own, head + body)
        own.replace(path)
    head = body.partition("\n")[0].removeprefix("# ")
    return RunFile(path, f"{printable(path)}: {head}", command)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _render(corpus: Corpus, sidecars: list[Sidecar]) -> tuple[str, int]:
    """Renders what follows the first line; returns the minutes to train for, too."""
    tokenizer = sidecars[0].tokenizer
    n_tokens = sum(sidecar.tokens for sidecar in sidecars)
    machine = find_local_machine()
    chosen = choose_local_run(n_tokens, tokenizer.vocabulary_size, machine)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(corpus.output).name).strip("._-")[:100] or "run"
    values = {"name": name, **chosen.tables}
    values["data"]["blend"] = {"prefixes": output_prefixes(corpus, len(sidecars))}
    values["tokenizer"] = {"path": corpus.tokenizer}
    head = (
        f"# {chosen.parameters / 1e6:.1f}M parameters, for {n_tokens:,} tokens and "
        f"{machine.name}; {format_figure(chosen.passes)} epochs.\n"
        "# Every field: trainyard show --fields. Relative paths start at the working directory.\n"
        "# Once you edit this file, prepare leaves it alone.\n\n"
    )
    return head + tomli_w.dumps(values), max(1, min(10, math.ceil(chosen.seconds / 60)))
