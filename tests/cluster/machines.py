"""Machines for tests, on this one: each has a name, an address, processes and an sshd of its own.

    login   10.77.0.1     where a user types commands; the others are connected to it
    n1      10.77.0.11    nodes
    n2      10.77.0.12

    with Machines(folder, n_nodes=2) as machines:
        machines.run(["ssh", "n2", "hostname"])     # "n2\\n"
        machines.kill("n2")                         # all of its processes end at once
        machines.boot("n2")
        machines.cut("n1")                          # its cable is out: no answer, no end of file

A machine is a process in new namespaces of the kernel (network, name, processes, mounts), and what
runs on it is started in the same ones. Machines share the kernel, its CPUs and, as on a cluster,
the file system; but /run is each one's own, as the scratch disk of a node is.

Nothing outside of them changes, no interface and no file of /etc, so any number of such sets can
run side by side. A machine ends when a pipe of this process does: whatever ends the tests, nothing
is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import WATCHDOG_SECONDS

LOGIN = "login"
POLL_SECONDS = 0.05
PACKAGES = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
# The first process of a machine; the rest ends with it, and it ends with its input.
BOOT = """\
set -e
hostname "$0"
for file in hosts resolv.conf ssh/ssh_config; do
    [ ! -e /etc/$file ] || mount --bind "$1/etc/$file" /etc/$file
done
# What sshd's shells would read: start-up files may hold locks when a machine is killed.
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
echo booted
read -r _ || true
"""
SSHD = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""
SSH = """\
Host *
    IdentityFile {folder}/user_key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def why_not() -> str:
    """Says why there can be no such machines here; empty where there can."""
    if os.getuid() != 0:
        return "needs root, to make machines out of namespaces"
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if missing:
        return f"not installed here: {' '.join(missing)}"
    attempt = [*_unshare(), "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(attempt, capture_output=True, text=True)
    return f"this machine refuses namespaces: {done.stderr.strip()}" if done.returncode else ""


class Machines:
    """A machine `login` and a few nodes, from `with` to the end of its block; needs root.

    Args:
        folder: an empty folder for their files, which all of them see.
        n_nodes: `n1`, `n2`, ...
    """

    def __init__(self, folder: Path, n_nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, n_nodes + 1)]
        prefixes = ("SLURM", "SBATCH", "PMI_", "MASTER", "OMPI_", "TORCHELASTIC_", "TRAINYARD_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._daemons: dict[str, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Boots all machines."""
        (self.folder / "etc" / "ssh").mkdir(parents=True)
        names = [LOGIN, *self.nodes]
        hosts = [f"{self.address(name)} {name}\n" for name in names]
        (self.folder / "etc/hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        # Nobody is there: to ask for the name of an address fails at once, not after ten seconds.
        (self.folder / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
        (self.folder / "etc/ssh/ssh_config").write_text(SSH.format(folder=self.folder))
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        for key in ("host_key", "user_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
            subprocess.run(argv, check=True)
        for name in names:
            self.boot(name)

    def stop(self) -> None:
        """Ends all processes of all machines, at once."""
        for name in list(self._running):
            self.kill(name)

    def address(self, name: str) -> str:
        """The address of a machine."""
        return "10.77.0.1" if name == LOGIN else f"10.77.0.1{name.removeprefix('n')}"

    def boot(self, name: str) -> None:
        """Starts a machine, and sshd on it."""
        with (self.folder / "daemons.log").open("ab") as log:
            machine = subprocess.Popen(
                [*_unshare(), "bash", "-c", BOOT, name, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for pytest, which then calls `stop`
            )
        self._running[name] = machine
        self._daemons[name] = []
        assert machine.stdout is not None
        assert machine.stdout.readline() == "booted\n", f"{name} does not start"
        if name == LOGIN:
            self._ip("link add br0 type bridge")
            self._ip(f"addr add {self.address(name)}/24 dev br0")
            self._ip("link set br0 up")
        else:
            # A new address would be unknown to those who knew the machine before it died.
            mac = f"02:00:00:00:00:{int(name.removeprefix('n')):02x}"
            peer = f"name eth0 address {mac} netns {self._pid(name)}"
            self._ip(f"link add v-{name} type veth peer {peer}")
            self._ip(f"link set v-{name} master br0 up")
            self._ip(f"addr add {self.address(name)}/24 dev eth0", name)
            self._ip("link set eth0 up", name)
        sshd = shutil.which("sshd")
        assert sshd is not None
        self.start_daemon(name, [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")])
        ask = ["bash", "-c", f": < /dev/tcp/{self.address(name)}/22"]
        self.wait_until("sshd listens", lambda: self.run(ask, host=name).returncode == 0)

    def kill(self, name: str) -> None:
        """Ends a machine as a loss of power does, except that others may see their lines end."""
        machine = self._running.pop(name)
        os.kill(self._pid_below(machine), signal.SIGKILL)
        machine.communicate()
        for daemon in self._daemons.pop(name):
            daemon.wait()
        if name != LOGIN and LOGIN in self._running:
            self.wait_until("its cable is gone", lambda: f"v-{name}@" not in self._ip("link"))

    def cut(self, name: str) -> None:
        """Takes out the cable of a node: it runs on, and nobody hears of it."""
        self._ip(f"link set v-{name} down")

    def join(self, name: str) -> None:
        """Puts the cable of a node in again."""
        self._ip(f"link set v-{name} up")

    def on(self, name: str, argv: Sequence[str], folder: Path | None = None) -> list[str]:
        """Gives the command that runs another one on a machine, in a folder."""
        enter = ["nsenter", f"--target={self._pid(name)}", "--net", "--uts", "--mount", "--pid"]
        go = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or self.folder)]
        return [*enter, *go, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        host: str = LOGIN,
        folder: Path | None = None,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a machine, to its end."""
        return subprocess.run(
            self.on(host, argv, folder),
            input=stdin,
            capture_output=True,
            text=True,
            env={**self.environment, **(environment or {})},
            timeout=WATCHDOG_SECONDS,
        )

    def start_daemon(self, name: str, argv: Sequence[str]) -> None:
        """Starts a program on a machine that is to run for as long as that does."""
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                self.on(name, argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self._daemons[name].append(daemon)

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds.

        Raises:
            TimeoutError: it never does, or a daemon has ended; carries their logs.
        """
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while not holds():
            daemons = [daemon for each in self._daemons.values() for daemon in each]
            ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"not so: {what}; ended: {ended}\n{self.log_ends()}")
            time.sleep(POLL_SECONDS)

    def log_ends(self) -> str:
        """The ends of the daemons' logs."""
        texts = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)

    def _ip(self, command: str, name: str = LOGIN) -> str:
        # Not in the machine's process namespace: the numbers of processes are those of this one.
        enter = ["nsenter", f"--target={self._pid(name)}", "--net"]
        done = subprocess.run([*enter, "ip", *command.split()], capture_output=True, text=True)
        assert done.returncode == 0, f"ip {command}: {done.stderr}"
        return done.stdout

    def _pid(self, name: str) -> int:
        return self._pid_below(self._running[name])

    def _pid_below(self, machine: subprocess.Popen[str]) -> int:
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text()
        return int(children)


def _unshare() -> list[str]:
    own = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
    return ["unshare", *own, "--kill-child=SIGKILL"]
