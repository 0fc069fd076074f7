"""`trainyard show --fields [SECTION]`, and `show` of presets and recipes by family."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from rich.text import Text

from trainyard.cli.names import run_names
from trainyard.cli.show_run import WIDTH, as_toml
from trainyard.config.cluster import cluster_names
from trainyard.config.corpus import (
    Corpus,
    Deduplicate,
    Keep,
    LengthLimits,
    NearDeduplicate,
    Normalize,
    Quality,
)
from trainyard.config.load import all_fields, field_value, preset_names
from trainyard.config.run import Run
from trainyard.config.schema import field_manuals
from trainyard.config.section import describe_fields
from trainyard.errors import ConfigError

RECIPES = Path("recipes")
EXTENDS = "Preset, or another run file, whose fields this file changes; at the top of the file."
_SCALE = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "": 1.0}


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
        manual = textwrap.fill((kind.__doc__ or "").strip().splitlines()[0], WIDTH)
        text.append(f'\nsteps, kind = "{name}"', style="cyan not bold")
        text.append("\n" + textwrap.indent(manual, "    "), style="not bold")
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
    text.append("\n" + textwrap.indent(textwrap.fill(manual, WIDTH), "    "), style="not bold")


def is_family(name: str) -> bool:
    """Returns whether presets or recipes have this first name, and no file, preset or run."""
    is_other = name in preset_names() or name in run_names() or Path(name).exists()
    return not is_other and bool(_presets(name) or _recipes(name))


def render_family(name: str) -> str:
    """Lists the presets, recipes and cluster of a family, with the commands that show them."""
    rows = {"presets": _presets(name), "recipes": _recipes(name)}
    if name in cluster_names():
        rows["cluster"] = [f"trainyard show cluster {name}"]
    return _table({title: names for title, names in rows.items() if names})


def render_families() -> str:
    """Lists all presets, recipes and clusters by family."""
    families = sorted({name.partition("-")[0] for name in preset_names()})
    text = "presets\n" + _table({family: _presets(family) for family in families})
    if folders := sorted(path.parent.name for path in RECIPES.glob("*/README.md")):
        text += "\n\nrecipes\n" + _table({family: _recipes(family) for family in folders})
    text += "\n\n" + _table({"clusters": cluster_names(), "runs": run_names() or ["none"]})
    return f"{text}\n\ntrainyard show NAME shows one; trainyard show --fields describes every field"


def _presets(family: str) -> list[str]:
    names = [name for name in preset_names() if f"{name}-".startswith(f"{family}-")]
    return sorted(names, key=_size)


def _recipes(family: str) -> list[str]:
    return sorted(map(str, (RECIPES / family).glob("*.toml")), key=_size)


def _size(name: str) -> list[float]:
    """Orders names by the sizes in them: 760m before 1.3b."""
    found = re.findall(r"(\d+(?:\.\d+)?)([kmbt]?)(?![a-z])", name.removesuffix(".toml"))
    return [float(number) * _SCALE[scale] for number, scale in found]


def _table(rows: dict[str, list[str]]) -> str:
    width = max(40, shutil.get_terminal_size().columns)
    label = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(
            ", ".join(names),
            width,
            initial_indent=f"{title:<{label}}",
            subsequent_indent=" " * label,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for title, names in rows.items()
    )
