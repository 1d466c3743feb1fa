"""Addresses `host:port` or `[ipv6]:port`: parsing them, finding that of this machine, and checking whether they answer."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum

from monolith.errors import DiscoveryError, InvalidArgumentError
from monolith.transport import addresses

__all__ = [
    "AddressFamily",
    "NodeAliveChecker",
    "check_port",
    "concat_ip_and_port",
    "get_local_host",
    "get_local_ip",
    "get_local_server_addr",
    "is_ipv4_supported",
    "is_ipv6_address",
    "split_address",
]

_logger = logging.getLogger(__name__)
_PAUSE_SECS = 0.1
# The kernel needs this long to answer for a port of this machine, even if less is left of the caller's time.
_SHORTEST_CONNECT_SECS = 0.001

Connect = Callable[[str, int, float], None]
"""Connects to (host, port) within this many seconds and closes the connection, or raises OSError."""


class AddressFamily(StrEnum):
    """The two kinds of addresses, as configurations name them."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"


def is_ipv6_address(ip: str) -> bool:
    """Tell whether `ip` is an IPv6 address and not a name.

    Example:
        >>> is_ipv6_address("::1"), is_ipv6_address("127.0.0.1"), is_ipv6_address("localhost")
        (True, False, False)
    """
    try:
        return ipaddress.ip_address(ip).version == 6
    except ValueError:
        return False


def concat_ip_and_port(ip: str, port: int | str) -> str:
    """Return `ip:port`, with an IPv6 address in brackets.

    Example:
        >>> concat_ip_and_port("127.0.0.1", 10), concat_ip_and_port("::1", 10)
        ('127.0.0.1:10', '[::1]:10')
    """
    return f"[{ip}]:{port}" if is_ipv6_address(ip) else f"{ip}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[ipv6]:port`. Raises `InvalidArgumentError` for anything else.

    Example:
        >>> split_address("ps-0.example:2222"), split_address("[::1]:10")
        (('ps-0.example', 2222), ('::1', 10))
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    named = bool(host) and not set(host) & set("[]/ \t\r\n,") and bracketed == (":" in host)
    if not (named and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise InvalidArgumentError(f"address: expected host:port, or [host]:port with an IPv6 address, got {address!r}")
    return host, int(port)


def get_local_ip() -> str:
    """Return the first address of this machine's own name, an IPv6 one if there is no other. Raises OSError without any.

    Where that is a loopback address, as Debian writes it into /etc/hosts, the address from which this machine reaches others is
    returned, if there is one.
    """
    name = socket.gethostname()
    # On macOS often only `<name>.local` is known.
    for host, family in ((name, 0), (name, socket.AF_INET6), (f"{name}.local", 0)):
        try:
            found = str(socket.getaddrinfo(host, None, family=family)[0][4][0])
        except socket.gaierror as error:
            failure = error
        else:
            return (_outgoing_ip() or found) if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found
    raise failure


def _outgoing_ip() -> str | None:
    """Return the address of the interface that the default route leads through. None without a route."""
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: connecting a datagram socket only chooses the route.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as chosen:
            chosen.connect((anywhere, 9))
            return str(chosen.getsockname()[0])
    return None


def get_local_host(environ: Mapping[str, str] | None = None) -> str:
    """Return the host under which other machines reach this process.

    It is the first entry of CLOUDNATIVE_INET_ADDR if that is set, else YARN_INET_ADDR, else `get_local_ip()`.

    Raises:
        DiscoveryError: the variable is set to an empty string.

    Example:
        >>> get_local_host({"CLOUDNATIVE_INET_ADDR": "1.2.3.4,5.6.7.8", "YARN_INET_ADDR": "9.9.9.9"})
        '1.2.3.4'
    """
    environ = os.environ if environ is None else environ
    if "CLOUDNATIVE_INET_ADDR" in environ:
        host = environ["CLOUDNATIVE_INET_ADDR"].split(",")[0]
    else:
        host = environ["YARN_INET_ADDR"] if "YARN_INET_ADDR" in environ else get_local_ip()
    if not host:
        raise DiscoveryError(
            "this host has no address: CLOUDNATIVE_INET_ADDR or YARN_INET_ADDR is set to an empty string"
        )
    return host


def is_ipv4_supported() -> bool:
    """Tell whether this machine's own address is an IPv4 one."""
    return not is_ipv6_address(get_local_ip())


def get_local_server_addr(port: int) -> str:
    """Return the address at which other machines reach a server on `port` of this machine."""
    return concat_ip_and_port(get_local_ip(), port)


def _connect(host: str, port: int, timeout: float) -> None:
    addresses.connect(host, port, timeout).close()


def check_port(
    host: str,
    port: int,
    timeout: float = 1.0,
    *,
    connect: Connect = _connect,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Try until `timeout` seconds have passed to connect to `host`, a name or address. Returns whether it succeeded."""
    deadline = clock() + timeout
    while True:
        try:
            connect(host.strip("[]"), port, max(deadline - clock(), _SHORTEST_CONNECT_SECS))
        except OSError:
            if clock() + _PAUSE_SECS >= deadline:
                return False
            sleep(_PAUSE_SECS)
        else:
            return True


class NodeAliveChecker:
    """Tries in its constructor to connect to all addresses in parallel.

    Example:
        >>> import socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     address = f"127.0.0.1:{server.getsockname()[1]}"
        ...     NodeAliveChecker([address]).all_nodes_alive()
        True
    """

    def __init__(
        self, addrs: Sequence[str], timeout: float = 1.0, num_thread: int = 10, *, connect: Connect = _connect
    ) -> None:
        """Give each of `addrs` `timeout` seconds, and try `num_thread` of them at a time."""
        if num_thread < 1:
            raise InvalidArgumentError(f"num_thread: expected at least 1, got {num_thread}")
        self._addrs = list(addrs)
        targets = {address: split_address(address) for address in self._addrs}

        def ping(address: str) -> bool:
            try:
                connect(*targets[address], timeout)
            except OSError as error:
                _logger.warning("cannot connect to %s: %s", address, error)
                return False
            return True

        with ThreadPoolExecutor(max_workers=num_thread, thread_name_prefix="ping") as pool:
            self._alive = dict(zip(targets, pool.map(ping, targets), strict=True))

    def all_nodes_alive(self) -> bool:
        """Tell whether all addresses answered."""
        return all(self._alive.values())

    def get_alive_nodes(self) -> list[str]:
        """Return the addresses that answered, in the order given."""
        return [address for address, alive in self._alive.items() if alive]

    def get_dead_nodes(self) -> list[str]:
        """Return the addresses that did not answer, in the order given."""
        return [address for address, alive in self._alive.items() if not alive]

    def get_addrs(self) -> list[str]:
        """Return all addresses that were tried."""
        return list(self._addrs)
