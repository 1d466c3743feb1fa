"""Synchronous training over ranks: tables spread over the training processes, which exchange rows in every step."""

from monolith.ranks.agreement import Agreement, StepPlan
from monolith.ranks.data_shards import DataShards
from monolith.ranks.dense import DenseGradients, SharedBuffers
from monolith.ranks.formation import form_mesh
from monolith.ranks.mesh import Channel, Kind, Mesh
from monolith.ranks.messages import RankMember
from monolith.ranks.peers import MeshConfig
from monolith.ranks.process_group import all_reduce_over
from monolith.ranks.rank_folder import RankFolder
from monolith.ranks.rank_state import RankState
from monolith.ranks.rank_store import RankStore
from monolith.ranks.rendezvous import DiscoveryRendezvous, Rendezvous, StoreRendezvous, torchrun_rendezvous
from monolith.ranks.row_exchange import GradientPart
from monolith.ranks.socket_mesh import SocketMesh
from monolith.ranks.states import broadcast_state, gather_states

__all__ = [
    "Agreement",
    "Channel",
    "DataShards",
    "DenseGradients",
    "DiscoveryRendezvous",
    "GradientPart",
    "Kind",
    "Mesh",
    "MeshConfig",
    "RankFolder",
    "RankMember",
    "RankState",
    "RankStore",
    "Rendezvous",
    "SharedBuffers",
    "SocketMesh",
    "StepPlan",
    "StoreRendezvous",
    "all_reduce_over",
    "broadcast_state",
    "form_mesh",
    "gather_states",
    "torchrun_rendezvous",
]
