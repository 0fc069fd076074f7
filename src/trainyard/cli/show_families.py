"""`trainyard show`: presets, recipes and clusters by family."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from trainyard.cli.names import run_names
from trainyard.config.load import preset_names

RECIPES = Path("recipes")
_SCALE = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "": 1.0}


def is_family(name: str) -> bool:
    """Returns whether presets or recipes have this first name, and no file, preset or run."""
    is_other = name in preset_names() or name in run_names() or Path(name).exists()
    return not is_other and bool(_presets(name) or _recipes(name))


def render_family(name: str) -> str:
    """Lists the presets, recipes and cluster of a family, with the commands that show them."""
    from trainyard.config.cluster import cluster_names

    rows = {"presets": _presets(name), "recipes": _recipes(name)}
    if name in cluster_names():
        rows["cluster"] = [f"trainyard show cluster {name}"]
    return _table({title: names for title, names in rows.items() if names})


def render_families() -> str:
    """Lists all presets, recipes and clusters by family."""
    from trainyard.config.cluster import cluster_names

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
