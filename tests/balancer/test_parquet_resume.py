"""A Parquet source that stops and goes on: at the next batch, with other ranks, and never from a state that lies."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from freescale.balancer.batches.parquet import ParquetSource, read_parquet

from parquet_files import NUM_ROWS, ids, table, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("parquet"))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [4, 7, 9])
def test_a_resume_goes_on_at_the_next_batch_wherever_it_was_taken(folder: Path, batch_size: int, shuffle: bool) -> None:
    def source() -> ParquetSource:
        return read_parquet(folder, batch_size, rank=1, world_size=2, shuffle=shuffle)

    uninterrupted = source()
    list(uninterrupted)
    expected = list(uninterrupted)  # the second epoch
    for taken in range(len(expected) + 1):
        first = source()
        list(first)
        head = list(itertools.islice(first, taken))
        state = json.loads(json.dumps(first.state_dict()))
        copy = json.loads(json.dumps(state))
        resumed = source()
        resumed.load_state_dict(state)
        assert state == copy
        assert resumed.epoch == 1
        assert resumed.rows_read == sum(batch.batch_size for batch in head)
        tail = list(resumed)
        assert len(head) + len(tail) == len(expected)
        assert all(a.equal(b) for a, b in zip([*head, *tail], expected, strict=True))
        assert resumed.epoch == 2


def test_a_state_after_the_end_starts_the_next_epoch(folder: Path) -> None:
    source = read_parquet(folder, 4)
    list(source)
    state = source.state_dict()
    other = read_parquet(folder, 4)
    other.load_state_dict(state)
    assert other.epoch == 1
    assert ids(other) == list(range(NUM_ROWS))


def test_a_resume_may_change_batch_size_and_columns(folder: Path) -> None:
    first = read_parquet(folder, 4)
    head = ids(itertools.islice(first, 3))
    second = read_parquet(folder, 6, columns=["id"])
    second.load_state_dict(first.state_dict())
    assert head + ids(second) == list(range(NUM_ROWS))


def test_a_state_of_something_else_is_refused_and_says_what_differs(folder: Path, tmp_path: Path) -> None:
    state = read_parquet(folder, 4, rank=1, world_size=2).state_dict()

    def load(**changes: Any) -> None:
        arguments: dict[str, Any] = {"path": folder, "batch_size": 4, "rank": 1, "world_size": 2}
        read_parquet(**(arguments | changes)).load_state_dict(state)

    load()
    with pytest.raises(ValueError, match="another rank: 1, here it is 0"):
        load(rank=0)
    with pytest.raises(ValueError, match="another world_size: 2, here it is 3"):
        load(world_size=3)
    with pytest.raises(ValueError, match="another shuffle: False, here it is True"):
        load(shuffle=True)
    with pytest.raises(ValueError, match="another files: 4 files, here 1"):
        load(path=folder / "a.parquet")
    moved = shutil.copytree(folder, tmp_path / "moved")
    load(path=moved)
    pq.write_table(table(0, 6), moved / "b.parquet")
    with pytest.raises(
        ValueError, match=r"another files: b\.parquet \(5 rows, 1 row groups\), here b\.parquet \(6 rows"
    ):
        load(path=moved)
    with pytest.raises(ValueError, match="state version must be 2, got None"):
        read_parquet(folder, 4).load_state_dict({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 99}, "group of the state must be at most 5, the row groups of this rank, got 99"),
        ({"group": -3}, "group of the state must be an integer of at least 0, got -3"),
        ({"row": 10**9}, r"row of the state must be at most 2, the rows of row group 1, got 1000000000"),
        ({"group": 5, "row": 1}, "row of the state must be at most 0, the rows of row group 5, got 1"),
        ({"row": -1}, "row of the state must be an integer of at least 0, got -1"),
        ({"row": 1.0}, r"row of the state must be an integer of at least 0, got 1\.0"),
        ({"epoch": -1}, "epoch of the state must be an integer"),
        ({"epoch": True}, "epoch of the state must be an integer"),
        ({"epoch": 2**80}, "epoch of the state must be an integer"),
        ({"rows_read": None}, "rows_read of the state must be an integer of at least 0, got None"),
        ({"rows_read": 9}, "rows_read of the state must be 8, the rows before group and row, got 9"),
        ({"group": 0}, "rows_read of the state must be 1, the rows before group and row, got 8"),
        ({"dealt": None}, r"dealt of the state must be lists of \[row groups, rows\], got None"),
        ({"dealt": [[]]}, "dealt of the state must be lists"),
        ({"dealt": [[[1, 2], [3]]]}, "dealt of the state must be lists"),
        ({"dealt": [[[1, -2]]]}, "dealt of the state must be lists"),
        ({"dealt": [[[1, True]]]}, "dealt of the state must be lists"),
        ({"dealt": [[[2**70, 0]]]}, "dealt of the state must be lists"),
        ({"dealt": [[[2**61, 0]]]}, "group of the state must be at most 0, the row groups of this rank, got 1"),
    ],
)
def test_a_state_of_a_place_that_is_not_there_is_refused_and_changes_nothing(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    def source() -> ParquetSource:
        return read_parquet(folder, 4, rank=1, world_size=2)

    taken = source()
    head = ids(itertools.islice(taken, 2))
    state = taken.state_dict()
    assert (state["group"], state["row"], state["rows_read"]) == (1, 1, 8)
    before = taken.state_dict()
    with pytest.raises(ValueError, match=message):
        taken.load_state_dict(state | changes)
    assert taken.state_dict() == before
    del before["row"]
    with pytest.raises(ValueError, match="row of the state must be an integer of at least 0, got None"):
        taken.load_state_dict(before)
    resumed = source()
    resumed.load_state_dict(state)
    assert head + ids(resumed) == ids(source())


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_what_is_left_of_an_epoch_is_dealt_by_where_each_rank_stood(folder: Path, batch_size: int) -> None:
    """Row groups in turn, those that were begun from the row where their reader stopped; here two ranks, then three."""
    # Row groups begin at 0, 7, 14, 21, 23, 28 and then every three rows. Of two ranks the first stopped three rows into
    # 14, its second, and the other two rows into 34, its fourth. So 17, 23, 31, 36, 37, 40 and 43 begin what is left.
    # Of the three ranks that were dealt these in turn, one read its first, one three rows of 23, and one 31 and 40.
    dealt = [[[1, 3], [3, 2]], [[1, 0], [0, 3], [9, 9]]]
    expected = [26, 27, 36, 37, 38, 39, 43, 44]
    source = read_parquet(folder, batch_size)
    source.load_state_dict(source.state_dict() | {"dealt": dealt})
    assert source.num_rows == len(expected)
    assert ids(source) == expected
    assert ids(source) == list(range(NUM_ROWS))  # the next epoch is whole


def test_a_source_can_be_pickled(folder: Path) -> None:
    source = read_parquet(folder, 4)
    next(iter(source))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.state_dict() == source.state_dict()
    assert ids(copy) == list(range(NUM_ROWS))
