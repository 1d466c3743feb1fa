"""The processes of a job: their roles, their addresses, and the schedulers that start them.

Clients of ZooKeeper, Consul, Ray and Primus are imported when they are first used.
"""

from monolith.cluster.discovery.config import DiscoveryConfig, get_discovery, monolith_discovery
from monolith.cluster.discovery.consul import ConsulServiceDiscovery, deregister_all
from monolith.cluster.discovery.file import HostServiceDiscovery
from monolith.cluster.discovery.ray import RayServiceDiscovery
from monolith.cluster.discovery.service_discovery import ServiceDiscovery, ServiceDiscoveryType, retry_with_socket_error
from monolith.cluster.discovery.tf_config import ClusterSpec, Task, TfConfigServiceDiscovery, parse_tf_config
from monolith.cluster.discovery.zookeeper import ZKServiceDiscovery
from monolith.cluster.liveness import Liveness
from monolith.cluster.net import (
    AddressFamily,
    NodeAliveChecker,
    check_port,
    concat_ip_and_port,
    get_local_host,
    get_local_ip,
    get_local_server_addr,
    is_ipv4_supported,
    is_ipv6_address,
    split_address,
)
from monolith.cluster.role import (
    LaunchedRank,
    add_mpi_exception_hook,
    get_mpi_local_rank,
    get_mpi_local_size,
    get_mpi_rank,
    get_mpi_size,
    launched_rank,
    ranks_on_this_machine,
    role_from_environment,
)
from monolith.cluster.scheduler import ScheduledRole, Scheduler
from monolith.cluster.zookeeper import clear_zk_path, default_zk_servers, get_zk_auth_data, is_ipv6_only

__all__ = [
    "AddressFamily",
    "ClusterSpec",
    "ConsulServiceDiscovery",
    "DiscoveryConfig",
    "HostServiceDiscovery",
    "LaunchedRank",
    "Liveness",
    "NodeAliveChecker",
    "RayServiceDiscovery",
    "ScheduledRole",
    "Scheduler",
    "ServiceDiscovery",
    "ServiceDiscoveryType",
    "Task",
    "TfConfigServiceDiscovery",
    "ZKServiceDiscovery",
    "add_mpi_exception_hook",
    "check_port",
    "clear_zk_path",
    "concat_ip_and_port",
    "default_zk_servers",
    "deregister_all",
    "get_discovery",
    "get_local_host",
    "get_local_ip",
    "get_local_server_addr",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "get_zk_auth_data",
    "is_ipv4_supported",
    "is_ipv6_address",
    "is_ipv6_only",
    "launched_rank",
    "monolith_discovery",
    "parse_tf_config",
    "ranks_on_this_machine",
    "retry_with_socket_error",
    "role_from_environment",
    "split_address",
]
