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
    from trainyard.config.load import LoadedRun
    from trainyard.config.run import Run
    from trainyard.planning.hardware import Machine
    from trainyard.planning.search import Candidate

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
    from trainyard.config import load
    from trainyard.config.run import Run

    loaded = load.LoadedRun(run, {}) if isinstance(run, Run) else load.load_run(str(run))
    machine = find_asked_machine(cluster, nodes, gpu)
    n_devices = count_devices(loaded.run, machine, nodes, gpus)
    chosen = None
    if machine and (nodes or gpus) and not isinstance(run, Run):
        chosen = choose_layout(loaded, machine, n_devices)
    return build_report(loaded.run, machine, n_devices, price=price, chosen=chosen)


def choose_layout(loaded: LoadedRun, machine: Machine, n_devices: int) -> Candidate | None:
    """Finds the fastest layout that fits, if a run states none; presets state none.

    It has no batch ramp where that makes steps much faster: see `search_with_ramp`.

    Raises:
        ConfigError: no layout can share the batch.
        MachineError: none fits; the hint says on how many devices one does.
    """
    from trainyard.api.plan_table import describe_devices
    from trainyard.config.load import preset_names
    from trainyard.config.rules import change
    from trainyard.layout.resolve import resolve
    from trainyard.planning.search import (
        FIELDS,
        hint_where_none_fits,
        list_shapes,
        search_with_ramp,
    )

    run, origins = loaded.run, loaded.origins
    if any(field in origins and origins[field] not in preset_names() for field in FIELDS):
        return None
    for fastest in search_with_ramp(run, machine, n_devices, most=1):
        return fastest
    steady = change(run, {"train.batch_ramp": None})
    if not any(list_shapes(steady, machine, n_devices)):
        resolve(steady, n_devices)  # says what cannot be divided
    raise MachineError(
        f"{run.name}: no layout fits on {describe_devices(machine, n_devices)}",
        hint_where_none_fits(steady, machine, n_devices),
    )


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
    storage: tuple[float, ...] = (5 * GIGA, 20 * GIGA, 100 * GIGA),
    price: float | None = None,
    chosen: Candidate | None = None,
) -> Report:
    """Plans a run; includes changes that make it fit if it does not.

    Args:
        run: the run.
        machine: its devices; None leaves out times.
        n_devices: their number.
        storage: speeds of file systems, in bytes per second.
        price: of a device-hour.
        chosen: by `choose_layout`; its layout is planned in place of the run's.

    Raises:
        ConfigError: the run cannot use this number of devices.
        MachineError: the devices do not support its precision.
    """
    from trainyard.config.rules import describe
    from trainyard.data.patterns import find_token_files
    from trainyard.layout.resolve import resolve
    from trainyard.planning.cost import LEAST_USEFUL_SHARE, better_saving, corpora_use, run_cost
    from trainyard.planning.memory import rank_memory
    from trainyard.planning.search import as_dense, find_remedies, is_gpu, predict
    from trainyard.planning.time import find_extremes, step_time

    given, run = run, chosen.run if chosen else run
    arguments = describe(given, chosen.changes_from(given), " ") if chosen else None
    planned = resolve(run, n_devices)
    on_gpu = machine is None or is_gpu(machine)
    ranks = range(planned.topology.pipeline)
    memories = [rank_memory(run, planned, rank, on_gpu) for rank in ranks]
    found = find_token_files(run, missing_ok=True)
    corpora = corpora_use(found, planned, find_sizes(found))
    report = Report(run, planned, memories, corpora, arguments=arguments)
    if any(Path("runs").glob("*-ladder/prediction.json")):  # spares imports
        from trainyard.sweeps.prediction import describe_expected

        report = replace(report, expected=describe_expected(found))
    if machine is None:
        return report
    time = step_time(run, planned, machine)
    cost = run_cost(run, planned, machine, time, storage, price)
    extremes = [
        (extreme, run_cost(run, planned, machine, extreme, storage, price))
        for extreme in find_extremes(run, planned, machine, time)
    ]
    report = replace(report, machine=machine, time=time, cost=cost, extremes=extremes)
    if run.model.n_experts:
        report = replace(report, dense=predict(as_dense(run), machine, n_devices))
    if cost.useful_share < LEAST_USEFUL_SHARE:
        better = better_saving(run, planned, machine, time, storage[0])
        report = replace(report, better_saving=better)
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
    hint = "no tested change makes it fit: use a smaller model, or nodes with more memory"
    if report.remedies:
        hint = f"cheapest change that makes it fit: {report.remedies[0].change}"
    if (report.spare_bytes or 0) >= 0:  # of a device; so the host's is not enough
        raise MachineError(
            f"{report.run.name} does not fit in host memory: the processes of a node need "
            f"{format_bytes(report.node_bytes)}, and a node of {report.machine.name} has "
            f"{format_bytes(int(report.machine.host_memory_bytes))}",
            hint,
        )
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
