"""`trainyard show --fields [SECTION]`: every field, its default and its meaning."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel
from rich.text import Text

from trainyard.cli.show_run import as_toml, fill
from trainyard.config.corpus import (
    Corpus,
    Deduplicate,
    Keep,
    LengthLimits,
    NearDeduplicate,
    Normalize,
    Quality,
)
from trainyard.config.load import all_fields, field_value
from trainyard.config.run import Run
from trainyard.config.schema import field_manuals
from trainyard.config.section import describe_fields
from trainyard.errors import ConfigError

EXTENDS = "Preset, or another run file, whose fields this file changes; at the top of the file."


def render_fields(section: str = "") -> Text:
    """Describes every field of a run file and of a data file, with its default.

    Args:
        section: such as `train` or `train.length`: describes only its fields.

    Raises:
        ConfigError: there is no such section or field.
    """
    if section:
        fields = [f for f in all_fields() if f"{f}.".startswith(f"{section}.")]
        if not fields and section != "extends":
            known = [*dict.fromkeys(field.partition(".")[0] for field in all_fields())]
            close = difflib.get_close_matches(section, [*known, *all_fields()], n=1)
            raise ConfigError(
                f"no section or field {section!r}",
                f"did you mean {close[0]}?" if close else f"sections: {', '.join(known)}",
            )
        text = Text(f"Fields of {section}, their defaults and meaning.", style="bold")
        _append_fields(text, Run(), fields)
        return text
    text = Text("Every field of a run file, its default and its meaning.", style="bold")
    _append_field(text, "extends", None, EXTENDS)
    _append_fields(text, Run(), [*all_fields()])
    text.append("\n\nEvery field of a data file, for trainyard prepare.", style="bold")
    _append_fields(text, Corpus(), [*all_fields(Corpus)])
    for kind in (Keep, Normalize, LengthLimits, Quality, Deduplicate, NearDeduplicate):
        name = get_args(kind.model_fields["kind"].annotation)[0]
        manual = fill((kind.__doc__ or "").strip().splitlines()[0], "    ")
        text.append(f'\nsteps, kind = "{name}"', style="cyan not bold")
        text.append("\n" + manual, style="not bold")
        manuals = describe_fields(kind)
        for field, info in kind.model_fields.items():
            if field != "kind":
                default = None if info.is_required() else info.default
                _append_field(text, f"  {field}", default, manuals.get(field, ""))
    return text


def _append_fields(text: Text, defaults: BaseModel, fields: list[str]) -> None:
    manuals = field_manuals(type(defaults))
    for field in fields:
        _append_field(text, field, field_value(defaults, field), manuals[field])


def _append_field(text: Text, field: str, default: Any, manual: str) -> None:
    shown = "" if default is None else f" = {as_toml(default)}"
    text.append(f"\n{field}", style="cyan not bold").append(shown, style="not bold")
    text.append("\n" + fill(manual, "    "), style="not bold")
