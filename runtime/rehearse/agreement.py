"""Whether ranks agree: in every group's collectives, and in the messages between any two.

NCCL's rules: the members of a group call its collectives in one order, of one kind, size and dtype;
messages are matched by their order alone, and a send leaves when its receive is posted.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from whale_train.runtime.rehearse.recorded_group import Asked, Record


def disagreements(
    groups: Sequence[tuple[str, Sequence[int]]], asked: Mapping[int, Record]
) -> list[str]:
    """Return what is wrong in the collectives of `groups`, names and ranks, as the ranks `asked`
    them; one line a group, of the first that differs. Ranks that are not known are left out."""
    found = []
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
                found.append(
                    f"collective {number + 1} of {name}: rank {first} asks for "
                    f"{one or 'none'}, rank {rank} for {other or 'none'}"
                )
                break
    return found


def _first_difference(
    one: Sequence[Asked], other: Sequence[Asked]
) -> tuple[int, Asked | None, Asked | None] | None:
    for number, (a, b) in enumerate(zip_longest(one, other)):
        if a != b and not (a and b and _both_all_to_all(a, b)):
            return number, a, b
    return None


def _both_all_to_all(a: Asked, b: Asked) -> bool:
    """Return whether members send each other what each of them has, of one dtype."""
    return a.kind == b.kind == "all-to-all" and a.dtype == b.dtype


def unmatched(asked: Mapping[int, Record]) -> list[str]:
    """Return what is wrong in the messages between ranks, one line a pair: posts that meet and do
    not match, and messages that nobody takes."""
    found = []
    for rank, record in asked.items():
        for peer, mine in record.messages.items():
            if peer < rank or peer not in asked:
                continue
            theirs = asked[peer].messages.get(rank, [])
            for number, (a, b) in enumerate(zip_longest(mine, theirs)):
                if a is None or b is None or not _match(a, b):
                    found.append(
                        f"message {number + 1} between ranks {rank} and {peer}: rank {rank} posts "
                        f"{a or 'none'}, rank {peer} {b or 'none'}"
                    )
                    break
    return found


def _match(one: Asked, other: Asked) -> bool:
    return {one.kind, other.kind} == {"send", "receive"} and (one.sizes, one.dtype) == (
        other.sizes,
        other.dtype,
    )


def waiting(asked: Mapping[int, Record]) -> list[str]:
    """Return the ranks that wait for each other for ever, where a message leaves when both of its
    ends are posted and all before it between these ranks have left; nothing if all come to their
    end."""
    places = dict.fromkeys(asked, 0)
    posted: dict[tuple[int, int], int] = {}  # of a rank, to another
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
