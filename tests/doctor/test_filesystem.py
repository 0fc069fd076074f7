from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

from trainyard.doctor import filesystem
from trainyard.doctor.diagnosis import PASS, REPLACE, WARN
from trainyard.doctor.filesystem import (
    NEW,
    describe_folder,
    find_mount,
    locked_file,
    look_for,
    measure_rates,
    trial_folder,
    try_guarantees,
)
from trainyard.errors import MachineError


def test_this_file_system_keeps_its_promises(tmp_path: Path) -> None:
    found = list(try_guarantees(tmp_path))
    assert [each.name for each in found] == [
        *("sync", "memory map", "rename of a folder", "rename of a file", "lock")
    ]
    assert {each.verdict for each in found} == {PASS}, found
    n_reads = int(found[3].text.partition("(")[2].split()[0])
    assert n_reads > 10


def test_what_cannot_be_done_is_said_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "file").write_bytes(b"in the way")
    found = {each.name: each for each in try_guarantees(tmp_path)}
    assert found["rename of a folder"].verdict == REPLACE
    assert "ENOTEMPTY" in found["rename of a folder"].text
    assert found["rename of a folder"].hint == "keep run folders on another file system"
    assert found["lock"].verdict == PASS


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem.fcntl, "flock", lambda file, how: None)  # as NFS with nolock
    found = {each.name: each for each in try_guarantees(tmp_path)}
    assert (found["lock"].verdict, found["lock"].text) == (
        WARN,
        "does not exclude another process",
    )


def test_a_file_that_is_read_while_it_is_replaced_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system does that removes the old file before it puts the new one there."""
    missed = threading.Event()
    read, replace = Path.read_bytes, Path.replace

    def read_noting(path: Path) -> bytes:
        try:
            return read(path)
        except FileNotFoundError:
            missed.set()
            raise

    def replace_in_two_steps(path: Path, target: Path) -> Path:
        target.unlink()
        assert missed.wait(WATCHDOG_SECONDS)
        return replace(path, target)

    monkeypatch.setattr(Path, "read_bytes", read_noting)
    monkeypatch.setattr(Path, "replace", replace_in_two_steps)
    (found,) = (each for each in try_guarantees(tmp_path) if each.name == "rename of a file")
    assert (found.verdict, found.text) == (REPLACE, "leaves it missing for a moment")


def test_rates_are_of_the_bytes_that_were_written(tmp_path: Path) -> None:
    sizes: list[int] = []

    def wait() -> None:
        sizes.extend(path.stat().st_size for path in tmp_path.iterdir())

    written, read, how = measure_rates(tmp_path, 20 * 2**20, wait)
    assert sizes == [16 * 2**20]  # whole pieces; the first wait is before there is a file
    assert written > 0 and read > 0
    assert how in (
        "read past the page cache",
        "read after advising the kernel to drop it",
        "possibly read from memory",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "trial"
    folder.mkdir(parents=True)
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(MachineError, match=r"8.0 MiB cannot be written to .*runs and read"):
            measure_rates(folder, 2**23)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(folder.iterdir()) == []


def test_nothing_is_left_of_a_trial(tmp_path: Path) -> None:
    with trial_folder(tmp_path / "a" / "runs") as folder:
        assert folder.parent == tmp_path / "a" / "runs"
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with trial_folder(tmp_path / "runs"):
        pass
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            MachineError, match=r"cannot write to .*file/runs: Not a directory"
        ) as raised,
        trial_folder(tmp_path / "file" / "runs"),
    ):
        pass
    assert raised.value.hint == "set a folder for runs with --folder"


def test_where_a_folder_is(tmp_path: Path) -> None:
    facts = describe_folder(tmp_path)
    assert facts["folder"] == str(tmp_path.resolve())
    assert " free of " in facts["space"]
    assert ", mounted at /" in facts["file system"]


def test_of_nested_mounts_the_innermost_counts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    lines = [
        "overlay / overlay rw 0 0",
        f"server:/home {tmp_path} nfs4 rw 0 0",
        f"scratch@tcp:/s {tmp_path}/my\\040scratch lustre rw 0 0",
        f"other {tmp_path}/my xfs rw 0 0",
    ]
    mounts.write_text("\n".join(lines) + "\n")
    assert find_mount(tmp_path / "my scratch" / "runs", mounts) == (
        "lustre",
        f"{tmp_path}/my scratch",
    )
    assert find_mount(tmp_path / "mine", mounts) == ("nfs4", str(tmp_path))
    assert find_mount(Path("/etc"), mounts) == ("overlay", "/")
    assert find_mount(tmp_path, tmp_path / "none") == (None, None)


def test_a_file_that_another_machine_sees_and_cannot_lock(tmp_path: Path) -> None:
    with locked_file(tmp_path) as path:
        assert [each.verdict for each in look_for(path)] == [PASS, PASS]
    assert not path.exists()


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "SHARING_SECONDS", 0.2)
    (found,) = look_for(tmp_path / "nothing")
    assert found.verdict == REPLACE
    assert found.text == f"{tmp_path} is not the folder that the first machine sees"
    assert "--folder" in found.hint


def test_a_lock_that_stays_on_its_machine(tmp_path: Path) -> None:
    with locked_file(tmp_path) as path:
        # Another file of the same name is not locked: as with local locks of Lustre.
        path.unlink()
        path.write_bytes(NEW)
        found = list(look_for(path))
    assert [each.verdict for each in found] == [PASS, WARN]
    assert found[1].hint.endswith("mount it with -o flock")
