"""Network interfaces of this machine, and whether the configured ones exist.

A wrong name in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is the most common reason why ranks meet
but cannot communicate. NCCL takes prefixes: "hsn" is hsn0 and hsn1, "=hsn0" only hsn0, "^lo" all
but lo; gloo takes whole names.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainyard.doctor.environment import read

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SETTINGS = re.compile(
    r"(NCCL|RCCL|GLOO|FI|CXI|UCX|HSA|MASTER|OMP)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
)
"""Variables that control communication and visible devices."""
NETWORKS = Path("/sys/class/net")
RDMA_FOLDERS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def describe_network() -> dict[str, str]:
    """Describes each interface (state, address, speed) and each RDMA device."""
    facts = {}
    for name in interface_names():
        state = read(NETWORKS / name / "operstate") or ""
        speed = read(NETWORKS / name / "speed") or ""
        parts = [state, _address_of(name)]
        if speed.isdigit():
            parts.append(f"{int(speed) / 1000:g} Gb/s")
        facts[name] = ", ".join(filter(None, parts)) or "unknown"
    for device in rdma_devices():
        ports = sorted(device.glob("ports/*"))
        texts = [f"{read(port / 'state') or ''}, {read(port / 'rate') or ''}" for port in ports]
        facts[device.name] = "; ".join(texts) or "there"
    return facts


def interface_names() -> list[str]:
    """Lists the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def rdma_devices() -> list[Path]:
    """Lists the InfiniBand, RoCE and Slingshot devices."""
    return [path for folder in RDMA_FOLDERS if folder.is_dir() for path in sorted(folder.iterdir())]


def find_wrong_interface(
    settings: Mapping[str, str], names: Sequence[str]
) -> tuple[str, str] | None:
    """Finds a variable that names a missing interface.

    Args:
        settings: environment variables.
        names: existing interfaces.

    Returns:
        problem and hint; None: no problem.
    """
    for variable in (GLOO, NCCL):
        asked = settings.get(variable, "")
        if not asked or asked.startswith("^"):
            continue
        exact = variable == GLOO or asked.startswith("=")
        wanted = asked.removeprefix("=").split(",")
        # NCCL also takes "name:port".
        stems = [each.partition(":")[0] for each in wanted]
        missing = [
            stem
            for stem in stems
            if not any(name == stem if exact else name.startswith(stem) for name in names)
        ]
        if missing and (variable == GLOO or len(missing) == len(stems)):
            there = ", ".join(name for name in names if name != "lo") or "only lo"
            return (
                f"{variable}={asked}: there is no network interface {', '.join(missing)}",
                f"available: {there}; export the one that reaches the other machines",
            )
    return None


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
