"""Starts the process group, or reports one error on all ranks.

StartedRank with different versions, runs or data would train nonsense, and a missing rank keeps the
others waiting. So a roll call precedes the process group, in a store that all ranks reach (a file
on one machine, else a small server of rank 0):

    every rank    rank/3   = {"host": "n2", "facts": {"torch": "2.13.0", "run": "5e1c..", ..}}
    rank 0        verdict  = {} once all have joined and agree, else the problem, for all to raise
    a failing one failure  = its error, so that no rank waits for it

Keys stay in the store, so a rank that fails later reports why in the same way: the others see a
broken connection, look there, and raise the true reason. If a rank dies without a report, they
raise `LostRankError`; its parent process names it (`launch/supervise.py`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainyard import __version__
from trainyard.errors import LaunchError, LostRankError, MachineError, UserError
from trainyard.launch.environment import Process, code_checksum, connect_late, keep_off_the_network
from trainyard.launch.heartbeat import ANOTHER, Heartbeat, HeartbeatReader, end_with_parent
from trainyard.topology import name_ranks

COLLECTIVE_TIMEOUT = timedelta(days=1)  # parent processes detect and name hung ranks
JOIN_SECONDS = 300.0
"""For all ranks to join: nodes that import torch from a busy file system differ by minutes."""
FAREWELL_SECONDS = 10.0
FAILURE_SECONDS = 2.0
POLL_SECONDS, POLLS_A_SECOND = 0.1, 10_000
"""Between two looks into the store; and how many looks of all ranks rank 0 must answer."""
N_SHOWN, N_HOSTS = 16, 3

Facts = Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class StartedRank:
    """This rank among all ranks."""

    process: Process
    device: torch.device
    store: Store | None
    """A key-value store for all ranks; None with one rank, which has no process group."""


@contextmanager
def start_ranks(
    process: Process, device: torch.device, facts: Facts, timeout_seconds: float = JOIN_SECONDS
) -> Iterator[StartedRank]:
    """Initializes the process group of all ranks inside its block; does nothing for one rank.

    Args:
        process: from `read_process`.
        device: of this rank.
        facts: returns what must be equal on all ranks, by name; if it raises, all ranks stop.
        timeout_seconds: for all ranks to join.

    Raises:
        LaunchError: a rank is missing or unreachable, or facts differ; names the ranks.
        MachineError: another rank failed first; gives its reason.
        LostRankError: another rank died without a report.
    """
    if process.n_ranks == 1:
        yield StartedRank(process, device, None)
        return
    show_native_stacks()
    if process.parent_pipe is not None:
        end_with_parent(process.parent_pipe)
    meeting = _Rendezvous(process, timeout_seconds)
    meeting.call_roll(facts)
    try:
        _init_group(process, device, meeting)
        yield StartedRank(process, device, meeting.store)
    except BaseException as error:
        reason = meeting.tell_failure(error)
        # Interrupted communication can keep this from returning.
        _call_within(FAILURE_SECONDS, dist.destroy_process_group)
        meeting.keep_store_until_all("heard", FAILURE_SECONDS)
        if reason is not None:
            raise reason from error
        raise
    meeting.wait_for_all("done", FAREWELL_SECONDS)
    dist.destroy_process_group()
    meeting.keep_store_until_all("left", FAREWELL_SECONDS)


def show_native_stacks() -> None:
    """Lets a crash print the C++ stacks of all threads, before those of Python."""
    install = getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", None)  # private
    if install is not None:
        install(True)
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))  # no crash


def gather_facts(run_text: str, data_fingerprint: str) -> dict[str, str]:
    """Returns what must be equal on all ranks of a training run."""
    return {
        "trainyard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "run": sha256(run_text.encode()).hexdigest(),
        "data": data_fingerprint,
    }


class _Rendezvous:
    """The store for the rendezvous, and the messages of ranks in it."""

    def __init__(self, process: Process, timeout_seconds: float) -> None:
        self._process = process
        self.timeout_seconds = timeout_seconds
        self._host = socket.gethostname()
        self._listens_at = ""
        self.store = PrefixStore(f"attempt-{process.attempt}", self._open_store())
        self._deadline = time.monotonic() + timeout_seconds
        self._poll_seconds = max(POLL_SECONDS, process.n_ranks / POLLS_A_SECOND)

    @property
    def me(self) -> str:
        """This rank's name in messages."""
        return f"rank {self._process.rank} on {self._host}"

    @property
    def place(self) -> str:
        """The rendezvous's name in messages."""
        process = self._process
        return str(process.store_file or f"{process.address}:{process.port}")

    def call_roll(self, facts: Facts) -> None:
        """Returns on all ranks once all have joined with equal facts, or raises on all."""
        try:
            record = json.dumps({"host": self._host, "facts": {"code": code_checksum(), **facts()}})
        except BaseException as error:
            self.tell_failure(error)
            self.keep_store_until_all("heard", FAILURE_SECONDS)
            raise
        try:
            self._say_present(record)
            if self._process.rank == 0:
                self.store.set("verdict", json.dumps(self._judge()))
            problem = self._await_verdict()
        except RuntimeError as error:
            raise LaunchError(
                f"{self.me}: rank 0 at {self.place} ended while the ranks were starting",
                "see the output of rank 0",
            ) from error
        if problem is not None:
            self.keep_store_until_all("heard", FAILURE_SECONDS)
            raise problem

    def tell_failure(self, error: BaseException) -> MachineError | None:
        """Reports this rank's failure to all ranks, unless another rank caused it.

        Returns:
            if another did, the true reason, or that it is unknown.
        """
        place = {"rank": self._process.rank, "host": self._host}
        own = place | _describe(error)
        has_lost_another = _is_lost_connection(error)
        first: dict[str, Any] | None = None
        try:
            if not has_lost_another:
                first = json.loads(self.store.compare_set("failure", "", json.dumps(own)))
            elif self.store.check(["failure"]):
                first = json.loads(self.store.get("failure"))
        except RuntimeError:  # the store died with rank 0
            pass
        follows = first not in (None, own) and isinstance(error.__cause__ or error, RuntimeError)
        if not follows and not has_lost_another:
            return None
        # The parent process must not blame this rank.
        Heartbeat(self._process.heartbeat).blame(ANOTHER if first is None else first["rank"])
        return _describe_lost_rank(self._process) if first is None else _describe_failure(first)

    def wait_for_all(self, key: str, seconds: float) -> None:
        """Waits until all ranks arrive or end, or the time runs out."""
        deadline = time.monotonic() + seconds
        try:
            n_here = self.store.add(key, 1)
            while n_here < self._process.n_ranks and time.monotonic() < deadline:
                time.sleep(self._poll_seconds)
                n_here = self.store.add(key, 0)
        except RuntimeError:  # rank 0 has exited, and the store with it
            return

    def keep_store_until_all(self, key: str, seconds: float) -> None:
        """On rank 0, which hosts the store, waits until all ranks arrive."""
        self.wait_for_all(key, seconds if self._process.rank == 0 else 0.0)

    def _say_present(self, record: str) -> None:
        token = f"{record}{time.time_ns()}"
        key = f"rank/{self._process.rank}"
        if self.store.compare_set(f"{key}/token", "", token).decode() != token:
            raise LaunchError(
                f"{self.me} reached another run's ranks at {self.place}",
                "concurrent runs on one machine need different ports: set MASTER_PORT",
            )
        self.store.set(key, record)

    def _judge(self) -> dict[str, str]:
        """On rank 0: waits for all ranks; returns their problem."""
        keys = [f"rank/{rank}" for rank in range(self._process.n_ranks)]
        # The others wait as long as this rank, and must still get the verdict.
        deadline = self._deadline - 0.1 * self.timeout_seconds
        while time.monotonic() < deadline and not self.store.check(["failure"]):
            if self.store.check(keys):
                break
            time.sleep(POLL_SECONDS)
        return self._find_problem()

    def _find_problem(self) -> dict[str, str]:
        n_ranks = self._process.n_ranks
        keys = {rank: f"rank/{rank}" for rank in range(n_ranks)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        found = self.store.multi_get(list(keys.values())) if keys else []
        records: dict[int, dict[str, Any]] = dict(zip(keys, map(json.loads, found), strict=True))
        hosts = {rank: record["host"] for rank, record in records.items()}
        missing = [rank for rank in range(n_ranks) if rank not in records]
        if missing:
            return {
                "problem": f"{name_ranks(missing)} of {n_ranks} did not join the rendezvous at "
                f"{self.place} within {self.timeout_seconds:g} s; "
                f"{name_ranks(list(hosts))} did, on {_name_hosts(list(hosts), hosts)}",
                "hint": "see the output of the missing ranks; rank 0 waits at "
                f"{self._listens_at or self.place}, which every rank must reach",
            }
        facts = {rank: record["facts"] for rank, record in records.items()}
        names = list(dict.fromkeys(name for each in facts.values() for name in each))
        problems = [_describe_difference(name, facts, hosts) for name in names]
        if not any(problems):
            return {}
        return {
            "problem": "the ranks differ\n" + "\n".join(filter(None, problems)),
            "hint": "start all ranks from one installation, one run file and the same token files",
        }

    def _await_verdict(self) -> UserError | None:
        # Unlike a server, a file does not show that rank 0 is there before it writes.
        while time.monotonic() < self._deadline:
            if self.store.check(["failure"]):
                return _describe_failure(json.loads(self.store.get("failure")))
            if self.store.check(["verdict"]):
                verdict = json.loads(self.store.get("verdict"))
                return LaunchError(**verdict) if verdict else None
            time.sleep(self._poll_seconds)
        silent = {"problem": f"rank 0 at {self.place} does not respond", "hint": "see its output"}
        return LaunchError(**(self._find_problem() or silent))

    def _open_store(self) -> Store:
        process = self._process
        if process.store_file is not None:
            return FileStore(str(process.store_file), process.n_ranks)
        listens = process.rank == 0 and not process.launcher_listens
        listener = self._listen() if listens else None
        if listener is None:
            self._reach()
        return TCPStore(
            process.address,
            process.port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout_seconds),
            # TCPStore's own socket would listen on every interface.
            master_listen_fd=None if listener is None else listener.detach(),
        )

    def _listen(self) -> socket.socket:
        try:
            place = (self._process.address, self._process.port)
            family, *_, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
            self._listens_at = str(address[0])
            return socket.create_server(address[:2], family=family, backlog=2048)
        except OSError as error:
            raise LaunchError(
                f"{self.me} cannot listen at {self.place}: "
                f"{str(error.strerror).partition(' (')[0]}",
                "rank 0 runs on the machine that MASTER_ADDR names; MASTER_PORT must be free there",
            ) from error

    def _reach(self) -> None:
        """Waits until rank 0 listens; torch would too, but print pages of stack frames."""
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            left = deadline - time.monotonic()
            try:
                address = (self._process.address, self._process.port)
                socket.create_connection(address, timeout=max(left, POLL_SECONDS)).close()
                return
            except OSError as error:
                if left <= 0:
                    raise LaunchError(
                        f"{self.me} cannot reach rank 0 at {self.place} "
                        f"within {self.timeout_seconds:g} s: {error.strerror or error}",
                        "see the output of rank 0; on every rank MASTER_ADDR must name its "
                        "machine, and no firewall may block it",
                    ) from error
            time.sleep(POLL_SECONDS)


