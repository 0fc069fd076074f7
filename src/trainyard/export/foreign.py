"""Recognizes what `trainyard import` is given, and names what it cannot read."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from trainyard.errors import CheckpointError

Source = Literal["huggingface", "megatron", "megatron-args"]
KINDS = ("field", "rule", "same", "none", "saved", "refused", "refused-flag")
"""Kinds of Megatron's flags."""
_SCRIPT = r"^\S+\.(sh|bash|sbatch|slurm|pbs)(\s|$)|\s--\w"
_MEGATRON = ("latest_checkpointed_iteration.txt", "latest", "mp_rank_*", "layer_*-model_states.pt")


def refuse_foreign(path: Path) -> None:
    """Names the format of other software that a file, or a folder with such a file, has.

    Raises:
        CheckpointError: it has one of those that are known.
    """
    table = resources.files("trainyard.config") / "foreign_formats.toml"
    for pattern, software in tomllib.loads(table.read_text(encoding="utf-8")).items():
        if path.match(pattern) or next(path.glob(pattern), None):
            raise CheckpointError(
                f"{path} is {software['what']}, which cannot be imported", software["hint"]
            )


def recognize(source: str) -> Source:
    """Returns the format of a folder, a script or a command line.

    Raises:
        CheckpointError: it is none of those that can be imported.
    """
    if re.search(_SCRIPT, source):
        return "megatron-args"
    path = Path(source)
    if (path / "config.json").exists():
        return "huggingface"
    if any(next(path.glob(pattern), None) for pattern in _MEGATRON):
        return "megatron"
    refuse_foreign(path)
    if path.exists():
        raise CheckpointError(
            f"{path} is neither a folder with config.json nor a checkpoint of Megatron",
            "name a folder that save_pretrained wrote, or that Megatron saved to",
        )
    name = source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else "OWNER/NAME"
    raise CheckpointError(
        f"no folder {source}", f"for a model of the Hub: hf download {name} --local-dir FOLDER"
    )


@cache
def flag_table() -> dict[str, dict[str, Any]]:
    """Reads the table of flags: kind (field, rule, set, default, value, same, ...) to flags."""
    path = resources.files("trainyard.config") / "megatron_flags.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind, texts in table.pop("names").items():
        more = {name: text for text, names in texts.items() for name in names.split()}
        table[kind] = table.get(kind, {}) | more
    return table


@cache
def classify(flag: str) -> tuple[str, str]:
    """Returns the kind of a flag (one of KINDS, or "") and its field or reason."""
    names = dict.fromkeys((flag, re.sub("^disable-", "no-", flag)))
    entries = [(kind, *entry) for kind in KINDS for entry in flag_table()[kind].items()]
    exact = ((kind, text) for name in names for kind, entry, text in entries if entry == name)
    close = ((k, text) for name in names for k, entry, text in entries if fnmatchcase(name, entry))
    return next(chain(exact, close), ("", ""))


def refusal(argument: str, value: object) -> str:
    """Returns why a checkpoint with this saved argument is refused, or "".

    Of the arguments that change what a model computes: all that are not read have Megatron's
    default. A name that Megatron lacks is one of them, unless it is off.
    """
    flag = argument.replace("_", "-")
    names = (flag, f"no-{flag}", f"disable-{flag}")
    kind, reason = next(filter(any, map(classify, names)), ("", "unknown to Megatron"))
    if kind not in ("", "refused") or is_default(flag, value):
        return ""
    return reason


def is_default(flag: str, value: object) -> bool:
    """Whether a value is the one of Megatron where the flag is absent."""
    default = flag_table()["default"].get(flag)
    if value is None or value is False or value == []:
        return default is None or value is None
    with suppress(TypeError, ValueError, OverflowError):
        return float(value) == float(default)  # type: ignore[arg-type]
    return str(value) == default
