"""Check that ranks agree: in every group's collectives, and in the messages of every two ranks.

By NCCL's rules the members of a group call its collectives in one order, of one kind, size and
dtype. Messages are matched by their order only, and a send completes when its receive is posted.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from whale_train.runtime.rehearse.recorded_group import Asked, Record


def disagreements(
    groups: Sequence[tuple[str, Sequence[int]]], asked: Mapping[int, Record]
) -> list[str]:
    """Return a line for each group whose members do not call the same collectives.

    `groups` are names and ranks; `asked` are the records by rank. A line reports the first
    collective that differs. Ranks without a record are ignored.
    """
    faults = []
    for name, ranks in groups:
        known = [rank for rank in ranks if rank in asked]
        if len(known) < 2:
            continue
        first, *others = known
        expected = asked[first].collectives.get(name, [])
        for rank in others:
            given = asked[rank].collectives.get(name, [])
            if given is expected:
                continue
            differs = _first_difference(expected, given)
            if differs is not None:
                number, one, other = differs
                faults.append(
                    f"collective {number + 1} of {name}: rank {first} asks for "
                    f"{one or 'none'}, rank {rank} for {other or 'none'}"
                )
                break
    return faults


def _first_difference(
    one: Sequence[Asked], other: Sequence[Asked]
) -> tuple[int, Asked | None, Asked | None] | None:
    """Return the number and both operations of the first difference, or None if there is none."""
    for number, (a, b) in enumerate(zip_longest(one, other)):
        if a != b and not (a and b and _both_all_to_all(a, b)):
            return number, a, b
    return None


def _both_all_to_all(a: Asked, b: Asked) -> bool:
    """Return True for two all-to-alls of one dtype; their sizes may differ by member."""
    return a.kind == b.kind == "all-to-all" and a.dtype == b.dtype


def unmatched(asked: Mapping[int, Record]) -> list[str]:
    """Return a line for each pair of ranks whose messages do not match.

    A line reports the first posts that do not match, or the first message without a counterpart.
    """
    faults = []
    for rank, record in asked.items():
        for peer, posts in record.messages.items():
            if peer < rank or peer not in asked:
                continue
            theirs = asked[peer].messages.get(rank, [])
            for number, (a, b) in enumerate(zip_longest(posts, theirs)):
                if a is None or b is None or not _match(a, b):
                    faults.append(
                        f"message {number + 1} between ranks {rank} and {peer}: rank {rank} posts "
                        f"{a or 'none'}, rank {peer} {b or 'none'}"
                    )
                    break
    return faults


def _match(one: Asked, other: Asked) -> bool:
    """Return True for a send and a receive of equal sizes and dtype."""
    return {one.kind, other.kind} == {"send", "receive"} and (one.sizes, one.dtype) == (
        other.sizes,
        other.dtype,
    )


def waiting(asked: Mapping[int, Record]) -> list[str]:
    """Return a line for each of up to four ranks that wait forever; [] if all ranks finish.

    A message is delivered when both of its ends are posted and all earlier messages between the two
    ranks are delivered.
    """
    places = dict.fromkeys(asked, 0)
    posted: dict[tuple[int, int], int] = {}  # messages posted, by (rank, peer)
    moved = True
    while moved:
        moved = False
        for rank, record in asked.items():
            while places[rank] < len(record.events):
                kind, peer, number = record.events[places[rank]]
                if kind == "wait" and peer in asked and posted.get((peer, rank), 0) <= number:
                    break
                if kind == "post":
                    posted[rank, peer] = number + 1
                places[rank] += 1
                moved = True
    stuck = [rank for rank, place in places.items() if place < len(asked[rank].events)]
    return [
        f"rank {rank} waits for message {number + 1} of rank {peer} for ever"
        for rank in stuck[:4]
        for _, peer, number in (asked[rank].events[places[rank]],)
    ]
