"""Writes the model card of an exported checkpoint, README.md: the facts of its run.

The Hugging Face Hub reads the table at its top. The card names no path of this machine: of the data
it gives the names of the token files alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from trainyard import __version__
from trainyard.architecture import parameter_count
from trainyard.report.history import Line
from trainyard.report.metrics import read_metrics
from trainyard.report.scores import list_scores
from trainyard.report.summary import EVALUATION, load_facts, unused_settings
from trainyard.training.start import ancestors_of, describe_ancestry

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest

_SETTINGS = {"model", "train", "optimizer", "schedule", "parallel", "precision"}
_TO_FILL_IN = "**To fill in**: not chosen yet. Name it here and in `license:` at the top."
_CARD = """---
{licence_line}
library_name: transformers
pipeline_tag: text-generation
tags: [trainyard]
---

# {name}

A `{architecture}` of {n_parameters:,} parameters, pretrained with Trainyard {version}.

| | |
|---|---|
| layers, width, heads | {model.n_layers}, {model.d_model}, {model.n_heads} |
| context | {model.sequence_length:,} tokens |
| vocabulary | {model.vocabulary_size:,} tokens |
| weights | {dtype} |
| trained on | {tokens:,} tokens, {step:,} steps |
| token files | {data} |
| held-out loss | {held_out} |
| started from | {ancestry} |
{scores}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
tokens = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```

## Licence

{licence_text}

## Settings

```toml
{settings}```

"""


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
    return _CARD.format(
        licence_line=f"license: {licence}" if licence else "# license: TO FILL IN",
        licence_text=licence or _TO_FILL_IN,
        name=run.name,
        architecture=architecture,
        n_parameters=parameter_count(run.model, run.model.vocabulary_size),
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
