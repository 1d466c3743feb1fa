"""Several hosts on one machine: network namespaces that a switch in this process connects, with delay, loss and cut links.

The switch carries real packets between real network stacks. It takes the place of `tc netem`, which many kernels lack. Root and
iproute2 are needed, without them tests skip.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from real_servers import INSTALL

__all__ = ["VirtualHost", "VirtualNetwork", "require_virtual_network"]

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 16000
_MOST_DELAYED = 10_000


def require_virtual_network() -> None:
    """Skip a test where hosts cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip(f"there is no program ip (apt iproute2); {INSTALL}")
    if not _TUN.exists():
        pytest.skip(f"this kernel has no {_TUN}")
    tried = subprocess.run(
        ["ip", "netns", "add", (name := f"monolith-try-{os.getpid()}")], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


class VirtualHost:
    """A network namespace with one interface, `eth0`."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", name)
        try:
            self.device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            made = f"m{os.getpid() % 10**8}-{address.rpartition('.')[2]}"
            fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH", made.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", made, "netns", name, "name", "eth0")
            for command in (
                ["addr", "add", f"{address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "mtu", str(_MTU), "up"],
                ["link", "set", "lo", "up"],
                ["route", "add", "default", "dev", "eth0"],
            ):
                _ip("-n", name, *command)
        except BaseException:
            self.close()
            raise

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs a program on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def start(
        self, *arguments: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a program on this host, its output in `log`. It is a process group of its own."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(*arguments),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what still runs there, and remove it."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        for started in self._started:
            started.wait(30)
        if hasattr(self, "device"):
            with suppress(OSError):
                os.close(self.device)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True)


class VirtualNetwork:
    """Hosts 10.77.N.1, 10.77.N.2, ... and the switch between them."""

    def __init__(self, hosts: int, *, seed: int = 0) -> None:
        self.hosts: list[VirtualHost] = []
        self._chance = random.Random(seed)
        self._delay = self._loss = 0.0
        self._cut: set[int] = set()
        self._closing = False
        net = os.getpid() % 250
        try:
            for number in range(hosts):
                self.hosts.append(VirtualHost(f"monolith-{os.getpid()}-{number}", f"10.77.{net}.{number + 1}"))
        except BaseException:
            self._remove_hosts()
            raise
        self.carried = self.dropped = 0
        self._thread = threading.Thread(target=self._switch, name="switch of hosts", daemon=True)
        self._thread.start()

    def shape(self, *, delay_secs: float = 0.0, loss: float = 0.0) -> None:
        """Delay every packet, and lose this part of them."""
        self._delay, self._loss = delay_secs, loss

    def cut(self, *hosts: int) -> None:
        """Lose all packets to and from these hosts. No end of a connection is told, as with a pulled cable."""
        self._cut |= set(hosts)

    def mend(self, *hosts: int) -> None:
        """Undo `cut`."""
        self._cut -= set(hosts)

    def _switch(self) -> None:
        devices = {host.device: number for number, host in enumerate(self.hosts)}
        numbers = {bytes(map(int, host.address.split("."))): number for number, host in enumerate(self.hosts)}
        waiting: list[tuple[float, int, int, bytes]] = []
        ready = select.poll()
        for device in devices:
            ready.register(device, select.POLLIN)
        while not self._closing:
            pause = 50.0 if not waiting else max(0.0, min(50.0, 1000 * (waiting[0][0] - time.monotonic())))
            for device, _ in ready.poll(pause):
                with suppress(BlockingIOError):
                    for _ in range(64):
                        packet = os.read(device, _MTU + 64)
                        to = numbers.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                        if to is not None:
                            self._take(packet, devices[device], to, waiting)
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, to, packet = heapq.heappop(waiting)
                with suppress(OSError):  # full, as any network may be
                    os.write(self.hosts[to].device, packet)

    def _take(self, packet: bytes, sender: int, to: int, waiting: list[tuple[float, int, int, bytes]]) -> None:
        self.carried += 1
        lost = bool(self._cut & {sender, to}) or self._chance.random() < self._loss
        if lost or len(waiting) >= _MOST_DELAYED:
            self.dropped += 1
            return
        heapq.heappush(waiting, (time.monotonic() + self._delay, self.carried, to, packet))

    def _remove_hosts(self) -> None:
        for host in self.hosts:
            host.close()

    def close(self) -> None:
        """End all programs on the hosts, and remove them."""
        self._closing = True
        self._thread.join(10)
        self._remove_hosts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
