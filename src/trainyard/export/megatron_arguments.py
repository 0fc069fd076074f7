"""Turns the flags of Megatron's GPT pretraining into a run file that accounts for each of them.

The table of flags is config/megatron_flags.toml; docs/megatron-flags.md is written from it.
The run file states Megatron's values of absent flags too: Trainyard's defaults are the paper's.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from trainyard.config.load import build_run, explain_problems, parse_toml
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.export.megatron_fields import KINDS, Conversion, classify, flag_table, is_default
from trainyard.export.shell_script import UNRESOLVED, dropped_lines, read_command, split_command
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file


@dataclass
class Imported:
    """A run file, and what its user should read."""

    text: str
    warnings: list[str] = field(default_factory=list)


def import_command(source: str, settings: list[str], name: str) -> Imported:
    """Imports a command line, or a script with its arguments ("train.sh bf16"), as a run file.

    Args:
        source: the command line, or the path of a script and its arguments.
        settings: variables of the script, as NAME=value.
        name: of the run.

    Raises:
        ConfigError: as `import_arguments` and `read_command`.
    """
    files: dict[str, str] = {}
    notes: list[str] = []
    words = split_command(source.removeprefix("bash "))
    path, *arguments = words or [""]
    if re.search(r"\.(sh|bash|sbatch|slurm|pbs)$", path) or Path(path).is_file():
        if wrong := [text for text in settings if "=" not in text]:
            raise ConfigError(f"--set {wrong[0]} is not of the form NAME=value")
        try:
            text = read_file(Path(path), SETTINGS_LIMIT_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", "give a script") from None
        known = dict(text.split("=", 1) for text in settings)
        words, files = read_command(text, arguments, known)
        notes = dropped_lines(text)
    imported = import_arguments(words, files, name)
    return Imported(imported.text, notes + imported.warnings)


def import_arguments(words: list[str], files: Mapping[str, str], name: str) -> Imported:
    """Converts a command line to a run file.

    Args:
        words: the flags with their values; words before the first flag are ignored.
        files: files that a script would write, by path: DeepSpeed's settings.
        name: of the run.

    Raises:
        ConfigError: flags that change the model or its training in a way that is not supported,
            required flags that are absent, or values that do not make a run.
    """
    flags = _read_flags(words)
    for flag, values in flags.items():
        found = UNRESOLVED.search(flag + " ".join(values))
        if (
            found
            and flag != "tensorboard-dir"
            and (UNRESOLVED.search(flag) or classify(flag)[0] in ("field", "rule"))
        ):
            raise _explain_unresolved(found[1], flag)
    flags = {flag: [UNRESOLVED.sub(r"<\1>", v) for v in values] for flag, values in flags.items()}
    accounts = _account(flags)
    run = Conversion(flags, files)
    fields, origins = run.convert()
    tables: dict[str, Any] = {"name": name}
    for key, value in fields.items():
        *parents, last = key.split(".")
        table = tables
        for part in parents:
            table = table.setdefault(part, {})
        table[last] = value
    try:
        build_run(tables)
    except ValidationError as error:
        raise explain_problems(error, Run, origins, "of these flags") from None
    text = _render(name, fields, origins, [*accounts, *run.notes])
    parse_toml(text, "the new run file")
    return Imported(text, run.notes)


def _explain_unresolved(name: str, flag: str) -> ConfigError:
    if name.isdecimal():
        return ConfigError(
            f"cannot resolve ${name}, an argument of the script, which --{flag} needs",
            'give the arguments after the script, in the same quotes: "train.sh ARGUMENT ..."',
        )
    return ConfigError(
        f"cannot resolve {name}, which --{flag} needs".replace("\ue000", "$"),
        f"set the variable: --set {name}=value "
        "(`source FILE`, functions and loops are not followed)",
    )


def _read_flags(words: list[str]) -> dict[str, list[str]]:
    """Groups words by flag, without dashes in front and with hyphens only; the last one wins."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = flags[name.replace("_", "-")] = [value] if equals else []
        else:
            values.append(word)
            if not flags and UNRESOLVED.search(word):
                flags[word] = values = []
    if not flags:
        raise ConfigError("no flags of Megatron, such as --num-layers 24", "give its command line")
    return flags


def _account(flags: Mapping[str, list[str]]) -> list[str]:
    """Returns a line for each flag that sets no field."""
    accounts, refused = [], []
    known = [flag for kind in KINDS for flag in flag_table()[kind]]
    for flag, values in flags.items():
        kind, reason = classify(flag)
        shown = " ".join([f"--{flag}", *values])
        accepted = flag_table()["value"].get(flag)
        if kind.startswith("refused") and values and is_default(flag, " ".join(values)):
            accounts.append(f"{shown}: Megatron's default")
        elif kind.startswith("refused") or (accepted and values[:1] and values[0] not in accepted):
            but = f"; supported: {', '.join(accepted)}" if accepted else ""
            refused.append(f"  {shown}: {reason}{but}")
        elif kind in ("same", "none"):
            accounts.append(f"{shown}: {reason}")
        elif kind not in ("field", "rule"):
            near = difflib.get_close_matches(flag, known, n=1)
            guess = f"; did you mean --{near[0]}?" if near else ""
            refused.append(f"  {shown}: unknown flag{guess}")
    if refused:
        raise ConfigError(
            "not supported:\n" + "\n".join(refused),
            "remove these flags for the nearest run that Trainyard trains; "
            "docs/megatron-flags.md lists all",
        )
    return accounts


def _render(
    name: str,
    fields: Mapping[str, Any],
    origins: Mapping[str, str],
    accounts: list[str],
) -> str:
    lines = ["# Written by trainyard import --from megatron-args; docs/megatron-flags.md."]
    lines.append(tomli_w.dumps({"name": name}).strip())
    sections: dict[str, list[str]] = {}
    for key, value in fields.items():
        section, _, leaf = key.rpartition(".")
        text = tomli_w.dumps({leaf: value}, multiline_strings=False).strip()
        if isinstance(value, list):
            text = f"{leaf} = [{', '.join(json.dumps(item) for item in value)}]"
        sections.setdefault(section, []).append(f"{text} # {origins[key]}")
    for section in sorted(sections, key=_order):
        lines += ["", f"[{section}]", *sections[section]]
    if accounts:
        lines += ["", "# The same by default, or without meaning here:"]
        lines += [f"#   {' '.join(line.split())}" for line in accounts]
    return "\n".join(lines) + "\n"


def _order(section: str) -> tuple[int, str]:
    return list(Run.model_fields).index(section.partition(".")[0]), section
