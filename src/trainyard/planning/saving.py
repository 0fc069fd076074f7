"""Predicts what saving costs: host memory, and the best interval.

During a background save, each rank keeps a copy of its part in host memory.

If each save costs w seconds of training, and a failure happens every M seconds, a run that saves
every t seconds loses

    w / t          to saving
    t / 2 M        to repetition: half an interval on average, per failure

The sum is minimal at t = sqrt(2 w M) (Young 1974). For 128 nodes and w = 60 s:

    M = 86,400 s / (128 x 0.0038) = 49.5 h          t = sqrt(2 x 60 s x 49.5 h) = 77 min
"""

from __future__ import annotations

import math

from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import Rank

FAILURES_PER_NODE_DAY = 419 / (54 * 2048)
"""419 unexpected interruptions of Llama 3 in 54 days on 2,048 nodes of H100s (arXiv:2407.21783):
between the published bounds below; 0.0065 on a cluster of 16,000 A100s (arXiv:2410.21680)."""
FEWEST_FAILURES_PER_NODE_DAY = 2.3e-3
"""On the other cluster of that study of A100s."""
MOST_FAILURES_PER_NODE_DAY = 1.6e-2
"""While OPT-175B was trained (arXiv:2205.01068)."""
RESTART_SECONDS = 15 * 60.0
"""From a failure to the next step, unattended."""
SECONDS_PER_DAY = 86_400.0


def host_bytes(run: Run, plan: Plan) -> int:
    """Returns the host memory of a background save, on the rank that writes most."""
    if not run.checkpoint.background:
        return 0
    return max(Rank(run, plan, rank).saved_bytes() for rank in range(plan.topology.pipeline))


def mean_seconds_between_failures(
    n_nodes: int, failures_per_node_day: float = FAILURES_PER_NODE_DAY
) -> float:
    """Returns the time from one failure of any node to the next."""
    return SECONDS_PER_DAY / (n_nodes * failures_per_node_day)


def suggest_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Returns the optimal seconds between saves.

    Args:
        save_seconds: training stall per save.
        mean_seconds_between_failures: of the whole job.
    """
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def useful_share(
    interval_seconds: float,
    save_seconds: float,
    mean_seconds_between_failures: float,
    restart_seconds: float = RESTART_SECONDS,
) -> float:
    """Returns the share of time in steps that need no repetition, 0 to 1.

    Source: E[ETTR] of arXiv:2410.21680.
    """
    lost = (restart_seconds + interval_seconds / 2) / mean_seconds_between_failures
    return max(0.0, 1 - lost) / (1 + save_seconds / interval_seconds)
