"""Plans the ladder of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from trainyard.api.planning import choose_layout, find_sizes
from trainyard.config.load import LoadedRun, load_run
from trainyard.config.run import Run
from trainyard.data.patterns import find_token_files
from trainyard.errors import ConfigError
from trainyard.layout.resolve import resolve
from trainyard.log import align
from trainyard.planning.hardware import Machine, find_local_machine
from trainyard.planning.ladder import Estimator, fewest_devices
from trainyard.sweeps.ladder import (
    Ladder,
    LadderSizes,
    Rung,
    choose_ladder,
    count_held_out,
    count_parameters,
    price_rungs,
    training_flops,
)
from trainyard.units import format_large, format_number, format_seconds

HOUR, CENTURIES = 3600.0, 1e12


def plan_ladder(
    source: str,
    overrides: Sequence[str],
    asked: LadderSizes,
    cost_share: float,
    devices: tuple[Machine, int] | None = None,
    price: float | None = None,
) -> tuple[Ladder, list[str]]:
    """Chooses the ladder of a run, sized so that all its runs cost at most a share of it.

    Args:
        source: as for `load_run`.
        overrides: of the target.
        asked: all but `share` and `held_out`.
        cost_share: of the run's, for all its small ones.
        devices: a machine and the number of its devices; None: this machine, by FLOP.
        price: of a device-hour.

    Returns:
        the ladder; its sizes, their runs and their cost, line by line.

    Raises:
        UserError: the run is wrong, or no ladder is as cheap.
    """
    target = find_token_files(load_run(source, list(overrides)).run, None)
    if target.schedule.kind == "points":
        problem = "schedule.kind='points': a ladder's rules scale named schedules"
        raise ConfigError(problem, "schedule.kind=cosine, or another")
    machine, n_devices = devices or (None, 1)
    cost = _price_on(machine, target, n_devices) if machine else _price_here()
    asked = replace(asked, held_out=count_held_out(target, find_sizes(target)))
    ladder = choose_ladder(target, asked, cost, cost_share)
    prices = price_rungs(ladder, cost)
    total, whole = sum(prices.values()), cost(target)
    costs = f"; costs {price * total / HOUR:,.2f}" if price else ""
    where = machine.device.name if machine else "this machine"
    # The longest run is one of many that share the devices.
    seconds = max(max(prices.values()) / asked.n_seeds, total / n_devices)
    return ladder, [
        *align([*_tabulate(ladder, prices)], right=range(8)),
        "",
        f"{total / HOUR:,.3g} device-hours ({where}), {total / whole:.2%} of the "
        f"{whole / HOUR:,.4g} of {target.name}{costs}",
        f"about {format_seconds(seconds)} on {format_number(n_devices, 'device')}",
    ]


def _tabulate(ladder: Ladder, prices: Mapping[Rung, float]) -> Iterator[list[str]]:
    yield ["size", "blocks", "width", "parameters", "runs", "tokens", "batch", "device-h"]
    for size, model in enumerate(ladder.models):
        runs = {rung: ladder.build(rung) for rung in prices if rung.size == size}
        tokens = [resolve(run).n_tokens for run in runs.values()]
        batches = [run.train.global_batch_size for run in runs.values()]
        yield [
            *(str(size), str(model.n_layers), str(model.d_model)),
            format_large(count_parameters(next(iter(runs.values())))),
            str(len(runs) * ladder.sizes.n_seeds),
            f"{format_large(min(tokens))} to {format_large(max(tokens))}",
            f"{min(batches)} to {max(batches)}",
            f"{sum(prices[rung] for rung in runs) / HOUR:,.3g}",
        ]


def _price_here() -> Callable[[Run], float]:
    speed = find_local_machine().flops_per_second
    return lambda run: training_flops(run) / speed


def _price_on(machine: Machine, target: Run, n_devices: int) -> Callable[[Run], float]:
    """Prices the target on its devices in device-seconds, others on the fewest where they fit."""
    estimator = Estimator(machine, storage=(5e9,))

    @cache
    def price(run: Run) -> float:
        if run == target:
            found = estimator.estimate(run, n_devices)
        else:
            found = fewest_devices(run, estimator, CENTURIES)[-1]
        if found.cost is None:
            choose_layout(LoadedRun(run, {}), machine, found.n_devices)  # says why none fits
        return found.n_devices * found.seconds

    return price
