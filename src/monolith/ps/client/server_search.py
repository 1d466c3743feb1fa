"""A server that was started again somewhere else: found by its identity, which it has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monolith.errors import MonolithError
from monolith.ps.client.bucket_answers import ask_buckets
from monolith.transport.link import Link

__all__ = ["follow_server"]


def follow_server(
    link: Link, known: Sequence[str], find: Callable[[], Sequence[str]], connect: Callable[[str], Link]
) -> None:
    """Give `link` the address that its server has now, if it is one of those that `find` returns.

    Addresses in `known` are other servers'. What cannot be asked now is asked the next time.
    """
    try:
        addresses = find()
    except MonolithError:
        return
    if link.address in addresses:
        return
    for address in addresses:
        if address not in known and _identity(connect(address)) == link.server:
            link.move_to(address)
            return


def _identity(link: Link) -> int | None:
    try:
        return ask_buckets(link).server
    except MonolithError:
        return None
    finally:
        link.close()
