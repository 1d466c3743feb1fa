"""Starting, supervising and stopping the processes of a job, on this machine or as actors of a Ray cluster."""

from monolith.cluster.launch.parts import LoopPart, PartsJob, PrepareStep
from monolith.cluster.launch.roles import JobRoles, Role, RoleKind, ServeRoles
from monolith.cluster.launch.supervisor import (
    Event,
    EventKind,
    Outcome,
    RoleProcess,
    RoleState,
    RoleStatus,
    Supervisor,
)

__all__ = [
    "Event",
    "EventKind",
    "JobRoles",
    "LoopPart",
    "Outcome",
    "PartsJob",
    "PrepareStep",
    "Role",
    "RoleKind",
    "RoleProcess",
    "RoleState",
    "RoleStatus",
    "ServeRoles",
    "Supervisor",
]
