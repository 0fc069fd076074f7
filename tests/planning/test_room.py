"""What this machine has no room for does not start, and nothing is written."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.command import trainyard
from tests.faults.small_run import write_tokens

from trainyard.api.plan_table import Report
from trainyard.api.planning import plan as trainyard_plan
from trainyard.api.planning import refuse_unfit
from trainyard.config.load import load_run, override_run
from trainyard.errors import MachineError
from trainyard.layout.resolve import resolve
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning import room
from trainyard.planning.memory import PROCESS_BYTES, busiest_memory
from trainyard.planning.room import free_memory_bytes, refuse_without_room
from trainyard.units import format_bytes

LARGE = ["train.micro_batch_size=4194304", "train.global_batch_size=4194304", "precision.kind=fp32"]
MANY = ["train.length=10M steps", "checkpoint.interval=1", "checkpoint.keep_last=10000000"]


@pytest.fixture
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override that names token files: a run without data is refused first."""
    return f"data.blend.prefixes=['{write_tokens(tmp_path_factory.mktemp('data'))}']"


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        (
            LARGE,
            r"tiny does not fit in memory: a rank needs about .* TiB",
            "train.micro_batch_size=",
        ),
        (
            MANY,
            r"tiny keeps up to 10000000 checkpoints of .* more, and ",
            "checkpoint.keep_last=1, or",
        ),
    ],
)
def test_a_run_without_room_does_not_start(
    data: str, tmp_path: Path, changes: list[str], problem: str, hint: str
) -> None:
    done = trainyard("train", "tiny", data, *changes, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(problem, done.stderr)
    assert f"hint: {hint}" in done.stderr
    assert list(tmp_path.iterdir()) == []
    forced = trainyard("train", "tiny", *changes, "--force", folder=tmp_path)
    assert "needs training data" in forced.stderr or "prefixes" in forced.stderr, forced.stderr


def test_all_ranks_of_a_machine_share_its_memory(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = "checkpoint.background=false"
    run = load_run("tiny", [blocking]).run
    needed = busiest_memory(run, resolve(run, 1), on_gpu=False).peak_bytes
    monkeypatch.setattr(room, "free_memory_bytes", lambda: PROCESS_BYTES + needed * 3 // 2)
    two = trainyard("train", "tiny", data, blocking, "--ranks", "2", folder=tmp_path)
    assert "tiny does not fit in memory: 2 ranks need about" in two.stderr
    assert "does not fit" not in trainyard("train", "tiny", blocking, folder=tmp_path).stderr
    spare = 2 * PROCESS_BYTES
    for times, change in [
        (1.5, "train.micro_batch_size=2"),
        (1.2, "train.micro_batch_size=1"),
        (1.05, 'train.micro_batch_size=1 parallel.recompute="attention"'),
        (0.5, "a smaller model, or its ranks on more machines,"),
    ]:
        monkeypatch.setattr(room, "free_memory_bytes", lambda times=times: spare + times * needed)
        with pytest.raises(MachineError, match="2 ranks need") as caught:
            refuse_without_room(run, resolve(run, 2), 2, tmp_path)
        assert caught.value.hint.startswith(f"{change} fits; ")
    # Each of two GPUs has its own, whatever the machine has.
    memory = busiest_memory(run, resolve(run, 2))
    on_gpu, spare = memory.peak_bytes, 2 * memory.process_bytes(on_gpu=True)
    monkeypatch.setattr(room, "list_gpus", lambda: ["T4", "T4"])
    monkeypatch.setattr(room, "gpu_bytes", lambda name: on_gpu)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: spare)
    refuse_without_room(run, resolve(run, 2), 2, tmp_path)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: spare - 1)
    with pytest.raises(MachineError, match=r"2 ranks need about .*, and this machine has "):
        refuse_without_room(run, resolve(run, 2), 2, tmp_path)
    monkeypatch.setattr(room, "gpu_bytes", lambda name: on_gpu - 1)
    with pytest.raises(MachineError, match=r"a rank needs about .*, and T4 has "):
        refuse_without_room(run, resolve(run, 2), 2, tmp_path)


def test_copies_for_saves_are_in_the_memory_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run("tiny").run
    plan = resolve(run, 2)
    memory = busiest_memory(run, plan, on_gpu=False)
    assert memory.host_bytes > 0
    needed = 2 * (PROCESS_BYTES + memory.peak_bytes + memory.host_bytes)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed)
    refuse_without_room(run, plan, 2, tmp_path)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed - 1)
    with pytest.raises(MachineError, match="2 ranks need") as caught:
        refuse_without_room(run, plan, 2, tmp_path)
    assert caught.value.hint.startswith("checkpoint.background=false fits; ")


