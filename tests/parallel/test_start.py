"""Ranks start together or not at all, and every one of them says the same about why not."""

from __future__ import annotations

import json
import mmap
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.command import Fork
from tests.parallel.starting_rank import run_rank
from tests.waiting import WATCHDOG_SECONDS

from trainyard.launch.environment import Process, code_checksum
from trainyard.parallel.start import gather_facts, start_ranks

HOST = socket.gethostname()
FACTS = {"torch": "2.13.0", "run": "5e1c", "data": "0" * 64}


def start(ranks: list[dict[str, Any]]) -> list[Any]:
    """Starts ranks as forks of this process; gives what they found, nothing of a killed one."""
    came = mmap.mmap(-1, mmap.PAGESIZE)
    forks = [Fork(partial(run_rank, wanted, came)) for wanted in ranks]
    answers = []
    for done in [fork.wait() for fork in forks]:
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        answers.append(json.loads(done.stdout) if done.returncode == 0 else None)
    return answers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(params=["file", "port"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Fields of `Process` that say where the ranks meet: each way there is on one machine."""
    if request.param == "file":
        return {"store_file": str(tmp_path / "store")}
    return {"address": "127.0.0.1", "port": free_port()}


def place(meeting: dict[str, Any]) -> str:
    return meeting.get("store_file") or f"127.0.0.1:{meeting['port']}"


def ranks_at(
    meeting: dict[str, Any], n_ranks: int = 3, do: str = "sum", timeout: float = WATCHDOG_SECONDS
) -> list[dict[str, Any]]:
    return [
        {
            "process": {"rank": r, "n_ranks": n_ranks, "local_rank": r, "n_local_ranks": n_ranks}
            | meeting,
            "facts": FACTS,
            "do": do,
            "timeout": timeout,
            "number": r,
            "others": [other for other in range(n_ranks) if other != r],
            "after": [],
            "gives_up_after": [],
        }
        for r in range(n_ranks)
    ]


def given_up(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lets the time be up as soon as these have come: they wait for no other."""
    for rank in ranks:
        rank["gives_up_after"] = [each["number"] for each in ranks]
    return ranks


def test_they_add_up_and_listen_to_nobody_outside(meeting: dict[str, Any]) -> None:
    answers = start(ranks_at(meeting, 4))
    assert [answer.get("sum") for answer in answers] == [6.0] * 4, answers
    listening = [address for answer in answers for address in answer["listening"]]
    assert len(listening) == (4 if "store_file" in meeting else 5)  # gloo's, and rank 0's own
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}
    assert not any(answer["has_group"] for answer in answers)


def test_a_rank_connects_only_to_those_it_talks_to(tmp_path: Path) -> None:
    answers = start(ranks_at({"store_file": str(tmp_path / "store")}, 6))
    assert [answer["connections"] for answer in answers] == [2] * 6  # the neighbours in a ring


def test_one_rank_starts_nothing() -> None:
    def facts() -> dict[str, str]:
        raise AssertionError("nobody to compare with")

    with start_ranks(Process(), torch.device("cpu"), facts) as ranks:
        assert ranks.store is None
        assert not dist.is_initialized()


def test_rank_0_says_where_it_waits() -> None:
    (rank_0, _) = ranks_at({"address": "localhost", "port": free_port()}, 2)
    rank_0["process"]["n_local_ranks"] = 1
    (answer,) = start(given_up([rank_0]))
    assert answer["message"].endswith("rank 0 waits at 127.0.0.1, which every rank must reach")


@pytest.mark.parametrize(("there", "missing"), [("0-1", "ranks 2-3"), ("1-3", "rank 0")])
def test_a_rank_is_missing(meeting: dict[str, Any], there: str, missing: str) -> None:
    if "port" in meeting and missing == "rank 0":
        return  # the others do not reach its server: test_a_rank_has_another_address
    first, last = map(int, there.split("-"))
    for answer in start(given_up(ranks_at(meeting, 4)[first : last + 1])):
        assert (answer["error"], answer["exit_code"]) == ("LaunchError", 2)
        assert answer["message"].startswith(
            f"{missing} of 4 did not join the rendezvous at {place(meeting)} within 900 s; "
            f"ranks {there} did, on {HOST}\nhint: see the output of the missing ranks; "
        )


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.2", "Connection refused"), ("no.such.host.invalid", "Name or service not known")],
)
def test_a_rank_has_another_address(address: str, reason: str) -> None:
    meeting = {"address": "127.0.0.1", "port": free_port()}
    ranks = ranks_at(meeting)
    ranks[1]["process"]["address"] = address
    ranks[1]["timeout"] = 1.0
    given_up([ranks[0], ranks[2]])
    answers = start(ranks)
    assert {answer["error"] for answer in answers} == {"LaunchError"}
    where = f"{address}:{meeting['port']}"
    assert answers[1]["message"].startswith(f"rank 1 on {HOST} cannot reach rank 0 at {where} ")
    assert reason in answers[1]["message"] or "Temporary failure" in answers[1]["message"]
    for answer in (answers[0], answers[2]):
        assert answer["message"].startswith(
            f"rank 1 of 3 did not join the rendezvous at {place(meeting)} within"
        )


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("torch", "2.11.0", "torch: 2.13.0 on ranks 0, 2 ({h}); 2.11.0 on rank 1 ({h})"),
        ("run", "77aa", "run: 5e1c on ranks 0, 2 ({h}); 77aa on rank 1 ({h})"),
        (
            "data",
            "1" * 64,
            "data: 0000000000000000.. on ranks 0, 2 ({h}); 1111111111111111.. on rank 1 ({h})",
        ),
        (
            "torch",
            "2.13.0" + "1" * 30,
            "torch: 2.13.0 on ranks 0, 2 ({h}); 2.13.01111111111111111.. on rank 1 ({h})",
        ),
        ("more", "x", "more: nothing on ranks 0, 2 ({h}); x on rank 1 ({h})"),
        ("code", "x", f"code: {code_checksum()} on ranks 0, 2 ({{h}}); x on rank 1 ({{h}})"),
    ],
)
def test_a_rank_differs(meeting: dict[str, Any], name: str, value: str, shown: str) -> None:
    ranks = ranks_at(meeting)
    ranks[1]["facts"] = FACTS | {name: value}
    for answer in start(ranks):
        assert (answer["error"], answer["exit_code"]) == ("LaunchError", 2)
        assert answer["message"] == (
            "the ranks differ\n" + shown.format(h=HOST) + "\n"
            "hint: start all ranks from one installation, one run file and the same token files"
        )


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_fails_before_it_has_facts(meeting: dict[str, Any], failing: int) -> None:
    ranks = ranks_at(meeting, 4)
    ranks[failing]["do"] = "no facts"
    for rank, answer in enumerate(start(ranks)):
        own = rank == failing
        expected = "corpus.bin is missing\nhint: copy it here"
        if not own:
            expected = f"rank {failing} on {HOST} failed: {expected}"
        assert answer["message"] == expected
        assert answer["error"] == ("DataError" if own else "MachineError")
        assert answer["exit_code"] == 2


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("do", ["raise", "refuse"])
def test_a_rank_fails_later(meeting: dict[str, Any], failing: int, do: str) -> None:
    ranks = ranks_at(meeting)
    ranks[failing]["do"] = do
    answers = start(ranks)
    own = answers.pop(failing)
    expected = {"raise": ("ValueError", "a bug"), "refuse": ("DataError", "token 7 is damaged")}[do]
    assert (own["error"], own["message"].splitlines()[0]) == expected
    shown = "ValueError: a bug" if do == "raise" else expected[1]
    for answer in answers:
        assert answer["error"] == "MachineError"
        assert answer["message"].startswith(f"rank {failing} on {HOST} failed: {shown}\nhint: ")
        assert answer["exit_code"] == own["exit_code"] == (1 if do == "raise" else 2)
    assert not any(answer["has_group"] for answer in [own, *answers])


