"""Prints how often to save 2.3 TiB to file systems of four speeds, as a table in Markdown.

    python benchmarks/checkpoint_interval.py --nodes 128

Size and speeds are those of a published guide to training 175B parameters on Azure Managed Lustre.
Its times divide GiB by GB/s, which makes them 7 % too short; they stand beside the right ones.
"""

from __future__ import annotations

import argparse

from trainyard.planning.saving import (
    FAILURES_PER_NODE_DAY,
    mean_seconds_between_failures,
    suggest_interval,
    useful_share,
)

N_BYTES = 2.3 * 2**40
GIGABYTES_PER_SECOND = (19.2, 64, 128, 256)
CAPACITY_TIERS = (40, 125, 250, 500)
"""Throughput in MB/s for each TiB of the file system, as it is bought."""


def render_table(n_nodes: int, failures_per_node_day: float) -> str:
    """Renders one row for each speed."""
    between_failures = mean_seconds_between_failures(n_nodes, failures_per_node_day)
    lines = [
        "| tier | GB/s | the guide's minutes | minutes to write | save every | useful time |",
        "|---|---|---|---|---|---|",
    ]
    for tier, speed in zip(CAPACITY_TIERS, GIGABYTES_PER_SECOND, strict=True):
        theirs = N_BYTES / 2**30 / speed / 60
        seconds = N_BYTES / (speed * 1e9)
        interval = suggest_interval(seconds, between_failures)
        useful = useful_share(interval, seconds, between_failures)
        lines.append(
            f"| {tier} | {speed:g} | {theirs:.2f} | {seconds / 60:.2f} | {interval / 60:.0f} min | "
            f"{useful:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--failures-per-node-day", type=float, default=FAILURES_PER_NODE_DAY)
    arguments = parser.parse_args()
    print(render_table(arguments.nodes, arguments.failures_per_node_day))


if __name__ == "__main__":
    main()
