"""A step of two ranks, one core each, against one rank on both cores, with the same global batch.

    python benchmarks/two_ranks.py --rounds 3 --output record.json

Both are `trainyard bench` on random tokens, in turn. Two ranks share the batch (data parallel, with
the preset's ZeRO stage), so they exchange all gradients and weights at each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import Figures, describe_machine, publish

COMMAND = [sys.executable, "-P", "-c", "from trainyard.cli.main import main; main()", "bench"]
# Sequences in a step.
BATCHES = {"laptop": 16, "tiny": 4}


def measure(preset: str, n_ranks: int, n_steps: int) -> Figures:
    """Times steps once; gives the milliseconds of each and what its parts took."""
    batch = BATCHES[preset]
    fields = [
        "precision.kind=fp32",
        f"train.global_batch_size={batch}",
        f"train.micro_batch_size={batch // n_ranks}",
    ]
    options = ["--ranks", str(n_ranks), "--steps", str(n_steps), "--warm-up", "2"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "record.json"
        subprocess.run(
            [*COMMAND, preset, *fields, *options, "--output", str(output)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        [found] = json.loads(output.read_text(encoding="utf-8"))["candidates"]
    return {
        "step_milliseconds": found["rounds"][0]["step_milliseconds"],
        "split_milliseconds": found["split"]["milliseconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--presets", default="laptop")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record = describe_machine(("torch",)) | {"load_average": os.getloadavg(), "presets": {}}
    for preset in options.presets.split(","):
        rounds: dict[str, list[Figures]] = {"1 rank": [], "2 ranks": []}
        for _ in range(options.rounds):
            for n_ranks, found in enumerate(rounds.values(), 1):
                found.append(measure(preset, n_ranks, options.steps))
        record["presets"][preset] = {
            who: {
                "median": statistics.median(
                    milliseconds / 1000
                    for each in found
                    for milliseconds in each["step_milliseconds"]
                ),
                "rounds": found,
            }
            for who, found in rounds.items()
        }
    publish(record, options.output)


if __name__ == "__main__":
    main()
