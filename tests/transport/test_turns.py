"""Ranks meet at a store: one name at a time has its turn, nobody who is late for one holds up another."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from freescale.transport import TransportError, TransportTimeout
from freescale.transport.turns import Turns

_c10d: Any = dist  # torch's stubs lack the store


def nothing() -> None:
    return None


def take(turns: Turns, name: str, timeout_s: float, done: list[str]) -> threading.Thread:
    def run() -> None:
        with turns.turn(name, timeout_s, ""):
            done.append(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_who_has_not_come_is_named() -> None:
    store = _c10d.HashStore()
    ranks = [Turns(store, rank, 3, nothing) for rank in range(3)]
    with (
        pytest.raises(TransportTimeout, match=r"rank 2 of 3 waited 0\.05 s .*; missing: ranks \[0, 1\]"),
        ranks[2].turn("a", 0.05, ""),
    ):
        pass
    with (
        pytest.raises(TransportTimeout, match=r"rank 0 of 3 waited 0\.05 s .*; missing: ranks \[1\]"),
        ranks[0].turn("a", 0.05, ""),
    ):
        pass


def test_a_rank_that_failed_is_heard_of_before_the_deadline() -> None:
    turns = Turns(_c10d.HashStore(), 0, 2, lambda: "rank 1 failed: ValueError: no data")
    with pytest.raises(TransportError, match="rank 1 failed: ValueError: no data"), turns.turn("a", 200, ""):
        pass


def test_who_is_late_for_one_name_holds_up_no_other() -> None:
    store, done = _c10d.HashStore(), list[str]()
    ranks = [Turns(store, rank, 2, nothing) for rank in range(2)]
    early = take(ranks[0], "late", 100, done)
    time.sleep(0.05)
    for thread in [take(each, "other", 100, done) for each in ranks]:
        thread.join(60)
    assert done == ["other", "other"]
    take(ranks[1], "late", 100, done).join(60)
    early.join(60)
    assert done[2:] == ["late", "late"]


def test_one_name_at_a_time_has_its_turn() -> None:
    store = _c10d.HashStore()
    ranks = [Turns(store, rank, 2, nothing) for rank in range(2)]
    at_once, most = [0], [0]

    def work(rank: int, name: str) -> None:
        with ranks[rank].turn(name, 100, ""):
            if rank == 0:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
                time.sleep(0.02)
                at_once[0] -= 1

    threads = [threading.Thread(target=work, args=(rank, f"{n}"), daemon=True) for n in range(5) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 1


def test_all_get_the_note_of_rank_0() -> None:
    store, got = _c10d.HashStore(), list[str]()

    def run(rank: int) -> None:
        with Turns(store, rank, 3, nothing).turn("a", 100, f"of rank {rank}") as note:
            got.append(note)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == ["of rank 0"] * 3


def test_a_turn_that_fails_is_given_back() -> None:
    store = _c10d.HashStore()
    turns = Turns(store, 0, 1, nothing)
    with pytest.raises(ValueError, match="planted"), turns.turn("a", 5, ""):
        raise ValueError("planted")
    with turns.turn("b", 5, ""):
        pass
