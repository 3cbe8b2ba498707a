"""Parquet: every row once over the ranks, never a whole file in memory, and what cannot be read is named."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from freescale.balancer.batches.batch import JaggedBatch
from freescale.balancer.batches.parquet import read_parquet

from parquet_files import FILES, NUM_ROWS, ids, table, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("parquet"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_every_row_is_read_by_exactly_one_rank(folder: Path, world_size: int, batch_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        source = read_parquet(folder, batch_size, rank=rank, world_size=world_size)
        batches = list(source)
        assert len(batches) == len(source)
        assert all(batch.batch_size == batch_size for batch in batches[:-1])
        seen += ids(batches)
        assert sum(batch.batch_size for batch in batches) == source.num_rows
    assert sorted(seen) == list(range(NUM_ROWS))


def test_batches_hold_the_rows_of_the_file(folder: Path) -> None:
    by_arrow = pa.concat_tables(pq.read_table(folder / name) for name in FILES)
    joined = JaggedBatch.concat(list(read_parquet(folder, 4)))
    assert joined.equal(JaggedBatch.from_arrow(by_arrow))
    assert joined["deep"].to_list() == by_arrow.column("deep").to_pylist()


def test_row_groups_are_dealt_in_turn_over_all_files(folder: Path) -> None:
    first = ids(read_parquet(folder, 100, rank=0, world_size=2))
    assert first == [*range(7), *range(14, 21), *range(23, 28), *range(31, 34), *range(37, 40), *range(43, 45)]


@pytest.mark.parametrize("batch_size", [3, 5, 100])
def test_drop_last_leaves_out_only_a_short_last_batch(folder: Path, batch_size: int) -> None:
    source = read_parquet(folder, batch_size, drop_last=True)
    full = NUM_ROWS // batch_size
    assert ids(source) == list(range(full * batch_size))
    assert len(source) == full
    assert ids(source) == list(range(full * batch_size))


def test_each_iteration_is_an_epoch(folder: Path) -> None:
    source = read_parquet(folder, 4)
    assert ids(source) == ids(source) == list(range(NUM_ROWS))
    assert source.epoch == 2
    assert ids(itertools.islice(source, 2)) == list(range(8))
    assert source.epoch == 2
    assert ids(source) == list(range(NUM_ROWS))
    assert source.epoch == 4


def test_shuffling_deals_row_groups_anew_each_epoch(folder: Path) -> None:
    sources = [read_parquet(folder, 4, rank=rank, world_size=3, shuffle=True, seed=5) for rank in range(3)]
    epochs = [[ids(source) for source in sources] for _ in range(3)]
    assert all(sorted(itertools.chain(*epoch)) == list(range(NUM_ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = read_parquet(folder, 4, rank=1, world_size=3, shuffle=True, seed=5)
    assert [ids(again) for _ in range(3)] == [epoch[1] for epoch in epochs]


def test_a_source_says_whether_it_shuffles(folder: Path) -> None:
    assert not read_parquet(folder, 4).shuffles
    assert DataLoader(read_parquet(folder, 4, shuffle=True), batch_size=None).dataset.shuffles  # type: ignore[attr-defined]  # a ParquetSource's


def test_progress_is_known_in_rows(folder: Path) -> None:
    source = read_parquet(folder, 10)
    assert (source.num_rows, source.rows_read) == (NUM_ROWS, 0)
    iterator = iter(source)
    read = []
    for batch in iterator:
        read.append(source.rows_read)
        assert batch.batch_size <= 10
    assert read == [10, 20, 30, 40, 45]
    assert source.rows_read == 0


def test_only_the_newest_iterator_goes_on(folder: Path) -> None:
    source = read_parquet(folder, 4)
    old = iter(source)
    next(old)
    new = iter(source)
    assert next(new)["id"].to_list() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="a newer iterator of this Parquet source"):
        next(old)
    assert next(new)["id"].to_list() == [4, 5, 6, 7]
    source.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="a newer iterator of this Parquet source"):
        next(new)
    assert next(iter(source))["id"].to_list() == [8, 9, 10, 11]


def test_paths_may_be_files_folders_patterns_and_lists(folder: Path) -> None:
    assert ids(read_parquet(str(folder / "b.parquet"), 4)) == list(range(23, 28))
    assert ids(read_parquet(folder / "[ab].parquet", 4)) == list(range(28))
    assert ids(read_parquet([folder / "b.parquet", folder / "a.parquet"], 4)) == [*range(23, 28), *range(23)]
    odd = folder / "odd [1].parquet"
    pq.write_table(table(0, 2), odd)
    try:
        assert ids(read_parquet(odd, 4)) == [0, 1]
    finally:
        odd.unlink()


def test_columns_come_in_the_order_asked_for(folder: Path) -> None:
    source = read_parquet(folder, 4, columns=["page", "id"])
    assert source.names == next(iter(source)).names == ("page", "id")
    assert read_parquet(folder, 4).names == ("id", "page", "deep")


def test_a_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.parquet", tmp_path / "*.parquet", [folder, tmp_path / "none.parquet"], tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no Parquet file at '{tmp_path}"):
            read_parquet(path, 4)
    with pytest.raises(FileNotFoundError, match="list of paths is empty"):
        read_parquet([], 4)


def test_a_missing_column_is_named_with_those_that_exist(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'pages' in .*a\.parquet; it has id, page, deep"):
        read_parquet(folder, 4, columns=["id", "pages"])


def test_files_that_differ_are_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "z.parquet"
    pq.write_table(pa.table({"id": pa.array([1], pa.int32()), "page": [[1]], "deep": [[[1]]]}), other)
    with pytest.raises(ValueError, match=r"column 'id' is int32 in .*z\.parquet, int64 in .*a\.parquet"):
        read_parquet([folder / "a.parquet", other], 4)
    pq.write_table(pa.table({"id": [1]}), other)
    with pytest.raises(ValueError, match=r"no column 'page' in .*z\.parquet; it has id"):
        read_parquet([folder / "a.parquet", other], 4)


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    for content in (b"", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"):
        path = tmp_path / "broken.parquet"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read .*broken\.parquet as Parquet"):
            read_parquet(path, 4)


def test_a_column_name_that_is_no_text_any_more_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"some_id": [1, 2]}), path, store_schema=False)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"some_id", b"some\xff\xfed"))
    with pytest.raises(ValueError, match=r"cannot read .*damaged\.parquet as Parquet.*codec can't decode"):
        read_parquet(path, 4)


def test_a_file_with_any_byte_changed_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(table(0, 20), path, row_group_size=10)
    data, random = path.read_bytes(), Random(0)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(300):
        changed = bytearray(data)
        changed[random.randrange(footer, len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        said = ""
        try:
            list(read_parquet(path, 4))
        except ValueError as error:
            said = str(error)
        assert not said or "damaged.parquet" in said or said.startswith("column "), said


def test_a_row_group_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"id": pa.array(range(10_000))}), path, row_group_size=5000, compression="zstd")
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 2000] = os.urandom(2000)
    path.write_bytes(data)
    source = read_parquet(path, 5000, use_threads=True)
    iterator = iter(source)
    assert next(iterator).batch_size == 5000
    with pytest.raises(ValueError, match=r"cannot read row group 1 of .*damaged\.parquet"):
        next(iterator)


def test_types_that_are_no_column_are_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "struct.parquet"
    pq.write_table(pa.table({"id": [1], "user": [{"age": 3}]}), path)
    with pytest.raises(ValueError, match="column 'user' is of Arrow type struct"):
        read_parquet(path, 4)
    assert ids(read_parquet(path, 4, columns=["id"])) == [1]


def test_nulls_are_errors_or_filled(tmp_path: Path) -> None:
    path = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"id": [1, None, 3], "page": [[1], None, [2]]}), path)
    with pytest.raises(ValueError, match="column 'id' has a null at row 1"):
        list(read_parquet(path, 4))
    batch = next(iter(read_parquet(path, 4, fill_value=-1)))
    assert (batch["id"].to_list(), batch["page"].to_list()) == ([1, -1, 3], [[1], [], [2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, r"rank must be in \[0, world_size\), got 2 of 2"),
        ({"batch_size": 1, "rank": -1}, r"rank must be in \[0, world_size\)"),
        ({"batch_size": 1, "world_size": 0}, r"rank must be in \[0, world_size\)"),
    ],
)
def test_arguments_are_checked(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_parquet(folder, **arguments)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_dataloader_workers_share_the_rows(folder: Path, num_workers: int) -> None:
    sources = [read_parquet(folder, 1, rank=rank, world_size=2) for rank in range(2)]
    loaders = [DataLoader(source, batch_size=None, num_workers=num_workers) for source in sources]
    assert sorted(itertools.chain(*map(ids, loaders))) == list(range(NUM_ROWS))


def test_memory_stays_near_a_batch_while_a_large_row_group_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    rows = pa.array([list(range(i, i + 1000)) for i in range(2000)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"page": rows}), path, row_group_size=1000, use_dictionary=False)  # 8 MB a row group
    del rows
    before, peak = pa.total_allocated_bytes(), 0
    for batch in read_parquet(path, 10):
        assert batch.batch_size == 10
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 4_000_000
