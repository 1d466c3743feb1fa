"""`DiscoveryConfig`: the service discovery of a job, and how to open it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from monolith.cluster.discovery.consul import ConsulServiceDiscovery
from monolith.cluster.discovery.file import HostServiceDiscovery
from monolith.cluster.discovery.ray import RayServiceDiscovery
from monolith.cluster.discovery.service_discovery import ServiceDiscovery, ServiceDiscoveryType
from monolith.cluster.discovery.tf_config import TfConfigServiceDiscovery
from monolith.cluster.discovery.zookeeper import ZKServiceDiscovery
from monolith.cluster.net import AddressFamily
from monolith.cluster.scheduler import load_scheduler
from monolith.cluster.zookeeper import default_zk_servers
from monolith.config import Config
from monolith.errors import ConfigError

__all__ = ["DiscoveryConfig", "get_discovery", "monolith_discovery"]

_logger = logging.getLogger(__name__)


class DiscoveryConfig(Config):
    """How the processes of a job find each other.

    Example:
        >>> DiscoveryConfig(discovery_type="zk", deep_insight_name="ctr", zk_server="zk0:2181").discovery_type
        <ServiceDiscoveryType.ZK: 'zk'>
    """

    is_local: bool = False
    """The job is this one process, so there is nothing to find."""
    discovery_type: Annotated[ServiceDiscoveryType, Field(strict=False)] = ServiceDiscoveryType.CONSUL
    """The back end."""
    uuid: str = ""
    """Name of this launch of the job. It names the job in Consul and Ray, and all workers of one launch must declare the same
    settings of tables and optimizers."""
    deep_insight_name: str | None = None
    """Name of the job in ZooKeeper."""
    zk_server: str | None = None
    """ZooKeeper's servers, `host:port[,host:port...]`, by default those of the environment."""
    zk_watch_address_family: Annotated[AddressFamily, Field(strict=False)] = AddressFamily.IPV4
    """Kind of addresses, ipv4 or ipv6, of the ZooKeeper servers taken from the environment. Machines without IPv4 use ipv6."""
    tf_config: str | None = None
    """The text that describes the cluster for `primus`, by default the variable TF_CONFIG."""
    discovery_folder: str | None = None
    """The folder for `file`."""
    ray_address: str | None = None
    """The Ray cluster for `ray`, `host:port`, by default the one this process belongs to, or that of RAY_ADDRESS."""


def get_discovery(config: DiscoveryConfig, psm: str | None = None) -> ServiceDiscovery | None:
    """Open the discovery that `config` names. Returns None for a local job.

    `psm` is the name in Consul, by default the job's `uuid`. TF_CONFIG and the MLP environment also say which process this
    is: what is returned is then a `ScheduledDiscovery`.

    Example:
        >>> get_discovery(DiscoveryConfig(is_local=True)) is None
        True
    """
    if config.is_local:
        return None
    match config.discovery_type:
        case ServiceDiscoveryType.PRIMUS:
            return TfConfigServiceDiscovery(_needed("tf_config", config.tf_config or os.environ.get("TF_CONFIG")))
        case ServiceDiscoveryType.CONSUL:
            return ConsulServiceDiscovery(_needed("uuid", psm or config.uuid))
        case ServiceDiscoveryType.ZK:
            use_ipv6 = config.zk_watch_address_family is AddressFamily.IPV6
            servers = config.zk_server or (default_zk_servers(use_ipv6=True) if use_ipv6 else None)
            return ZKServiceDiscovery(_needed("deep_insight_name", config.deep_insight_name), servers)
        case ServiceDiscoveryType.MLP:
            return load_scheduler("mlp", os.environ).discovery()
        case ServiceDiscoveryType.FILE:
            return HostServiceDiscovery(_needed("discovery_folder", config.discovery_folder))
        case ServiceDiscoveryType.RAY:
            return RayServiceDiscovery(_needed("uuid", config.uuid), config.ray_address)


@contextmanager
def monolith_discovery(config: DiscoveryConfig) -> Iterator[ServiceDiscovery | None]:
    """Open the discovery of a job for the time of a block, and close it at the end.

    Example:
        >>> with monolith_discovery(DiscoveryConfig(is_local=True)) as discovery:
        ...     print(discovery)
        None
    """
    discovery = get_discovery(config)
    if discovery is None:
        yield None
        return
    _logger.debug("discovery through %s", config.discovery_type)
    with discovery:
        yield discovery
    _logger.debug("discovery through %s is closed", config.discovery_type)


def _needed(field: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f"DiscoveryConfig.{field}: expected a value for this discovery_type, got {value!r}")
    return value
