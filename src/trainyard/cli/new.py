"""`trainyard new`: a commented run file for the data, the machine and the time one has."""

from __future__ import annotations

import logging
import re
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.names import CLUSTER, Gpu
from trainyard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainyard.planning.new_run import NewRun

logger = logging.getLogger("trainyard")

WIDTH = 98
MANY_EPOCHS = 25
"""More epochs than this teach a model little that is new."""


def new(
    prefixes: Annotated[list[str], typer.Argument()],
    output: Annotated[Path, typer.Option("--output", "-o")],
    time: str = "10 minutes",
    tokenizer: str = "",
    cluster: Annotated[str | None, CLUSTER] = None,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    gpu: Gpu = None,
    gpus: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Write a commented run file for data, machine and time.

    Chooses model, batch, length, learning rate and layout. Without --gpu and --cluster: for this
    machine.

    Examples:
    trainyard new web_text_document -o web.toml --time "2 hours"
    trainyard new "data/*_text_document" -o big.toml --gpu h100 --gpus 64 --time "1 week"

    Devices:
        cluster:
        nodes: With --cluster: its nodes.
        gpu:
        gpus: Number of devices. Default: 1.

    Options:
        prefixes: Token files, by prefix or pattern, as in data.blend.prefixes.
        output: The run file to create.
        time: How long it may train, such as "2 hours" or "1 week".
        tokenizer: gpt2 or a tokenizer folder. Default: the one beside the token files, if any.
    """
    from trainyard.api.planning import find_asked_machine
    from trainyard.config.devices import GIGA
    from trainyard.files import publish_text
    from trainyard.planning.hardware import find_local_machine
    from trainyard.planning.ladder import Estimator
    from trainyard.planning.new_run import choose_local_run, choose_run
    from trainyard.units import format_figure, format_number, format_seconds

    seconds = _check_options(output, time)
    machine = find_asked_machine(cluster, nodes, gpu)
    if gpus and not machine:
        raise ConfigError("--gpus needs --gpu or --cluster", f"--gpu h100 --gpus {gpus}")
    n_tokens, vocabulary_size, tokenizer = _find_data(prefixes, tokenizer)
    if machine is None:
        local = find_local_machine()
        chosen, words = choose_local_run(n_tokens, vocabulary_size, local, seconds), ""
        where = local.name
    else:
        n_devices = gpus or (nodes or 0) * machine.devices_per_node or 1
        estimator = Estimator(machine, (GIGA,))
        chosen = choose_run(n_tokens, vocabulary_size, estimator, n_devices, seconds)
        where = f"{format_number(n_devices, 'device')} ({machine.device.name})"
        options = {"--cluster": cluster, "--nodes": nodes, "--gpu": gpu, "--gpus": gpus}
        words = "".join(f" {name} {value}" for name, value in options.items() if value)
    head = (
        f"A run of {chosen.parameters / 1e6:,.1f}M parameters for {n_tokens:,} tokens, {where} and "
        f"{time}: about {format_seconds(chosen.seconds)}, {format_figure(chosen.passes)} epochs. "
        "Every field: trainyard show --fields. Relative paths start at the working directory."
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output.stem).strip("._-")[:100] or "run"
    data: dict[str, Any] = {"data.blend.prefixes": tuple(prefixes)}
    data |= {"tokenizer.path": tokenizer} if tokenizer else {}
    publish_text(output, _render(head, name, chosen, data))
    quoted = shlex.quote(str(output))
    typer.echo(f"{output}: {head.partition('. Every')[0]}\n")
    if chosen.passes > MANY_EPOCHS:
        logger.warning("warning: so many epochs need more text, not more time: prepare more of it")
    on_nodes = f" --cluster {cluster} --nodes {nodes or 1}"
    start = f"launch {quoted}{on_nodes}" if cluster else f"train {quoted}"
    typer.echo(f"trainyard plan {quoted}{words}\ntrainyard {start}")


def _check_options(output: Path, time: str) -> float:
    """Returns the time in seconds."""
    from trainyard.units import parse_duration

    if output.suffix != ".toml":
        raise ConfigError(f"--output {output} is not a run file", f"-o {output.stem}.toml")
    if output.exists():
        raise ConfigError(f"{output} already exists", "name another --output, or remove it")
    try:
        return parse_duration(time)
    except ValueError as error:
        raise ConfigError(f"--time {error}", '--time "2 hours"') from None


def _find_data(prefixes: list[str], tokenizer: str) -> tuple[int, int, str]:
    """Returns tokens, vocabulary size and the tokenizer's place, if known.

    Raises:
        UserError: token files are absent, or of another tokenizer, or it is unknown.
    """
    from trainyard.api.planning import find_sizes
    from trainyard.config.load import build_run
    from trainyard.data.patterns import find_token_files
    from trainyard.data.sidecar import load_sidecar
    from trainyard.data.tokenizer import tokenizer_name
    from trainyard.data.vocabulary import load_vocabulary

    run = find_token_files(build_run({"data": {"blend": {"prefixes": prefixes}}}))
    files = run.data.blend.prefixes
    sizes = find_sizes(run)
    for prefix in files:
        if prefix not in sizes:
            raise DataError(
                f"no token files {prefix}.bin and .idx", "trainyard prepare TEXT -o NAME"
            )
    sidecars = {each: load_sidecar(each) for each in files if Path(f"{each}.json").is_file()}
    beside = Path(f"{files[0].removesuffix('_text_document')}_tokenizer")
    if not tokenizer and beside.is_dir():
        tokenizer = str(beside)
    elif not tokenizer and any(each.tokenizer.name == "gpt2" for each in sidecars.values()):
        tokenizer = "gpt2"
    if tokenizer:
        vocabulary = load_vocabulary(tokenizer)
        for prefix, sidecar in sidecars.items():
            sidecar.check_against(tokenizer_name(tokenizer), vocabulary.fingerprint, prefix)
        return sum(sizes.values()), len(vocabulary.tokens), tokenizer
    if not sidecars:
        raise DataError(f"the tokenizer of {files[0]} is not recorded", "--tokenizer FOLDER")
    vocabulary_size = next(iter(sidecars.values())).tokenizer.vocabulary_size
    return sum(sizes.values()), vocabulary_size, ""


def _render(head: str, name: str, chosen: NewRun, data: dict[str, Any]) -> str:
    """Renders sections and fields, each below the first sentence of its documentation."""
    from trainyard.config.schema import field_manuals
    from trainyard.config.section import as_toml
    from trainyard.planning.shorten import WRITTEN

    manuals = field_manuals() | {"train.batch_ramp": "No ramp, unlike the preset"}
    lines = [f"{WRITTEN}new", *_comment(head), ""]
    if chosen.preset:
        lines += _comment(f"Other values, with their sources: trainyard show {chosen.preset}")
        lines += [f"extends = {as_toml(chosen.preset)}", ""]
    lines += [f"name = {as_toml(name)}"]
    section = ""
    values = chosen.values | data
    sections = list(dict.fromkeys(field.rpartition(".")[0] for field in manuals))
    for field in sorted(values, key=lambda field: sections.index(field.rpartition(".")[0])):
        table, _, key = field.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines += _comment(re.split(r"(?<=[.;:]) ", manuals[field])[0].rstrip(".;:"))
        lines += [f"{key} = {as_toml(values[field])}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2)]