def _init_group(process: Process, device: torch.device, meeting: _Rendezvous) -> None:
    connect_late()
    if process.is_on_one_machine:
        keep_off_the_network()
    # Subgroups use it later, when ranks can be minutes apart.
    meeting.store.set_timeout(COLLECTIVE_TIMEOUT)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", meeting.store),
            rank=process.rank,
            world_size=process.n_ranks,
            timeout=timedelta(seconds=meeting.timeout_seconds),
        )
        dist.all_reduce(torch.zeros(1))  # gloo connects two ranks at their first message
    except RuntimeError as error:
        Heartbeat(process.heartbeat).blame(ANOTHER)  # it may have died since
        raise LaunchError(
            f"{meeting.me} joined the rendezvous, but cannot connect to the others: "
            f"{str(error).splitlines()[0]}",
            "ranks use the address of the host name, unless GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME name a network interface",
        ) from error
    # A short one to connect, a long one to compute. Private until torch 2.13.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(COLLECTIVE_TIMEOUT, None)


def _call_within(seconds: float, function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Returns whether communication failed; a bug in this rank raises other errors."""
    if error is None or isinstance(error, LaunchError):
        return False
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, RuntimeError) and re.search(r"\bgloo/|\bNCCL\b", str(error)):
        return True
    return _is_lost_connection(error.__cause__ or error.__context__)


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"problem": error.problem, "hint": error.hint, "exit_code": error.exit_code}
    problem = f"{type(error).__name__}: {error}"
    return {"problem": problem, "hint": "see the output of that rank", "exit_code": 1}


def _describe_lost_rank(process: Process) -> LostRankError:
    step = f" at step {HeartbeatReader(process.heartbeat).read().step}" if process.heartbeat else ""
    return LostRankError(
        f"rank {process.rank} lost the connection to another rank{step}",
        "that rank or its machine died: see its output or its launcher's",
    )


def _describe_failure(record: Mapping[str, Any]) -> MachineError:
    error = MachineError(
        f"rank {record['rank']} on {record['host']} failed: {record['problem']}", record["hint"]
    )
    error.exit_code = record["exit_code"]
    return error


def _describe_difference(
    name: str, facts: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]
) -> str:
    """Returns `torch: 2.13.0 on ranks 0-2 (n1); 2.11.0 on rank 3 (n2)`; empty if all agree."""
    holders: dict[str, list[int]] = {}
    for rank, each in facts.items():
        holders.setdefault(each.get(name, "nothing"), []).append(rank)
    if len(holders) == 1:
        return ""
    # Past where they differ: else they could look equal.
    n_shown = len(os.path.commonprefix(list(holders))) + N_SHOWN  # noqa: RUF071
    shown = [
        f"{value if len(value) <= n_shown else value[:n_shown] + '..'} on "
        f"{name_ranks(ranks)} ({_name_hosts(ranks, hosts)})"
        for value, ranks in holders.items()
    ]
    return f"{name}: {'; '.join(shown)}"


def _name_hosts(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(names) - N_HOSTS} more" if len(names) > N_HOSTS else ""
    return ", ".join(names[:N_HOSTS]) + more
