"""Schedules of copy engines: every byte once, in an order that ends, in counts that pass 32 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.transport import windows_opening
from freescale.transport.slots import cut, has_reached, in_rounds, low

MIB = 1 << 20


@given(st.integers(0, 300 * MIB), st.sampled_from([4096, 1000, MIB, 4 * MIB, 32 * MIB]))
def test_chunks_add_up_and_fit_a_slot(size: int, slot_bytes: int) -> None:
    chunks = cut(min(size, 2000 * slot_bytes), slot_bytes)
    assert sum(chunks) == min(size, 2000 * slot_bytes)
    assert all(0 < chunk <= slot_bytes for chunk in chunks)


def test_the_last_copy_is_short_and_few_chunks_are_made_for_it() -> None:
    for size in (64 * MIB, 256 * MIB, 33 * MIB):
        chunks = cut(size, 32 * MIB)
        assert chunks[-1] <= 4 * MIB
        assert len(chunks) <= -(-size // (32 * MIB)) + 2


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Members of a host among other ranks, and bytes from every rank to every rank in several transfers."""
    world_size = draw(st.integers(1, 6))
    members = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    row = st.lists(st.integers(0, 40), min_size=world_size, max_size=world_size)
    matrix = st.lists(row, min_size=world_size, max_size=world_size)
    return members, draw(st.lists(matrix, min_size=1, max_size=4))


@given(worlds(), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0, 2**31 - 3, 2**32 - 3, 2**40]))
@settings(max_examples=200)
def test_streams_that_follow_the_schedule_all_end(
    world: tuple[list[int], list[list[list[int]]]], depth: int, seed: int, first: int
) -> None:
    """Carries out what each rank enqueues, streams in any interleaving, waits and all."""
    members, transfers = world
    streams: list[list[tuple[str, int, int, int]]] = []
    for rank in members:
        sends: list[tuple[str, int, int, int]] = []
        receives: list[tuple[str, int, int, int]] = []
        counts = {("send", peer): first for peer in members} | {("receive", peer): first for peer in members}
        for bytes_ in transfers:
            for is_send, todo in ((True, sends), (False, receives)):
                sizes = bytes_[rank] if is_send else [row[rank] for row in bytes_]
                kind = "send" if is_send else "receive"
                for chunks in in_rounds(rank, members, sizes, 7, sends=is_send):
                    for chunk in chunks:
                        todo.append((kind, rank, chunk.peer, counts[kind, chunk.peer]))
                        counts[kind, chunk.peer] += 1
        streams += [sends, receives]
    arrived = {(a, b): low(first) for a in members for b in members}
    consumed = dict(arrived)
    at = [0] * len(streams)

    def step(index: int) -> bool:
        if at[index] == len(streams[index]):
            return False
        kind, rank, peer, number = streams[index][at[index]]
        if kind == "send":
            if number + 1 - depth > first and not has_reached(consumed[rank, peer], number + 1 - depth):
                return False
            arrived[rank, peer] = low(number + 1)
        else:
            if not has_reached(arrived[peer, rank], number + 1):
                return False
            consumed[peer, rank] = low(number + 1)
        at[index] += 1
        return True

    order = sorted(range(len(streams)), key=lambda index: (seed * (index + 7)) % 101)
    while any(step(index) for index in order):
        pass
    assert at == [len(stream) for stream in streams], "some stream waits for ever"


@given(worlds(), st.integers(1, 9))
def test_every_byte_is_sent_and_received_once_and_in_the_same_chunks(
    world: tuple[list[int], list[list[list[int]]]], slot_bytes: int
) -> None:
    members, (bytes_, *_) = world
    for rank in members:
        for peer in members:
            sent = [c for r in in_rounds(rank, members, bytes_[rank], slot_bytes, sends=True) for c in r]
            sizes = [row[peer] for row in bytes_]
            received = [c for r in in_rounds(peer, members, sizes, slot_bytes, sends=False) for c in r]
            there = [(c.start, c.size) for c in sent if c.peer == peer]
            assert there == [(c.start, c.size) for c in received if c.peer == rank]
            if peer != rank:
                assert sum(size for _, size in there) == bytes_[rank][peer]


@pytest.mark.parametrize("count", [0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 7])
def test_flags_of_32_bits_show_counts_of_64(count: int) -> None:
    assert has_reached(low(count), count)
    assert has_reached(low(count + 1), count)
    assert has_reached(low(count + 2**30), count)
    assert not has_reached(low(count), count + 1)


@pytest.mark.parametrize(
    ("free_mib", "num_members", "slot_kib"),
    [(1 << 20, 8, 1024), (64, 2, 1024), (64, 4, 168), (64, 8, 64), (0, 2, 64)],
)
def test_slots_are_smaller_where_shared_memory_has_little_room(
    free_mib: int, num_members: int, slot_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container /dev/shm has 64 MiB unless it is given more."""
    monkeypatch.setattr(windows_opening, "_free_bytes", lambda: free_mib << 20)
    assert windows_opening.slot_within_room(1 << 20, num_members) == slot_kib << 10


def test_without_a_folder_for_shared_memory_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then whoever makes a segment says what is wrong, to all ranks: an error here would be on this host alone."""
    monkeypatch.setattr(windows_opening, "FOLDER", tmp_path / "none")
    assert windows_opening.slot_within_room(1 << 20, 4) == 64 << 10