def test_a_process_before_any_tensor() -> None:
    used = (
        "import trainyard.training.worker, trainyard.parallel.data, trainyard.optim.optimizer, "
        "torch.distributed.tensor; print(open('/proc/self/status').read())"
    )
    told = subprocess.run([sys.executable, "-c", used], capture_output=True, text=True, check=True)
    kib = int(re.findall(r"VmHWM:\s+(\d+) kB", told.stdout)[0])
    assert 1024 * kib == pytest.approx(PROCESS_BYTES, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "n_there", "has_room"),
    [
        (["checkpoint.keep_last=3"], 0, False),
        (["checkpoint.keep_last=2"], 0, True),
        (["checkpoint.keep_last=3"], 1, True),
        (["checkpoint.keep_last=3", "checkpoint.interval=0"], 0, True),
        (["checkpoint.keep_last=9", "train.length=3 steps"], 0, True),
    ],
)
def test_a_disk_with_room_for_three_checkpoints(
    changes: list[str],
    n_there: int,
    has_room: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = load_run("tiny", ["checkpoint.interval=1", *changes]).run
    plan = resolve(run, 1)
    folder = tmp_path / "runs" / "tiny"
    for number in range(n_there):
        (folder / "checkpoints" / f"step-{number}").mkdir(parents=True)
    place = folder / "checkpoints" if n_there else tmp_path  # the disk of another may be full
    free = {place: 3 * checkpoint_bytes(run, plan.n_parameters)}
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free.get(path, 0)))
    monkeypatch.setattr(room, "shutil", usage)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: None)
    with nullcontext() if has_room else pytest.raises(MachineError, match="keeps up to 4 check"):
        refuse_without_room(run, plan, 1, folder)


def test_the_least_of_what_a_machine_and_a_job_have(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) is None
    for name, text in {
        "proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:   2048 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "max\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == 2**21
    assert free_memory_bytes(tmp_path, "MemTotal") == 2**22
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("1000000\n")
    assert free_memory_bytes(tmp_path) == 1_000_000
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step_0/task_1\n")
    assert free_memory_bytes(tmp_path) == 1_000_000, "a group above that of its processes"
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000\n")
    assert free_memory_bytes(tmp_path) == 500_000


def test_host_memory_of_a_node_of_gpus(tmp_path: Path) -> None:
    cluster = tmp_path / "own.toml"
    needed = 8 * (PROCESS_BYTES + 4 * 2**30)  # to draw weights; copies for saving are smaller
    layout = ["parallel.tensor=8", "train.batch_ramp=none", "train.micro_batch_size=1"]
    run = load_run("gpt3-13b", layout).run
    assert busiest_memory(run, resolve(run, 256)).host_bytes < 4 * 2**30

    def plan(gigabytes: float, *overrides: str, nodes: int = 32) -> Report:
        cluster.write_text(f"extends='lumi'\nhost_memory_gigabytes={gigabytes}")
        changed = override_run(run, list(overrides))
        return trainyard_plan(changed, cluster=str(cluster), nodes=nodes)

    enough = needed / 2**30
    assert f"processes of a node: {format_bytes(needed)} of {enough:.1f} GiB: fits" in str(
        plan(enough)
    )
    refuse_unfit(plan(enough))
    with pytest.raises(MachineError, match=r"does not fit in host memory: .* need") as caught:
        refuse_unfit(plan(enough - 0.1))
    assert caught.value.hint.startswith("cheapest change that makes it fit: ")
    changes = [each.change for each in plan(enough, nodes=2).remedies]
    assert "checkpoint.background=false" in changes
    refuse_unfit(plan(enough, "checkpoint.background=false", nodes=2))


def test_whole_weights_are_drawn_before_a_rank_keeps_its_part() -> None:
    run = load_run("gpt3-125m", ["parallel.zero_stage=3"]).run
    plan = resolve(run, 4)
    memory = busiest_memory(run, plan, on_gpu=True)
    assert memory.drawn_bytes == 4 * plan.n_parameters
    assert memory.process_bytes(on_gpu=True) == PROCESS_BYTES + 4 * plan.n_parameters
