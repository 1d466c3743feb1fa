"""Where shards are: a list that the user gives, or a service discovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from monolith.cluster.discovery.config import DiscoveryConfig, get_discovery
from monolith.cluster.discovery.service_discovery import ServiceDiscovery, ServiceDiscoveryType
from monolith.errors import ConfigError
from monolith.transport.addresses import distinct_addresses

__all__ = [
    "FindShards",
    "SHARD_SERVICE",
    "ShardAddresses",
    "all_addresses",
    "announced_shard",
    "discovered_shards",
    "is_discovery",
    "open_discovery",
    "parse_shards",
]

SHARD_SERVICE = "serving_shard"
"""Name of the service. Replica r of shard i is entry r of `serving_shard_<i>`."""

ShardAddresses = tuple[tuple[str, ...], ...]
"""The addresses of replicas. Those in one tuple are replicas of the same shard, unless there is only one tuple."""

FindShards = Callable[[int], ShardAddresses]
"""Returns the addresses of the replicas of each shard, given the number of shards, 0 if it is not known."""


def parse_shards(text: str) -> ShardAddresses:
    """Return the addresses in `a0,b0;a1,b1`: replicas of a shard are separated by commas, shards by semicolons.

    Without a semicolon the shards say themselves which of them hold the same rows.

    Example:
        >>> parse_shards("10.0.0.1:7200,10.0.0.2:7200;10.0.0.3:7200")
        (('10.0.0.1:7200', '10.0.0.2:7200'), ('10.0.0.3:7200',))
    """
    groups = [[address.strip() for address in group.split(",") if address.strip()] for group in text.split(";")]
    if not all(groups):
        raise ConfigError(
            f"shards: expected host:port,host:port for replicas and ; between shards, such as a:7200,b:7200;c:7200, got {text!r}"
        )
    distinct_addresses([address for group in groups for address in group])
    return tuple(tuple(group) for group in groups)


_DISCOVERY_HELP = "file=FOLDER, consul=NAME, zk=NAME[@HOSTS] or ray=NAME[@HOST:PORT]"


def is_discovery(text: str) -> bool:
    """Whether `text` names a service discovery, and is not a list of addresses.

    Example:
        >>> is_discovery("zk=clicks"), is_discovery("10.0.0.1:7200")
        (True, False)
    """
    return text.partition("=")[0] in ("file", "consul", "zk", "ray")


def open_discovery(text: str) -> ServiceDiscovery:
    """Open a service discovery: `file=FOLDER`, `consul=NAME`, `zk=NAME[@SERVERS]` or `ray=NAME[@ADDRESS]`.

    Example:
        >>> open_discovery("file=/tmp/clicks").query("serving_shard_0")
        {}
    """
    kind, _, rest = text.partition("=")
    name, _, where = rest.partition("@")
    if not is_discovery(text) or not name:
        raise ConfigError(f"discovery: expected {_DISCOVERY_HELP}, got {text!r}")
    discovery = get_discovery(
        DiscoveryConfig(
            discovery_type=ServiceDiscoveryType(kind),
            uuid=name,
            deep_insight_name=name,
            zk_server=where or None,
            ray_address=where or None,
            discovery_folder=rest,
        )
    )
    assert discovery is not None  # it is not a local job
    return discovery


def discovered_shards(discovery: ServiceDiscovery, service: str = SHARD_SERVICE) -> FindShards:
    """Return a function that asks `discovery` for the replicas of all shards.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     discovery.register("serving_shard_0", 0, "10.0.0.1:7200")
        ...     discovery.register("serving_shard_1", 0, "10.0.0.2:7200")
        ...     discovered_shards(discovery)(0)
        (('10.0.0.1:7200',), ('10.0.0.2:7200',))
    """

    def find(count: int) -> ShardAddresses:
        return tuple(_queried(discovery, service, count))

    return find


def _queried(discovery: ServiceDiscovery, service: str, count: int) -> Iterator[tuple[str, ...]]:
    number = 0
    while not count or number < count:
        found = tuple(dict.fromkeys(discovery.query_now(f"{service}_{number}").values()))
        if not count and not found:
            return
        yield found
        number += 1


@contextmanager
def announced_shard(
    discovery: ServiceDiscovery, shard: int, replica: int, address: str, service: str = SHARD_SERVICE
) -> Iterator[None]:
    """Let front ends find a replica of a shard within a block.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     with announced_shard(discovery, 1, 0, "10.0.0.2:7200"):
        ...         discovery.query("serving_shard_1")
        {0: '10.0.0.2:7200'}
    """
    name = f"{service}_{shard}"
    discovery.register(name, replica, address)
    try:
        yield
    finally:
        discovery.deregister(name, replica, address)


def all_addresses(groups: ShardAddresses | Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the addresses of all groups, each once."""
    return tuple(dict.fromkeys(address for group in groups for address in group))
