"""Ranks that hang, as those see it who wait for them: real processes, one of which is stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

STUCK = """
import os, signal, sys, time
from pathlib import Path
import torch
from trainyard.doctor import examine
from trainyard.launch.environment import read_process
from trainyard.launch.local import run_ranks
from trainyard.log import build_logger
from trainyard.parallel.start import start_ranks

stops = sys.argv[1] == "stops"
examine.POLL_SECONDS, examine.ANSWER_SECONDS = 0.1, 1.0 if stops else 900.0
build_logger()
process = read_process()
if process.n_ranks == 1:
    try:
        run_ranks(2, [sys.executable, "-P", __file__, *sys.argv[1:]], Path(sys.argv[2]))
    except Exception as error:
        sys.exit(f"{error}")
with start_ranks(process, torch.device("cpu"), dict) as ranks:
    with examine.RankGroup(process, ranks.store, 900.0) as together:
        together.enter("the collectives")
        together.wait()
        if process.rank == 1:
            if not stops:
                together.enter("the folder of the runs", 60)
            ranks.store.set("process", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP) if stops else signal.pause()
        stat = Path(f"/proc/{ranks.store.get('process').decode()}/stat")
        while stops and stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        together.enter("the collectives", -900.0)  # its patience is at an end
        together.wait()
"""


def run_stuck(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "stuck.py"
    script.write_text(STUCK)
    return subprocess.run(
        [sys.executable, script, how, folder / "logs"], capture_output=True, text=True
    )


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    result = run_stuck("stops", tmp_path)
    assert result.returncode == 1  # of the script
    assert "rank 1 of 2 does not respond since the collectives; rank 0 did, on " in result.stderr
    assert "exclude the machine" in result.stderr


def test_ranks_that_answer_and_do_not_go_on_say_where_they_are(tmp_path: Path) -> None:
    result = run_stuck("waits", tmp_path)
    assert result.returncode == 1
    assert "no progress since the collectives, though all 2 ranks respond: rank 0 at the " in (
        result.stderr
    )
    assert "rank 1 at the folder of the runs on " in result.stderr
