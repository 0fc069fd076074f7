"""Damage, crashes and full disks: what was complete stays readable, what is damaged is found."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys

import pytest

from trainyard.checkpoint.load import verify_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.errors import CheckpointError, MachineError

PREAMBLE = """
import os, random, resource, signal, sys, time
from pathlib import Path
import torch
from trainyard.checkpoint.format import Facts, list_checkpoints
from trainyard.checkpoint.load import load_tensors, newest_checkpoint, verify_checkpoint
from trainyard.checkpoint.save import keep_newest, save_checkpoint
from trainyard.errors import MachineError

folder = Path(sys.argv[1])

def save(step, n=200_000):
    facts = Facts(step=step, consumed_sequences=0, consumed_tokens=0, run={})
    parts = ("model.a", "model.b", "optimizer.a", "optimizer.b")
    return save_checkpoint(folder, facts, {name: torch.full((n,), float(step)) for name in parts})
"""

# Forks, because a process that has imported torch is ready at once. The moment of the kill is drawn
# from two saves' time after the child is ready, so that most kills fall into a save.
KILLER = """
moments = random.Random(0)
save(1)
started = time.perf_counter()
save(2)
one_save_seconds = time.perf_counter() - started
newest_steps, n_half_written = [2], 0
for round in range(20):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"x")
            for step in range(newest_steps[-1] + 1, 10**6):
                save(step)
                keep_newest(folder, 2)
        finally:
            os._exit(1)
    os.read(ready, 1)
    time.sleep(moments.uniform(0.0, 2 * one_save_seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    n_half_written += any(folder.glob(".*"))
    steps = [verify_checkpoint(path).step for path in list_checkpoints(folder)]
    newest = newest_checkpoint(folder)
    assert verify_checkpoint(newest).step == max(steps)
    assert all((t == max(steps)).all() for t in load_tensors(newest, "").values())
    newest_steps.append(max(steps))
assert newest_steps == sorted(newest_steps), newest_steps
print(newest_steps[-1], n_half_written)
"""

# A limit on file size stands for a disk that fills up: space was there when it was looked at.
FILE_LIMITS = """
before = save(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(2)
    except MachineError as error:
        print(error)
    assert [p.name for p in folder.iterdir()] == ["step-00000001"], list(folder.iterdir())
    verify_checkpoint(before)
"""

FULL_DISK = """
before = save(1)
try:
    save(2)
except MachineError as error:
    print(error)
assert [p.name for p in folder.iterdir()] == ["step-00000001"], list(folder.iterdir())
verify_checkpoint(before)
"""


# Three more inodes are left: one rank or another cannot write its files, or its list of them.
FULL_DISK_OF_RANKS = """
import threading
from trainyard.checkpoint.save import Ranks
from trainyard.parallel.placement import whole

before = save(1, 20_000)
barrier, errors = threading.Barrier(4, timeout=60), {}

def one(rank):
    ranks = Ranks(rank, 4, lambda: barrier.wait())
    facts = Facts(step=2, consumed_sequences=0, consumed_tokens=0, run={})
    place = {"model.a": whole((1_600_000,)).cut(0, rank, 4)}
    try:
        save_checkpoint(folder, facts, {"model.a": torch.ones(400_000)}, place, ranks)
    except MachineError as error:
        errors[rank] = str(error)

threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(errors) == 4, errors
assert len(set(errors.values())) == 1, errors
print(errors[0])
assert [p.name for p in folder.iterdir()] == ["step-00000001"], list(folder.iterdir())
verify_checkpoint(before)
"""


def _python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_every_flipped_bit_is_found(tmp_path, make_facts, tensors):
    small = {name: tensors[name] for name in list(tensors)[-8:]} | {
        name: tensors[name] for name in list(tensors)[:4]
    }
    checkpoint = save_checkpoint(tmp_path, make_facts(1), small)
    verify_checkpoint(checkpoint)
    files = sorted(checkpoint.iterdir())
    assert [path.suffix for path in files] == [".json", ".safetensors", ".safetensors"]
    draw = random.Random(0)
    for index in range(1000):
        path = files[index % len(files)]
        with path.open("r+b") as file:
            position, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ bit]))
            file.flush()
            with pytest.raises(CheckpointError, match=path.name):
                verify_checkpoint(checkpoint)
            file.seek(position)
            file.write(bytes([byte]))
    verify_checkpoint(checkpoint)


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    done = _python(KILLER, tmp_path)
    assert done.returncode == 0, done.stderr
    newest_step, n_half_written = map(int, done.stdout.split())
    assert newest_step > 2, "the children were killed before they saved anything"
    assert n_half_written > 2, "the children were not killed while they saved"


def test_a_disk_that_fills_while_writing_leaves_older_checkpoints(tmp_path):
    done = _python(FILE_LIMITS, tmp_path, 0, 100, 700_000, 1_600_100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"cannot write the checkpoint {tmp_path}/step-00000002: ") == 4
    assert done.stdout.count("File too large") == 4
    assert done.stdout.count("hint: free space or quota on that disk") == 4


@pytest.mark.parametrize(
    "limits, code",
    [
        # Inodes run out: the disk has room, and yet nothing more can be written.
        ("size=64m,nr_inodes=6", FULL_DISK),
        ("size=64m,nr_inodes=9", FULL_DISK_OF_RANKS),
    ],
    ids=["one rank", "four ranks"],
)
def test_a_really_full_disk(tmp_path, limits, code):
    mount = f"mount -t tmpfs -o {limits} none {shlex.quote(str(tmp_path))}"
    inside = ["bash", "-c", f'{mount} || exit 77; exec "$@"', "-"]
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    script = [sys.executable, "-c", PREAMBLE + code, str(tmp_path)]
    try:
        done = subprocess.run(
            [*unshare, *inside, *script], capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no private file system here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout


def test_a_folder_that_cannot_be_written_is_named(tmp_path, make_facts):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(MachineError, match=r"cannot write the checkpoint .*a-file/step-00000001"):
        save_checkpoint(blocked, make_facts(1), {})
