"""Draws docs/images/terminal.svg: what Trainyard prints, in a small run of today.

python -m benchmarks.terminal
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.mistakes import ROOT, make_run, write_files
from rich.console import Console
from rich.text import Text

PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS = 84
SHOWN = ("-h", "train small.toml optimizer.lr=3e-4", "train small.toml train.length='60 steps'")
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from a server: a picture needs none


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="trainyard-terminal-") as name,
        Path(os.devnull).open("w") as nowhere,
    ):
        console = Console(record=True, width=COLUMNS, file=nowhere)
        write_files(Path(name))

        def start(words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "trainyard.cli", *shlex.split(words)],
                cwd=name,
                env={**os.environ, "COLUMNS": f"{COLUMNS}", "TERMINAL_WIDTH": f"{COLUMNS}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            return done.stdout

        make_run(start)
        for words in SHOWN:
            console.print(Text(f"$ trainyard {words}", style="bold"))
            console.print(Text(start(words)))
        svg = console.export_svg(title="trainyard", unique_id="terminal")
    PICTURE.write_text(FONT.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
