"""A disk that others fill: it is told, what was complete stays, and a later save works."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from tests.waiting import WATCHDOG_SECONDS

# Somebody else fills the disk after it was looked at (total_bytes 0), or has filled it before.
FILLED_BY_OTHERS = """
import shutil, sys
from pathlib import Path
import torch
from trainyard.checkpoint.background import Retention, AsyncCheckpointer
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.save import ALONE
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.errors import MachineError

folder = Path(sys.argv[1])
saver = AsyncCheckpointer(folder, ALONE, Retention(1), background=True)
values = {"model.a": torch.zeros(1_000_000), "optimizer.a": torch.zeros(1_000_000)}

def save_filled(step, total_bytes):
    [value.fill_(step) for value in values.values()]
    saver.save(
        Facts(step=step, consumed_sequences=0, consumed_tokens=0, run={}), values, {}, total_bytes
    )
    try:
        saver.wait()
    except MachineError as error:
        print(error)
        assert str(saver.take_failure()) == str(error)
    left = [path.name for path in folder.iterdir()]
    assert left == [f"step-{saver.last.step:08d}"], left
    check_checkpoint(folder / left[0])
    assert all((t == saver.last.step).all() for t in load_tensors(folder / left[0], "").values())
    return saver.last.step

assert save_filled(1, 8_000_000) == 1
others = folder.parent / "others"
for room in (7_500_000, 4_500_000, 2_000_000, 1_100_000):
    n_bytes = shutil.disk_usage(folder).free - room
    others.write_bytes(bytes(n_bytes))
    assert save_filled(2, 0) == 1
    assert save_filled(3, 8_000_000) == 1
    others.unlink()
assert save_filled(4, 8_000_000) == 4
"""


@pytest.mark.exhaustive
def test_a_disk_that_others_fill_is_told_and_saved_to_once_they_make_room(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    mount = f"mount -t tmpfs -o size=24m none {shlex.quote(str(tmp_path))}"
    argv = ["unshare", "--user", "--map-root-user", "--mount"]
    argv += ["bash", "-c", f'{mount} || exit 77; exec "$@"', "-"]
    argv += [sys.executable, "-c", FILLED_BY_OTHERS, str(checkpoints)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WATCHDOG_SECONDS)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no private file system here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"cannot write the checkpoint {checkpoints}/step-00000002: ") == 4
    assert done.stdout.count("No space left on device") == 4
    assert done.stdout.count("step-00000003: a checkpoint of 8.6 MiB does not fit in") == 4
