"""Sets fields in the text of a run file and keeps comments, order and blank lines.

`{"parallel.tensor": 4, "parallel.sequence": True}` turns the file on the left into the right one:

    [parallel]                          [parallel]
    tensor = 2   # inside a node        tensor = 4   # inside a node
    # the rest is data parallel         # the rest is data parallel
                                        sequence = true
    [train]
    ...                                 [train]
                                        ...
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError

_HEADER = re.compile(r"\s*\[")
_VALUE = r"""(?:"[^"\\]*"|'[^']*'|[^\s#"'\[{]+)"""


def set_fields(text: str, values: Mapping[str, Any], name: str) -> str:
    """Returns the text of a run file with other values in some fields.

    Args:
        text: TOML.
        values: numbers, truths and strings by `section.field`.
        name: of the file, for errors.

    Raises:
        ConfigError: the text writes a field in a way that cannot be changed safely.
    """
    lines, wanted = text.splitlines(), tomllib.loads(text)
    for field, value in values.items():
        section, _, key = field.partition(".")
        _set_field(lines, section, key, json.dumps(value))
        wanted.setdefault(section, {})[key] = value
    changed = "\n".join(lines) + "\n"
    try:
        if tomllib.loads(changed) == wanted:
            return changed
    except tomllib.TOMLDecodeError:
        pass
    raise ConfigError(
        f"{name} is not written as [section] and field = value, and is left as it is",
        f"set these by hand: {', '.join(f'{k}={json.dumps(v)}' for k, v in values.items())}",
    )


def _set_field(lines: list[str], section: str, field: str, value: str) -> None:
    """Changes the line of a field, or inserts one."""
    header = re.compile(rf"\s*\[\s*{section}\s*\]\s*(?:#.*)?")
    start = next((n for n, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        first_table = _end_of_section(lines, 0)
        if not _change(lines, range(first_table), rf"{section}\s*\.\s*{field}", value):
            lines += ["", f"[{section}]", f"{field} = {value}"]
        return
    end = _end_of_section(lines, start + 1)
    if not _change(lines, range(start + 1, end), field, value):
        while not lines[end - 1].strip():
            end -= 1
        lines.insert(end, f"{field} = {value}")


def _end_of_section(lines: list[str], start: int) -> int:
    after = range(start, len(lines))
    return next((n for n in after if _HEADER.match(lines[n])), len(lines))


def _change(lines: list[str], where: range, field: str, value: str) -> bool:
    """Changes the value on the line that sets a field; returns whether there is one."""
    pattern = re.compile(rf"(\s*{field}\s*=\s*){_VALUE}(\s*(?:#.*)?)")
    for number in where:
        found = pattern.fullmatch(lines[number])
        if found:
            lines[number] = f"{found[1]}{value}{found[2]}"
            return True
    return False
