from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainyard.doctor.diagnosis import PASS, WARN
from trainyard.doctor.environment import (
    SETTINGS,
    check_binding,
    check_load,
    check_machine,
    describe_machine,
    find_wrong_interface,
    format_cpus,
)
from trainyard.launch.environment import Process, bound_to, read_variables

INTERFACES = ["lo", "eth0", "hsn0", "hsn1"]


def test_what_is_said_of_this_machine() -> None:
    facts = describe_machine(Process())
    assert facts["versions"]["trainyard"] and facts["versions"]["python"]
    assert facts["versions"]["torch"] != "not installed"
    assert facts["processor"]["cores"] == str(os.cpu_count())
    assert facts["processor"]["load"].endswith(" in the last minute")
    assert list(check_load(32, 64)) == []
    (busy,) = check_load(32.1, 64)
    assert (busy.text, busy.verdict) == ("32.1 on 64 cores in the last minute", WARN)
    assert facts["processor"]["bound to"] == f"{format_cpus(bound_to())} (local rank 0)"
    assert "GiB" in facts["memory"]["total"] and "GiB" in facts["memory"]["available"]
    assert facts["limits"]["open files"].startswith(
        str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    )
    assert "127.0.0.1" in facts["network"]["lo"]
    for path in facts["programs"].values():
        assert Path(path).exists()
    assert all(isinstance(text, str) for section in facts.values() for text in section.values())


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("7", {7}), ("0,2,4-5", {0, 2, 4, 5}), ("", set())],
)
def test_lists_of_processors(text: str, cpus: set[int]) -> None:
    assert format_cpus(cpus) == text


@contextmanager
def bound(cpus: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(len(bound_to()) < 2, reason="needs two processors")
def test_a_rank_bound_as_the_profile_says_and_one_that_is_not() -> None:
    first, second = sorted(bound_to())[:2]
    lists = [str(first), str(second)]
    with bound({second}):
        (good,) = check_binding(Process(1, 2, 1, 2), lists, None)
        (bad,) = check_binding(Process(0, 2, 0, 2), lists, None)
    assert (good.verdict, bad.verdict) == (PASS, WARN)
    assert bad.text == f"local rank 0 to {second}, but the profile has {first}"
    assert "trainyard launch" in bad.hint


@pytest.mark.skipif(len(bound_to()) < 2, reason="needs two processors")
def test_a_rank_far_from_its_device() -> None:
    first, second = sorted(bound_to())[:2]
    with bound({first}):
        assert list(check_binding(Process(0, 2, 0, 2), [], f"{first}-{second}")) == []
        (found,) = check_binding(Process(0, 2, 0, 2), [], str(second))
        assert list(check_binding(Process(), [], str(second))) == []
    assert found.text == f"local rank 0 to {first}, but its device is next to {second}"


def test_too_few_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        found = next(check_machine(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found.name, found.text, found.verdict) == ("open files", "256 at most", WARN)
    assert found.hint.startswith("ulimit -n")


def test_settings_of_the_network_alone_are_read() -> None:
    environment = {
        "NCCL_SOCKET_IFNAME": "hsn",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HOME": "/home/me",
        "FISH": "x",
    }
    assert list(read_variables(SETTINGS, environment)) == [
        *("CUDA_VISIBLE_DEVICES", "FI_CXI_DEFAULT_CQ_SIZE", "NCCL_SOCKET_IFNAME")
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"GLOO_SOCKET_IFNAME": "hsn0"},
        {"NCCL_SOCKET_IFNAME": "hsn"},
        {"NCCL_SOCKET_IFNAME": "=hsn0,hsn1"},
        {"NCCL_SOCKET_IFNAME": "ib,hsn"},  # the first that there is
        {"NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"NCCL_SOCKET_IFNAME": "=eth0:5000"},
    ],
)
def test_interfaces_that_are_there(settings: dict[str, str]) -> None:
    assert find_wrong_interface(settings, INTERFACES) is None


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("GLOO_SOCKET_IFNAME=hsn", "hsn"),  # no prefix, unlike NCCL's
        ("NCCL_SOCKET_IFNAME==hsn", "hsn"),
        ("NCCL_SOCKET_IFNAME=ib0,bond", "ib0, bond"),
    ],
)
def test_interfaces_that_are_not_there(setting: str, missing: str) -> None:
    name, _, value = setting.partition("=")
    found = find_wrong_interface({name: value}, INTERFACES)
    assert found is not None
    assert found[0] == f"{setting}: there is no network interface {missing}"
    assert found[1].startswith("available: eth0, hsn0, hsn1;")
