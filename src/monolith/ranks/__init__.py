"""Synchronous training over ranks: tables spread over the training processes, which exchange rows in every step."""

from monolith.ranks.formation import RankMember, form_mesh
from monolith.ranks.mesh import Channel, Kind, Mesh
from monolith.ranks.peers import MeshConfig
from monolith.ranks.rendezvous import DiscoveryRendezvous, Rendezvous, StoreRendezvous, torchrun_rendezvous
from monolith.ranks.socket_mesh import SocketMesh

__all__ = [
    "Channel",
    "DiscoveryRendezvous",
    "Kind",
    "Mesh",
    "MeshConfig",
    "RankMember",
    "Rendezvous",
    "SocketMesh",
    "StoreRendezvous",
    "form_mesh",
    "torchrun_rendezvous",
]
