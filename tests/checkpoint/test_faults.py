"""Damage, crashes and full disks: what was complete stays readable, what is damaged is found."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

PREAMBLE = """
import os, random, resource, shutil, signal, subprocess, sys, time
from pathlib import Path
import torch
from trainyard.checkpoint.format import Facts, list_checkpoints
from trainyard.checkpoint.load import load_tensors, newest_checkpoint
from trainyard.checkpoint.background import Retention, Saver, probe
from trainyard.checkpoint.save import ALONE, save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.errors import MachineError

folder = Path(sys.argv[1])

def save(step, n=200_000):
    facts = Facts(step=step, consumed_sequences=0, consumed_tokens=0, run={})
    parts = ("model.a", "model.b", "optimizer.a", "optimizer.b")
    return save_checkpoint(folder, facts, {name: torch.full((n,), float(step)) for name in parts})
"""


# Somebody else fills the disk after it was looked at (total_bytes 0), or has filled it before.
FILLED_BY_OTHERS = """
saver = Saver(folder, ALONE, Retention(1), background=True)
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

READ_ONLY = """
disk = folder.parent
saver = Saver(folder, ALONE, Retention(1), background=True)
values = {"model.a": torch.ones(1000)}

def save_at(step):
    facts = Facts(step=step, consumed_sequences=0, consumed_tokens=0, run={})
    saver.save(facts, values, {}, 4000)
    saver.wait()

save_at(1)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
for attempt in (lambda: probe(folder, 4000), lambda: probe(disk / "new", 1), lambda: save_at(2)):
    try:
        attempt()
    except MachineError as error:
        print(error)
check_checkpoint(newest_checkpoint(folder))
subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
assert [path.name for path in folder.iterdir()] == ["step-00000001"]
probe(folder, 4000)
save_at(3)
assert [path.name for path in folder.iterdir()] == ["step-00000003"]
"""


@pytest.mark.exhaustive
def test_a_disk_that_others_fill_is_told_and_saved_to_once_they_make_room(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    done = _python_on_a_disk_of_its_own(FILLED_BY_OTHERS, tmp_path, "size=24m", checkpoints)
    assert done.stdout.count(f"cannot write the checkpoint {checkpoints}/step-00000002: ") == 4
    assert done.stdout.count("No space left on device") == 4
    assert done.stdout.count("step-00000003: a checkpoint of 8.6 MiB does not fit in") == 4


@pytest.mark.exhaustive
def test_a_disk_that_turns_read_only_is_told_and_left_as_it_is(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    done = _python_on_a_disk_of_its_own(READ_ONLY, tmp_path, "size=24m", checkpoints)
    assert done.stdout.count("Read-only file system") == 3
    assert f"cannot write checkpoints to {checkpoints}: " in done.stdout
    assert f"cannot write checkpoints to {tmp_path / 'new'}: " in done.stdout
    assert f"cannot write the checkpoint {checkpoints}/step-00000002: " in done.stdout


def _python_on_a_disk_of_its_own(
    code: str, disk: Path, limits: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    mount = f"mount -t tmpfs -o {limits} none {shlex.quote(str(disk))}"
    inside = ["bash", "-c", f'{mount} || exit 77; exec "$@"', "-"]
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    script = [sys.executable, "-c", PREAMBLE + code, str(folder)]
    try:
        done = subprocess.run(
            [*unshare, *inside, *script],
            capture_output=True,
            text=True,
            timeout=WATCHDOG_SECONDS,
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no private file system here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done
