"""Times the training step of a run beside baselines, in turn, on one rank.

    python3 tools/set_up.py bench
    .venv-bench/bin/python -m benchmarks.against gpt3-350m train.compile=never \\
        --baselines transformers,plain-torch --rounds 3 --output record.json

`baselines.py` lists the baselines. Prints the table of `trainyard bench`; the record is its, too.
Each baseline trains in processes of its own, with the model, weights, tokens and learning rates of
the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.baselines import BASELINES, baseline_run, refuse_baseline

from trainyard.bench.job import TIMED_STEPS, BenchJob, describe_data, parse_steps, prepare_run
from trainyard.bench.record import build_record, render_table
from trainyard.bench.rounds import BenchRun, Rounds, run_rounds
from trainyard.config.load import load_run
from trainyard.data.patterns import find_token_files
from trainyard.errors import UserError
from trainyard.launch.environment import Process
from trainyard.layout.resolve import resolve
from trainyard.log import build_logger

ROOT = Path(__file__).resolve().parent.parent


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Times a run and baselines; returns the record.

    Raises:
        UserError: a baseline cannot do the step of the run, or the run needs several ranks.
    """
    run = find_token_files(load_run(options.run, options.overrides).run)
    resolve(run, 1)
    baselines = options.baselines.split(",")
    for baseline in baselines:
        refuse_baseline(baseline, run)
    # Processes of a round look for no modules in the current folder.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rounds = Rounds(BenchJob(parse_steps(options.steps, options.warm_up)), options.rounds, 1)
    with tempfile.TemporaryDirectory(prefix="trainyard-against-") as name:
        prepared = prepare_run(run, rounds.job.steps, Path(name))
        runs = [BenchRun(run.precision.kind, prepared)]
        for baseline in baselines:
            worker = ("benchmarks.baseline_worker", baseline)
            runs.append(BenchRun(baseline, baseline_run(baseline, prepared), worker))
        run_rounds(runs, rounds, Process(), Path(name))
        return build_record(runs, rounds, describe_data(run))


def main() -> None:
    """Prints the table, and writes the record where a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run file or a preset")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    parser.add_argument("--baselines", required=True, help=",".join(BASELINES))
    parser.add_argument("--steps", default=str(TIMED_STEPS), help="as of trainyard bench")
    parser.add_argument("--warm-up", type=int, help="as of trainyard bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file of the record")
    build_logger()
    try:
        options = parser.parse_intermixed_args()
        record = compare(options)
    except UserError as error:
        sys.exit(f"error: {error}")
    record["benchmark"] = "benchmarks/against.py"
    record["command"] = record["command"].replace("trainyard", "python -m benchmarks.against", 1)
    print(render_table(record))
    if options.output:
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
