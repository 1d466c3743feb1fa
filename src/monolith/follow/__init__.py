"""Following: rows and weights of a run that trains, in another process, a moment later.

Whoever holds rows has a `Feed`: a run, a parameter server or a rank. A `Follower` keeps a copy of the rows of all of them.
"""

from monolith.follow.feed import Feed
from monolith.follow.follower import Follower, FollowTarget, Writer

__all__ = ["Feed", "FollowTarget", "Follower", "Writer"]
