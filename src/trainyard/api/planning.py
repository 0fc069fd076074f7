"""`trainyard.load_run` and `plan`: a run, and its memory, time and cost, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.api.plan_table import Report
from trainyard.config.devices import GIGA
from trainyard.errors import ConfigError, DataError, MachineError
from trainyard.units import format_bytes, with_article

if TYPE_CHECKING:
    from trainyard.config.run import Run
    from trainyard.planning.hardware import Machine

logger = logging.getLogger("trainyard")


def load_run(source: Run | str | Path, overrides: Sequence[str] = ()) -> Run:
    """Reads a run: frozen, typed and checked; `run.model.d_model` is a field.

    Args:
        source: a preset's name, a run file (.toml), a run folder or its name in `runs`, or a run.
        overrides: such as "train.length=500 steps".

    Raises:
        TrainyardError: names every unknown field, wrong value and conflict.
    """
    from trainyard.config import load
    from trainyard.config.run import Run

    if isinstance(source, Run):
        return load.override_run(source, overrides) if overrides else source
    return load.load_run(str(source), list(overrides)).run


def plan(
    run: Run | str | Path,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
) -> Report:
    """Computes memory, time and cost of a run; `print` shows them as `trainyard plan` does.

    Args:
        run: as for `load_run`.
        cluster: a cluster's name or file; `local` is this computer's CPU.
        nodes: of the cluster.
        gpu: a device's name, such as "h100-80g"; with a cluster: in its nodes.
        gpus: devices in total; absent: the fewest that the run's layout needs.
        price: of a device-hour, in any currency.

    Returns:
        bytes (`memories`) and, given a machine, seconds (`time`, `cost`); `fits` and `remedies`.

    Raises:
        TrainyardError: an unknown name, or a layout or precision that is impossible there.
    """
    loaded = load_run(run)
    machine = find_asked_machine(cluster, nodes, gpu)
    return build_report(loaded, machine, count_devices(loaded, machine, nodes, gpus), price=price)


def find_asked_machine(cluster: str | None, nodes: int | None, gpu: str | None) -> Machine | None:
    """Finds the machine that the options name; None if they name none.

    Raises:
        UserError: --nodes without a cluster, or a name is unknown.
    """
    if cluster is None and gpu is None:
        if nodes is not None:
            raise ConfigError(f"--nodes {nodes} needs a cluster", f"--cluster lumi --nodes {nodes}")
        return None
    from trainyard.planning.clusters import find_machine

    return find_machine(cluster, gpu)


def count_devices(run: Run, machine: Machine | None, nodes: int | None, gpus: int | None) -> int:
    """Returns the number of devices that the options name, or the fewest the run needs.

    Raises:
        ConfigError: nodes and devices contradict each other, or no layout is possible.
    """
    if nodes is not None and machine is not None:
        n_devices = nodes * machine.devices_per_node
        if gpus not in (None, n_devices):
            raise ConfigError(
                f"--nodes {nodes} of {machine.name} are {n_devices} devices, not --gpus {gpus}",
                "omit one of them",
            )
        return n_devices
    if gpus is not None:
        if gpus < 1:
            raise ConfigError(f"{gpus} devices cannot run anything", "gpus=1 or more")
        return gpus
    from trainyard.layout.resolve import resolve

    return resolve(run).n_ranks


def build_report(
    run: Run,
    machine: Machine | None,
    n_devices: int,
    storage: tuple[float, ...] = (GIGA,),
    price: float | None = None,
) -> Report:
    """Plans a run; includes changes that make it fit if it does not.

    Raises:
        ConfigError: the run cannot use this number of devices.
        MachineError: the devices do not support its precision.
    """
    from trainyard.config.rules import change
    from trainyard.data.patterns import find_token_files
    from trainyard.layout.resolve import resolve
    from trainyard.planning.cost import corpora_use, run_cost
    from trainyard.planning.hardware import find_extremes
    from trainyard.planning.memory import rank_memory
    from trainyard.planning.saving import host_bytes
    from trainyard.planning.search import find_remedies, is_gpu
    from trainyard.planning.time import step_time

    planned = resolve(run, n_devices)
    on_gpu = machine is None or is_gpu(machine)
    # Host memory for saving is the same for all stages, and slow to compute.
    without = change(run, {"checkpoint.background": False})
    n_host_bytes = host_bytes(run, planned)
    memories = [
        replace(rank_memory(without, planned, stage, on_gpu), host_bytes=n_host_bytes)
        for stage in range(planned.topology.pipeline)
    ]
    found = find_token_files(run, missing_ok=True)
    corpora = corpora_use(found, planned, find_sizes(found))
    if machine is None:
        return Report(run, planned, memories, corpora)
    time = step_time(run, planned, machine)
    cost = run_cost(run, planned, machine, time, storage, price)
    extremes = []
    for each in find_extremes(machine) or ():
        extreme = step_time(run, planned, each)
        extremes.append((extreme, run_cost(run, planned, each, extreme, storage, price)))
    report = Report(run, planned, memories, corpora, machine, time, cost, extremes=extremes)
    if report.fits:
        return report
    return replace(report, remedies=find_remedies(run, machine, n_devices))


def refuse_unfit(report: Report) -> None:
    """Raises for a run that does not fit.

    Raises:
        MachineError: the missing memory, and the cheapest change.
    """
    if report.fits:
        return
    assert report.machine is not None
    hint = "no tested change makes it fit: use a smaller model or larger devices"
    if report.remedies:
        hint = f"cheapest change that makes it fit: {report.remedies[0].change}"
    raise MachineError(
        f"{report.run.name} does not fit: {format_bytes(-(report.spare_bytes or 0))} more than "
        f"{with_article(report.machine.device.name)} has",
        hint,
    )


def find_sizes(run: Run) -> dict[str, int]:
    """Counts the tokens of the training blend's token files that exist here."""
    from trainyard.planning.cost import training_blend

    found: dict[str, int] = {}
    for prefix in training_blend(run)[0].prefixes:
        if not Path(f"{prefix}.idx").is_file():
            continue
        try:
            if Path(f"{prefix}.json").is_file():
                from trainyard.data.sidecar import load_sidecar

                found[prefix] = load_sidecar(prefix).tokens
            else:
                from trainyard.data.indexed import count_tokens

                found[prefix] = count_tokens(prefix)
        except DataError as error:
            logger.warning("%s", error.problem)
    return found
