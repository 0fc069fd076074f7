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
_VALUE = r"""(?:"[^"\\]*"|'[^']*'|\{[^{}#]*\}|[^\s#"'\[{]+)"""


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values as a run file has them: "none" for None."""
    return {field: "none" if value is None else value for field, value in values.items()}


def set_fields(text: str, values: Mapping[str, Any], name: str) -> str:
    """Returns the text of a run file with other values in some fields.

    Args:
        text: TOML.
        values: numbers, truths, strings and None ("none" in the file) by `section.field`.
        name: of the file, for errors.

    Raises:
        ConfigError: the text writes a field in a way that cannot be changed safely.
    """
    lines, wanted = text.splitlines(), tomllib.loads(text)
    values = by_name(values)
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
    """Changes the line of a field, or inserts one, in place of a table of its own."""
    if (table := _find_header(lines, rf"{section}\s*\.\s*{field}")) is not None:
        del lines[table : _end_of_fields(lines, table + 1) + 1]
    start = _find_header(lines, section)
    if start is None:
        first_table = _end_of_section(lines, 0)
        if not _change(lines, range(first_table), rf"{section}\s*\.\s*{field}", value):
            lines += ["", f"[{section}]", f"{field} = {value}"]
        return
    if not _change(lines, range(start + 1, _end_of_section(lines, start + 1)), field, value):
        lines.insert(_end_of_fields(lines, start + 1), f"{field} = {value}")


def _find_header(lines: list[str], name: str) -> int | None:
    header = re.compile(rf"\s*\[\s*{name}\s*\]\s*(?:#.*)?")
    return next((n for n, line in enumerate(lines) if header.fullmatch(line)), None)


def _end_of_section(lines: list[str], start: int) -> int:
    after = range(start, len(lines))
    return next((n for n in after if _HEADER.match(lines[n])), len(lines))


def _end_of_fields(lines: list[str], start: int) -> int:
    """Returns the end of a section without comments after a blank line: on the next one."""
    last = end = _end_of_section(lines, start)
    while lines[last - 1].strip()[:1] in ("", "#"):
        last -= 1
    return next((n for n in range(last, end) if not lines[n].strip()), end)


def _change(lines: list[str], where: range, field: str, value: str) -> bool:
    """Changes the value on the line that sets a field; returns whether there is one."""
    pattern = re.compile(rf"(\s*{field}\s*=\s*){_VALUE}(\s*(?:#.*)?)")
    for number in where:
        found = pattern.fullmatch(lines[number])
        if found:
            lines[number] = f"{found[1]}{value}{found[2]}"
            return True
    return False
