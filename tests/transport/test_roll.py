"""Ranks of a host see in shared memory which of them a collective waits for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freescale.transport.roll import Column, Roll, open_roll
from freescale.transport.segment import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="there is no /dev/shm")

DATA = 1  # index of the purpose
# Rank 1: joins by what the parent gathers, then does what it is told.
OTHER = """
import sys, time
from freescale.transport.roll import open_roll
answers = iter([None, sys.argv[2].encode(), b"1"])
def gather(mine, size):
    theirs = next(answers)
    return [mine if theirs is None else theirs, mine]
column = open_roll(gather, 1).columns(3)["data"]
for line in sys.stdin:
    if line == "look\\n":
        column.look(time.monotonic())
    else:
        getattr(column, line.strip())()
    print("did", line.strip(), flush=True)
"""


class Pair:
    """Rank 0 here, rank 1 in a process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.name, self.seen = "", list[str]()
        self.roll = open_roll(self._gather, 0)
        self.column: Column = self.roll.columns(3)["data"]

    def _gather(self, mine: bytes, size: int) -> list[bytes]:
        assert len(mine) <= size
        if mine.startswith(b"freescale-"):
            self.name, self.seen = mine.decode(), os.listdir(FOLDER)
            command = [sys.executable, "-c", OTHER, "", mine.decode()]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.tell("look")  # it has joined
        return [mine, b"1" if mine == b"1" else mine]

    def tell(self, what: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"did {what}\n"

    def end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=60)

    def missing(self, number: int) -> list[int] | None:
        return self.roll.missing(3, DATA, number)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        assert made.name in made.seen
        assert made.name not in os.listdir(FOLDER), "nothing stays, however the ranks end"
        yield made
    finally:
        made.end()


def test_whoever_has_not_begun_is_missing_and_whoever_does_not_look_after_that(pair: Pair) -> None:
    assert pair.column.begin() == 1
    assert pair.column.missing(1) == [1], "it has not come"
    pair.tell("begin")
    pair.tell("look")
    assert asked_just_after_a_look(pair) is None, "it waits too"
    assert pair.column.missing(2) == [1]
    time.sleep(1.2)
    assert pair.column.missing(1) == [1], "it has come, and does nothing for it any more"
    pair.tell("finish")
    assert pair.column.missing(1) is None, "it is through"


def asked_just_after_a_look(pair: Pair) -> list[int] | None:
    """Who is missing, asked in less than the second after which a rank is silent; machines may stand still."""
    while True:
        begun = time.monotonic()
        pair.tell("look")
        missing = pair.column.missing(1)
        if time.monotonic() - begun < 0.9:
            return missing


def test_a_rank_that_was_held_up_together_with_this_one_is_not_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.column.begin()
    pair.tell("begin")
    pair.roll.words[pair.roll.at(1, 3, DATA) + 2] = 0  # it looked long ago
    naps: list[float] = []

    def look_meanwhile(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) > 1:
            pair.tell("look")

    monkeypatch.setattr(time, "sleep", look_meanwhile)
    assert pair.column.missing(1) == [1], "it does not go on"
    assert pair.column.missing(1) is None, "it looks as soon as it goes on"
    assert naps == [0.5, 0.5]


def test_a_rank_that_has_ended_is_missing_whatever_it_has_counted(pair: Pair) -> None:
    pair.column.begin()
    pair.tell("begin")
    pair.tell("look")
    assert pair.roll.gone() == []
    pair.end()
    assert pair.roll.gone() == [1]
    assert pair.column.missing(1) == [1]


def test_a_slot_that_an_earlier_channel_had_counts_from_zero(pair: Pair) -> None:
    pair.column.begin()
    pair.column.begin()
    new = pair.roll.columns(3)["data"]
    pair.column.finish()
    assert new.begin() == 1
    at = pair.roll.at_own(3, DATA)
    assert pair.roll.words[at : at + 2].tolist() == [1, 0], "what an earlier channel ends late does not count"


def test_a_roll_that_nobody_needs_gives_back_its_file() -> None:
    def open_files() -> int:
        gc.collect()
        return sum("freescale-" in os.path.realpath(file) for file in Path("/proc/self/fd").iterdir())

    before = open_files()
    pair = Pair()
    try:
        column = pair.column
        assert open_files() > before
        pair.roll = Roll(None, [0], 0)
        column.begin()
        assert column.missing(1) == [1], "a channel keeps it"
        del column, pair.column
        assert open_files() == before
    finally:
        pair.end()


def test_slots_come_back_and_when_none_is_left_nothing_is_counted(pair: Pair) -> None:
    slots = [pair.roll.reserve() for _ in range(200)]
    given = [slot for slot in slots if slot >= 0]
    assert len(set(given)) == len(given) == 127, "and slot 0 is the first channel's"
    assert set(slots[127:]) == {-1}
    pair.roll.give_back(-1)
    pair.roll.give_back(given[5])
    assert [pair.roll.reserve(), pair.roll.reserve()] == [given[5], -1]
    column = pair.roll.columns(-1)["sizes"]
    assert [column.begin(), column.begin()] == [1, 2]
    assert column.missing(2) is None


def test_what_is_no_slot_is_none(pair: Pair) -> None:
    for told in ("", "-1", "128", "99999999999999999999", "one", "٣", "1.0"):
        assert pair.roll.slot(told) == -1, told
    assert pair.roll.slot("5") == 5


def test_where_ranks_share_no_memory_nobody_is_missing_for_sure() -> None:
    roll = Roll(None, [0], 0)
    column = roll.columns(0)["data"]
    assert column.missing(column.begin()) is None
    assert (roll.gone(), roll.slot("5")) == ([], -1)


def test_a_rank_of_another_host_is_not_looked_for(tmp_path: Path) -> None:
    replies = iter([[b"here", b"there"], [b"", b""], [b"1", b"0"]])
    roll = open_roll(lambda mine, size: next(replies), 0)
    column = roll.columns(0)["data"]
    assert column.missing(column.begin()) is None
