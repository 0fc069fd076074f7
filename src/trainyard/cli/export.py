"""`trainyard export`: writes a trained model in another library's format."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainyard.cli.names import Trained, find_trained
from trainyard.errors import ConfigError
from trainyard.extras import require

_VERIFIED_BYTES = 4 * 2**30


def export(
    source: Trained,
    output: Annotated[Path, typer.Option()],
    to: Literal["huggingface"] = "huggingface",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    verify: bool | None = None,
    upload: Annotated[str, typer.Option(metavar="hf:OWNER/NAME")] = "",
    public: Annotated[bool, typer.Option("--public")] = False,
    licence: Annotated[str, typer.Option("--license")] = "",
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    The architecture is the one that computes the model: GPT2LMHeadModel, GPTNeoXForCausalLM,
    LlamaForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM
    or OlmoeForCausalLM. The folder has a model card, README.md.

    Example: trainyard export runs/demo --output demo-hf

    Example: trainyard export runs/demo --output demo-half --dtype bfloat16

    Example: trainyard export runs/demo --output demo-hf --upload hf:OWNER/demo

    If the upload fails, run the same command again: it uploads the existing folder.

    Options:
        output: The folder to create.
        to: Target format.
        dtype: Data type of the weights.
        verify: Load the folder back and compare logits, with both models in memory; default: if
            transformers is installed and the weights are below 4 GiB.
        upload: Upload the folder to this repository, in one commit.
        public: Anyone may read the upload; default: private.
        licence: Licence of the weights, for the model card: apache-2.0.
    """
    place = _check_options(upload, licence, public=public)
    source = find_trained(source)
    if output.exists() and not place:  # before the slow import of torch
        raise ConfigError(f"{output} already exists", "name another --output, or remove it")
    repository = None
    if place:
        require("huggingface_hub")
        from trainyard.export import hub

        repository = hub.find_repository(place, public=public)
    import torch

    from trainyard.checkpoint.format import manifest_sha256, read_manifest
    from trainyard.checkpoint.resume import find_checkpoint
    from trainyard.export.families import find_family
    from trainyard.export.huggingface import export_huggingface, require_equal_logits
    from trainyard.report.model_card import render_card

    checkpoint = find_checkpoint(source)
    manifest = read_manifest(checkpoint)
    architecture = find_family(manifest.build_run().model).architecture
    name = place or output.name
    card = render_card(checkpoint, manifest, architecture, dtype, licence, name)
    mark = f"<!-- checkpoint {manifest_sha256(checkpoint)}, {dtype} {licence} -->\n"
    written = output / "README.md"
    if place and written.is_file() and written.read_text(encoding="utf-8").endswith(mark):
        names = sorted(path.name for path in output.iterdir())
        typer.echo(f"{output} already holds {checkpoint}")
    else:
        names = export_huggingface(checkpoint, output, getattr(torch, dtype), card=card + mark)
        typer.echo(f"exported {checkpoint} to {output}: {', '.join(names)}")
    if verify is None:
        n_bytes = sum((output / name).stat().st_size for name in names)
        verify = n_bytes < _VERIFIED_BYTES and importlib.util.find_spec("transformers") is not None
    if verify:
        difference = require_equal_logits(checkpoint, output, getattr(torch, dtype))
        typer.echo(
            f"transformers loads it; its logits differ by at most {difference:.1e} of the largest"
        )
    if repository:
        page = hub.upload(repository, output)
        typer.echo(f"uploaded to {page} ({'public' if public else 'private'})")


def _check_options(upload: str, licence: str, *, public: bool) -> str:
    """Returns OWNER/NAME of `hf:OWNER/NAME`; empty without an upload."""
    if upload and not re.fullmatch(r"hf:[\w-][\w.-]*/[\w-][\w.-]*", upload, re.ASCII):
        raise ConfigError(f"--upload {upload!r} is not hf:OWNER/NAME", "such as hf:me/my-gpt")
    if public and not upload:
        raise ConfigError("--public without --upload", "--upload hf:OWNER/NAME")
    if licence and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", licence):
        hint = "an identifier of the Hub, such as apache-2.0, mit or other"
        raise ConfigError(f"--license {licence!r} is not one", hint)
    return upload.removeprefix("hf:")
