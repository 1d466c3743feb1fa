"""ZooKeeper: its servers, clients with credentials, and removing the paths of old jobs."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from monolith.cluster.net import concat_ip_and_port
from monolith.errors import ConfigError, DiscoveryError, InvalidArgumentError
from monolith.optional_packages import import_extra

if TYPE_CHECKING:
    from kazoo.client import KazooClient

__all__ = ["clear_zk_path", "default_zk_servers", "get_zk_auth_data", "is_ipv6_only"]

_logger = logging.getLogger(__name__)
_PORT = 2181
_BASE_PATH = "/monolith"
_STALE_SECS = 9 * 7 * 86_400
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]*")


def is_ipv6_only(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this machine has no IPv4 address.

    The platform says so in MY_HOST_IP, MY_POD_IP and MY_HOST_IPV6. If none is set, the machine's own name is resolved.

    Example:
        >>> is_ipv6_only({"MY_HOST_IPV6": "2001:db8::7"}), is_ipv6_only({"MY_POD_IP": "10.0.0.7"})
        (True, False)
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in ("MY_HOST_IP", "MY_POD_IP", "MY_HOST_IPV6")):
        return not (environ.get("MY_HOST_IP") or environ.get("MY_POD_IP"))
    try:
        return not socket.gethostbyname(socket.gethostname())
    except OSError:
        return True


def default_zk_servers(use_ipv6: bool = False, environ: Mapping[str, str] | None = None) -> str:
    """Return the servers of MONOLITH_ZK_HOSTS, or of MONOLITH_ZK_HOSTS_IPV6, with ZooKeeper's port. Empty if unset.

    The variables are comma-separated lists of hosts. The second is for machines without IPv4, and for `use_ipv6`.

    Example:
        >>> hosts = {"MONOLITH_ZK_HOSTS": "10.0.0.1,10.0.0.2", "MONOLITH_ZK_HOSTS_IPV6": "2001:db8::1"}
        >>> default_zk_servers(environ=hosts | {"MY_HOST_IP": "10.0.0.7"}), default_zk_servers(True, environ=hosts)
        ('10.0.0.1:2181,10.0.0.2:2181', '[2001:db8::1]:2181')
    """
    environ = os.environ if environ is None else environ
    if use_ipv6 or is_ipv6_only(environ):
        return ",".join(f"[{host.strip('[]')}]:{_PORT}" for host in _listed(environ, "MONOLITH_ZK_HOSTS_IPV6"))
    return ",".join(f"{host}:{_PORT}" for host in _listed(environ, "MONOLITH_ZK_HOSTS"))


def _listed(environ: Mapping[str, str], name: str) -> list[str]:
    return [host.strip() for host in environ.get(name, "").split(",") if host.strip()]


def get_zk_auth_data(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]] | None:
    """Return the credentials `user:password` of ZK_AUTH in ZooKeeper's scheme `digest`, or None if it is unset.

    Example:
        >>> get_zk_auth_data({"ZK_AUTH": "me:secret"})
        [('digest', 'me:secret')]
    """
    auth = (os.environ if environ is None else environ).get("ZK_AUTH")
    return [("digest", auth)] if auth else None


def import_kazoo(module: str) -> ModuleType:
    """Import a module of kazoo, the client of ZooKeeper."""
    return import_extra(f"kazoo.{module}", extra="zookeeper", purpose="ZooKeeper")


def make_zk_client(zk_server: str | None = None, *, session_secs: float = 10.0) -> KazooClient:
    """Return a client of `zk_server`, by default of `default_zk_servers()`, with the credentials of ZK_AUTH, not connected."""
    servers = zk_server or default_zk_servers()
    if not servers:
        raise ConfigError("zk_server: expected host:port[,host:port...], got none, and MONOLITH_ZK_HOSTS is not set")
    # By default the client waits up to a minute before it tries a server again.
    retry = {"max_tries": -1, "delay": 0.1, "max_delay": 2.0}
    client: KazooClient = import_kazoo("client").KazooClient(
        servers, timeout=session_secs, connection_retry=retry, auth_data=get_zk_auth_data()
    )
    return client


def start_zk_client(client: KazooClient, start_secs: float = 15.0) -> None:
    """Connect. Raises `DiscoveryError` if no server answers within `start_secs` seconds."""
    try:
        client.start(timeout=start_secs)
    except import_kazoo("handlers.threading").KazooTimeoutError:
        servers = ",".join(concat_ip_and_port(host, port) for host, port in client.hosts)
        raise DiscoveryError(f"no ZooKeeper server answers at {servers} within {start_secs:g} seconds") from None


def close_zk_client(client: KazooClient) -> None:
    """End the session, which removes its ephemeral nodes, and the threads of the client."""
    client.stop()
    client.close()


def job_path(job_name: str) -> str:
    """Return the path of a job. Raises `InvalidArgumentError` if the name cannot be part of a path."""
    if not _JOB_NAME.fullmatch(job_name):
        expected = "letters, digits and _ . : @ -, beginning with a letter or digit"
        raise InvalidArgumentError(f"job_name: expected {expected}, got {job_name!r}")
    return f"{_BASE_PATH}/{job_name}"


def clear_zk_path(
    zk_server: str | None,
    job_name: str,
    force_clear_zk_path: bool,
    *,
    clock: Callable[[], float] = time.time,
) -> None:
    """Remove the path of a job, and those of jobs that ended and did not change for nine weeks.

    Call it before any process of the job registers.

    Raises:
        InvalidArgumentError: the path of the job exists and `force_clear_zk_path` is off. A job of that name may be running.
    """
    path = job_path(job_name)
    client = make_zk_client(zk_server)
    start_zk_client(client)
    try:
        client.ensure_path(_BASE_PATH)
        for job in client.get_children(_BASE_PATH):
            _remove_if_stale(client, f"{_BASE_PATH}/{job}", clock())
        if client.exists(path) is None:
            return
        if not force_clear_zk_path:
            children = ", ".join(sorted(client.get_children(path)))
            raise InvalidArgumentError(
                f"there are [{children}] in monolith zk path {path}: job {job_name!r} is running, or ended badly; "
                "to clear it nevertheless, set force_clear_zk_path"
            )
        client.delete(path, recursive=True)
    finally:
        close_zk_client(client)


def _remove_if_stale(client: KazooClient, path: str, now: float) -> None:
    try:
        children, stat = client.get_children(path, include_data=True)
        if stat.mtime / 1000 + _STALE_SECS >= now:
            return
        # The time is that of the path, made when the job began: what its processes announce does not renew it.
        if any(_is_alive(client, f"{path}/{child}") for child in children):
            return
        client.delete(path, recursive=True)
        _logger.info("removed %s, unchanged for nine weeks", path)
    except import_kazoo("exceptions").KazooException as error:
        # Another process may be removing it too, or it may be protected. It does no harm.
        _logger.info("left %s as it is: %r", path, error)


def _is_alive(client: KazooClient, path: str) -> bool:
    """Whether the process that announced itself at `path` still holds its session."""
    stat = client.exists(path)
    return stat is not None and stat.ephemeralOwner != 0
