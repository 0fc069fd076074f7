"""Writes all generated pages and tables of docs/ and recipes/.

    python -m benchmarks.pages                       ten minutes on two cores; no GPU
    python -m benchmarks.pages --anew plan,search    without new simulations
    python -m benchmarks.pages --anew ""             docs/guides-planned.md from its record alone
    python -m benchmarks.pages --commands            docs/commands.md alone, in a second

| where | what |
|---|---|
| recipes/*/README.md, docs/planning.md | rows that begin with the arguments of a `trainyard plan` |
| docs/planning-accuracy.md, docs/planning.md | tables between "written by" and "end" comments |
| docs/commands.md | all of it, from the command line |
| docs/megatron-flags.md | all of it, from src/trainyard/config/megatron_flags.toml |
| docs/guides-planned.md | all of it, from benchmarks/records/2026-11-23-guides.json |

tests/e2e/test_pages.py compares the pages with what this would write.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from benchmarks.guides import PARTS, collect, write_page
from benchmarks.planning_tables import published_rows, show, show_gaps, show_sizes
from typer.main import get_command
from typer.testing import CliRunner

from trainyard.api.plan_table import describe_step
from trainyard.cli.help import PROGRAM
from trainyard.cli.main import app
from trainyard.cli.plan import plan
from trainyard.errors import MachineError
from trainyard.export.foreign import flag_table
from trainyard.units import format_seconds

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "2026-11-23-guides.json"
PLANNED = ROOT / "docs" / "guides-planned.md"
COMMANDS = ROOT / "docs" / "commands.md"
FLAGS = ROOT / "docs" / "megatron-flags.md"
RECIPES = sorted((ROOT / "recipes").glob("*/README.md"))
TEXTS = [*RECIPES, ROOT / "docs" / "planning.md", ROOT / "docs" / "planning-accuracy.md"]
ROW = re.compile(r"^\| `(\S+\.toml [^`]*)` \|.*\|$", re.MULTILINE)
TABLE = re.compile(
    r"(<!-- (\w+): written by python -m benchmarks.pages -->\n).*?(<!-- end -->)", re.DOTALL
)
TABLES: Mapping[str, Callable[[], str]] = {
    "published": lambda: show(published_rows()),
    "sizes": show_sizes,
    "gaps": lambda: show_gaps(published_rows()),
}


def write_anew(text: str) -> str:
    """Returns a page with the plans and tables of today."""
    text = ROW.sub(lambda row: planned_row(row[1]), text)
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def planned_row(arguments: str) -> str:
    """Returns the row of a table: what `trainyard plan` is given, and what it says."""
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [*shlex.split(arguments), "--json"])
    does_not_fit = isinstance(result.exception, MachineError)
    if result.exception is not None and not does_not_fit:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["fits"] is not does_not_fit
    memory = f"{max(rank['peak_bytes'] for rank in found['memory']) / 2**30:.1f}"
    if found["usable_bytes"]:
        memory += f" of {found['usable_bytes'] / 2**30:.1f}"
    if does_not_fit:
        memory = f"**{memory}: does not fit**"
    step, cost = found["step"], found["cost"]
    speed = f"{step['tokens_per_second_per_device']:,.0f}"
    cells = [f"`{arguments}`", memory, describe_step(step["seconds"]), speed]
    return f"| {' | '.join([*cells, format_seconds(cost['seconds'])])} |"


def planned_page() -> str:
    """Returns docs/guides-planned.md, by its record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = {row["recipe"]: row for row in record["jobs"]}
    return write_page(rows, RECORD.name, record["commit"])


COMMANDS_HEAD = """# Commands

The help of every verb, as `trainyard VERB --help` prints it on 80 columns.
[mistakes.md](mistakes.md) lists the answers to common mistakes.

Exit codes: 0 done, 2 a user's error, with a hint, 1 a bug, 130 Ctrl-C, 141 a closed pipe. `train`
also returns 75 (run it again) and 93 (held; needs attention).

Written by `python -m benchmarks.pages --commands`.
"""


def commands_page() -> str:
    """Returns docs/commands.md: the help of the program and of all verbs, in their order."""
    parts = [COMMANDS_HEAD]
    for words in (), *_verbs(get_command(app), ()):
        wide = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
        asked = CliRunner().invoke(app, [*words, "--help"], prog_name=PROGRAM, env=wide)
        assert asked.exit_code == 0, asked.output
        parts.append(f"\n## {' '.join((PROGRAM, *words))}\n\n```\n{asked.stdout.rstrip()}\n```\n")
    return "".join(parts)


def _verbs(command: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name in getattr(command, "commands", ()):
        yield (*above, name)
        yield from _verbs(command.get_command(None, name), (*above, name))


FLAGS_HEAD = """# Flags of Megatron-LM

`trainyard import` reads them in command lines and in checkpoints
([importing](importing.md#megatrons-command-lines)). `*` matches any text; `_`, `-` and `no-`,
`disable-` are the same. Compared with the sources of Megatron-LM (all releases to August 2026),
deepspeedai/Megatron-DeepSpeed (2025), argonne-lcf/Megatron-DeepSpeed (2026) and the five guides. A
test has every argument of the three, with its default. Other names are refused, unless they are off
in a checkpoint.

Written by `python -m benchmarks.pages`.
"""
KINDS_OF_FLAGS = {
    "field": ("Fields", "field"),
    "rule": ("Fields by a rule, alone or with other flags", "field"),
    "same": ("The same by default", "here"),
    "none": ("No meaning here", "why"),
    "refused": ("Refused, as flags and in checkpoints, unless they have Megatron's default", "why"),
    "refused-flag": ("Refused as flags; without effect on the model of a checkpoint", "why"),
    "saved": ("In checkpoints only: without effect on the model", "kind"),
    "value": ("Accepted with these values only", "values"),
    "default": ("Megatron's values of absent flags, which the run file states", "value"),
}


def flags_page() -> str:
    """Returns docs/megatron-flags.md, from the table of flags."""
    parts = [FLAGS_HEAD]
    for kind, (title, heading) in KINDS_OF_FLAGS.items():
        parts.append(f"\n## {title}\n\n| flag | {heading} |\n|---|---|\n")
        for flag, text in sorted(flag_table()[kind].items()):
            text = ", ".join(text) if isinstance(text, list) else text
            plain = kind in ("same", "none", "refused", "refused-flag", "saved")
            parts.append(f"| `--{flag}` | {text if plain else f'`{text}`'} |\n")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--anew", default=",".join(PARTS), help="parts of the record of guides-planned.md to redo"
    )
    parser.add_argument("--only", default="", help="of that record: jobs with this in their name")
    parser.add_argument("--commands", action="store_true", help="write docs/commands.md alone")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    COMMANDS.write_text(commands_page(), encoding="utf-8")
    if arguments.commands:
        return
    for path in TEXTS:
        path.write_text(write_anew(path.read_text(encoding="utf-8")), encoding="utf-8")
    FLAGS.write_text(flags_page(), encoding="utf-8")
    collect(RECORD, arguments.anew, arguments.only)
    PLANNED.write_text(planned_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
