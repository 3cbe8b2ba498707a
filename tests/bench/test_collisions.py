"""The command bench.collisions: counts of a file one can count by hand, files it writes, errors a user can read."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.bench import collisions
from freescale.bench.id_source import id_source


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.parquet"
    table = pa.table(
        {
            "history": pa.array([[9, 1, 2], [3], [2, 2], [], [4], [3, 1]], pa.list_(pa.int64())),
            "item": pa.array([1, 2, 3, 4, 5, 6], pa.int32()),
            "nested": pa.array([[[1], [2, 3]], [], [[]], [[4]], [[5, 6]], [[7]]], pa.list_(pa.list_(pa.int64()))),
            "name": pa.array(list("abcdef")),
        }
    )
    pq.write_table(table, path)
    return path


def test_ids_are_read_cut_to_the_last_ones_and_joined_over_columns(data: Path) -> None:
    assert [ids.tolist() for ids in id_source(f"{data}:history").draw(0, 4, 2)] == [[1, 2], [3], [2, 2], []]
    assert [ids.tolist() for ids in id_source(f"{data}:item").draw(4, 2, 8)] == [[5], [6]]
    assert [ids.tolist() for ids in id_source(f"{data}:nested").draw(0, 5, 2)] == [[2, 3], [], [], [4], [5, 6]]
    assert [ids.tolist() for ids in id_source(f"{data}:history,item").draw(0, 1, 2)] == [[1, 2, 1]]


def test_shuffling_keeps_all_samples(data: Path) -> None:
    shuffled = [ids.tolist() for ids in id_source(f"{data}:item", seed=1).draw(0, 6, 2)]
    assert sorted(shuffled) == [[1], [2], [3], [4], [5], [6]] != shuffled


def test_collisions_of_consecutive_batches_are_counted_and_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, picture, results = tmp_path / "found.json", tmp_path / "found.png", tmp_path / "results"
    setting = ["--cuts", "2", "--batch-sizes", "1", "--ranks", "2"]
    files = ["--json", str(found), "--plot", str(picture), "--results", str(results)]
    assert collisions.main(["--ids", f"{data}:history", *setting, *files]) == 0
    # [1, 2] and [3], then [2, 2] and [], then [4] and [3, 1]
    pairs = json.loads(found.read_text())["outcomes"][0]["found"]
    assert [pair["rows"] for pair in pairs] == [pytest.approx(1 / 3), 0.0]
    assert [pair["num_rows"] for pair in pairs] == [3, 1]
    assert picture.stat().st_size > 1000
    assert "33.33" not in capsys.readouterr().out  # the mean over both pairs
    assert "16.67" in next(results.glob("*-collisions.md")).read_text()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("{}:absent", "has no column 'absent'"),
        ("{}:name", "must hold integers or lists of them, it holds string"),
        ("{}:item", "too few for two batches of 4 ranks x 128 samples"),
        ("ids.txt", "must be path.parquet:column or zipf"),
        ("zipf:rows=x", "zipf: rows must be a number, got 'x'"),
        ("zipf:length=3", "zipf has parameters"),
    ],
)
def test_mistakes_are_named(ids: str, message: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collisions.main(["--ids", ids.format(data)]) == 2
    assert message in capsys.readouterr().err


def test_ids_by_a_power_law_collide_more_in_larger_batches() -> None:
    outcomes = collisions.measure(id_source("zipf:rows=50000,median=20"), [50], [8, 64], [2], 2)
    small, large = (o for o in outcomes if o.varied == "batch size")
    assert 0 < small.mean("rows") < large.mean("rows") < large.mean("occurrences") < 1
