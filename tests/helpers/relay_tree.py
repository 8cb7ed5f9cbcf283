"""The whole tree along which samplers relay weights, from the source of each next one."""

from jaxrl_async.remote.weights.transfers import sources_of_next


def sources(members: list[str], fanout: int, trainer: str) -> tuple[tuple[str, ...], ...]:
    """Return the addresses that each member fetches from, best first, the trainer's last.

    members: in order of joining; "": one that does not relay, and is no source. Appending a member
    changes nothing for the others.
    """
    relaying: list[str] = []
    found = []
    for member in members:
        found.append(sources_of_next(len(relaying), relaying.__getitem__, fanout, trainer))
        if member:
            relaying.append(member)
    return tuple(found)
