"""Writes the model card of an exported checkpoint, README.md: the facts of its run.

The Hugging Face Hub reads the table at its top. The card names no path of this machine: of the data
it gives the names of the token files alone.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from trainyard import __version__
from trainyard.architecture import count_idle, describe_parts, parameter_count
from trainyard.report.figures import list_scores
from trainyard.report.metrics import Line, read_metrics
from trainyard.report.run_view import EVALUATION, load_facts, unused_settings
from trainyard.training.run_folder import ancestors_of, describe_ancestry

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest

_SETTINGS = {"model", "train", "optimizer", "schedule", "parallel", "precision"}
_TO_FILL_IN = "**To fill in**: not chosen yet. Name it here and in `license:` at the top."


def render_card(
    checkpoint: Path, manifest: Manifest, architecture: str, dtype: str, licence: str, place: str
) -> str:
    """Renders the model card of a checkpoint.

    Args:
        checkpoint: its folder; held-out figures are those of its step in its run's metrics.jsonl.
        manifest: of the checkpoint.
        architecture: class of the exported model in transformers.
        dtype: of the exported weights.
        licence: as the Hub names it, such as `apache-2.0`; empty: a field left to fill in.
        place: what `from_pretrained` loads.

    Raises:
        DataError: no line of metrics.jsonl can be read, or evaluation.json is damaged.
    """
    run, folder = manifest.build_run(), checkpoint.parent.parent
    # Without effect on these weights.
    unused = unused_settings(run) | {"train": {"start_from", "start_with", "stop_after_minutes"}}
    settings = run.model_dump(mode="json", include=_SETTINGS, exclude=unused, exclude_none=True)
    prefixes = (run.data.blend if run.data.blend.prefixes else run.data.train).prefixes
    lines = read_metrics(folder).held_out_losses if (folder / "metrics.jsonl").exists() else []
    measured = next((line for line in lines if line["step"] == manifest.step), {})
    n_parameters = parameter_count(run.model, run.model.vocabulary_size)
    idle = count_idle(run.model)
    card = files("trainyard.report").joinpath("model_card.md").read_text(encoding="utf-8")
    return card.format(
        licence_line=f"license: {licence}" if licence else "# license: TO FILL IN",
        licence_text=licence or _TO_FILL_IN,
        name=run.name,
        architecture=architecture,
        n_parameters=n_parameters,
        active=f" ({n_parameters - idle:,} active)" if idle else "",
        parts=", ".join(describe_parts(run.model)) or "those of GPT-3",
        version=__version__,
        model=run.model,
        dtype=dtype,
        tokens=manifest.consumed_tokens,
        step=manifest.step,
        data=", ".join(f"`{_plain(Path(each).name)}`" for each in prefixes) or "not recorded",
        held_out=_describe_loss(measured) or "not measured at this step",
        scores="".join(
            f"| {_plain(one.label, '/')} | {one.value}, {one.meaning.partition(',')[0]} |\n"
            for one in list_scores(load_facts(folder / EVALUATION), manifest.step)
        ),
        ancestry=describe_ancestry(ancestors_of(manifest)) or "random weights",
        place=place,
        settings=tomli_w.dumps(settings),
    )


def _plain(name: str, allowed: str = "") -> str:
    return re.sub(rf"[^\w. {allowed}-]", "_", name)


def _describe_loss(line: Line) -> str:
    styles = {
        "loss": "{:.4f} nats per token",
        "perplexity": "perplexity {:,.2f}",
        "bits_per_byte": "{:.4f} bits per byte",
    }
    known = (style.format(line[k]) for k, style in styles.items() if line.get(k) is not None)
    return ", ".join(known)