def test_a_long_reason_arrives_whole(meeting: dict[str, Any]) -> None:
    reason = "token 7 is damaged: " + 2_000 * "größer 語 "
    ranks = ranks_at(meeting)
    ranks[2] |= {"do": "refuse", "reason": reason}
    for answer in start(ranks)[:2]:
        assert f"rank 2 on {HOST} failed: {reason}\nhint: prepare it again" == answer["message"]


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_is_killed(meeting: dict[str, Any], dying: int) -> None:
    ranks = ranks_at(meeting)
    ranks[dying]["do"] = "die"
    answers = start(ranks)
    assert answers.pop(dying) is None
    assert all("error" in answer for answer in answers)


@pytest.mark.exhaustive
def test_a_rank_is_killed_after_the_roll_call(meeting: dict[str, Any]) -> None:
    ranks = ranks_at(meeting, timeout=10.0)  # to connect too, which the dead never does
    ranks[2]["do"] = "die early"
    answers = start(ranks)
    assert answers.pop() is None
    messages = [answer["message"] for answer in answers]
    assert any(
        " joined the rendezvous, but cannot connect to the others: " in each for each in messages
    )
    for answer in answers:
        assert (answer["error"] in ("LaunchError", "MachineError"), answer["exit_code"]) == (
            True,
            2,
        )


def test_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        meeting = {"address": "127.0.0.1", "port": other.getsockname()[1]}
        (answer,) = start(ranks_at(meeting)[:1])
    assert answer["message"].startswith(
        f"rank 0 on {HOST} cannot listen at {place(meeting)}: Address already in use\nhint: "
    )


def test_ranks_of_another_run_are_not_mistaken_for_ours() -> None:
    meeting = {"address": "127.0.0.1", "port": free_port()}
    ranks, stranger = ranks_at(meeting), ranks_at(meeting)[1]
    stranger |= {"number": 3, "after": [1]}
    ranks[2]["after"] = [3]
    *ours, refused = start([*ranks, stranger])
    assert [answer.get("sum") for answer in ours] == [3.0] * 3
    assert refused["message"].startswith(
        f"rank 1 on {HOST} reached another run's ranks at {place(meeting)}\nhint: "
    )


def test_facts_of_a_run() -> None:
    facts = gather_facts("name = 'x'\n", "abc")
    assert facts.keys() == {"trainyard", "torch", "python", "run", "data"}
    assert facts["torch"] == torch.__version__
    assert facts["run"] != gather_facts("name = 'y'\n", "abc")["run"]
