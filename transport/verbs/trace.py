"""When each chunk was ready, on the wire, delivered and received: shows what overlaps (paper, Figure 6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Step = Literal["granted", "on the wire", "delivered", "arrived", "in place"]


class ChunkEvent(NamedTuple):
    """One step of one chunk on one rank.

    Attributes:
        time_ns: When, by `time.monotonic_ns`.
        step: Of a chunk that is sent: "granted" (the receiver has room for it), "on the wire" (its bytes are ready and
            handed to the card), "delivered" (the receiver's card has it). Of one that is received: "arrived",
            "in place" (in the memory of the caller).
        sequence: Of the exchange.
        peer: To or from whom.
        owner: Whose block it is part of; sent pairwise, the peer.
        start: Where it begins in that block, in bytes.
        size: Bytes.
    """

    time_ns: int
    step: Step
    sequence: int
    peer: int
    owner: int
    start: int
    size: int


def draw_trace(events: Iterable[ChunkEvent], width: int = 72) -> str:
    """Draw one line for each chunk: when it waited for a place, was on the wire, and arrived.

    Args:
        events: Of one rank and one exchange.
        width: Characters of the time axis.

    Returns:
        Lines such as `-> 1  block 0 at 65536  ..=====`: `.` granted, `=` on the wire; `#` arrived to in place, `<-`.

    Example:
        >>> steps = [(0, "granted"), (4, "on the wire"), (9, "delivered")]
        >>> print(draw_trace([ChunkEvent(at, step, 0, 1, 0, 0, 8) for at, step in steps], width=10))
        -> 1  block 0 at 0  ....======
    """
    events = sorted(events)
    if not events:
        return ""
    begin, span = events[0].time_ns, max(events[-1].time_ns - events[0].time_ns, 1)
    rows: dict[tuple[str, int, int, int], list[str]] = {}
    last: dict[tuple[str, int, int, int], tuple[int, str]] = {}
    marks = {"granted": ".", "on the wire": "=", "arrived": "#"}
    for event in events:
        arrow = "<-" if event.step in ("arrived", "in place") else "->"
        key = (arrow, event.peer, event.owner, event.start)
        row = rows.setdefault(key, [" "] * width)
        column = (event.time_ns - begin) * (width - 1) // span
        if key in last:
            first, mark = last[key]
            row[first : column + 1] = mark * (column + 1 - first)
        elif event.step == "in place":
            row[column] = "#"  # came along with its record
        if event.step in marks:
            last[key] = (column, marks[event.step])
            row[column] = marks[event.step]
    names = {key: f"{key[0]} {key[1]}  block {key[2]} at {key[3]}" for key in rows}
    longest = max(map(len, names.values()))
    return "\n".join(f"{names[key]:<{longest}}  {''.join(row)}".rstrip() for key, row in rows.items())
