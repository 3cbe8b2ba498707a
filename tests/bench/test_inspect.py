"""The command bench.inspect: what a new user sees of their own data, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.balancer import sparsity, straggler_percentage
from freescale.bench import inspect
from freescale.bench.histories import Histories, read_histories
from freescale.bench.id_source import id_source
from freescale.bench.inspection import inspect_histories
from freescale.bench.lengths import length_source


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "data.parquet"
    struct = pa.struct({"id": pa.int64(), "time": pa.float32()})
    events = [[{"id": 7, "time": 0.5}, {"id": 8, "time": 1.0}], [], [{"id": 7, "time": 2.0}], None]
    columns = {
        "uih": pa.array([[1, 2], [], [3], [4, 5, 6]], pa.list_(pa.int32())),
        "large": pa.array([[1, 2], [], [3], [4, 5, 6]], pa.large_list(pa.uint64())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int64(), 2)),
        "nested": pa.array([[[1, 2], []], [], [[3], None], None], pa.list_(pa.list_(pa.int64()))),
        "words": pa.array([["a", "b"], ["a"], [], ["c"]], pa.list_(pa.string())),
        "scores": pa.array([[0.5], [], [1.0, 2.0], []], pa.list_(pa.float32())),
        "events": pa.array(events, pa.list_(struct)),
        "user": pa.array(
            [{"history": [5, 6]}, {"history": [5]}, None, {"history": []}], pa.struct({"history": pa.list_(pa.int64())})
        ),
        "dotted.name": pa.array([[1], [2], [3], [4, 4]]),
        "text": pa.array(["ab", "", "é", "x"]),
        "length": pa.array([7, 8, 9, 1]),
        "real": pa.array([0.5, 1.0, 2.0, 3.0]),
        "negative": pa.array([1, -2, 3, 4]),
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    ("column", "lengths", "ids"),
    [
        ("uih", [2, 0, 1, 3], [1, 2, 3, 4, 5, 6]),
        ("large", [2, 0, 1, 3], [1, 2, 3, 4, 5, 6]),
        ("fixed", [2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7, 8]),
        ("nested", [2, 0, 1, 0], [1, 2, 3]),
        ("words", [2, 1, 0, 1], [0, 1, 0, 2]),
        ("scores", [1, 0, 2, 0], []),
        ("events.id", [2, 0, 1, 0], [7, 8, 7]),
        ("user.history", [2, 1, 0, 0], [5, 6, 5]),
        ("dotted.name", [1, 1, 1, 2], [1, 2, 3, 4, 4]),
        ("text", [2, 0, 2, 1], []),
        ("length", [7, 8, 9, 1], []),
    ],
)
def test_histories_are_read_from_any_nesting(parquet: Path, column: str, lengths: list[int], ids: list[int]) -> None:
    found = read_histories(f"{parquet}:{column}", 100, 100)
    assert found.lengths.tolist() == lengths
    assert found.ids.tolist() == ids
    assert found.num_rows_with_ids == (4 if ids else 0)


def test_colons_in_names_of_files_and_columns_stay_there(parquet: Path, tmp_path: Path) -> None:
    table = pa.table({"ns:uih": [[1, 2], [3]], "uih": [[1], [2]]})
    pq.write_table(table, tmp_path / "10:30.parquet")
    for source in (f"{tmp_path}/10:30.parquet:ns:uih", f"{tmp_path}/10:*.parquet:ns:uih"):
        assert read_histories(source, 9, 9).lengths.tolist() == [2, 1]
    assert length_source(f"{tmp_path}/10:30.parquet:ns:uih").draw(2, 1, 0)[0].sum() == 3
    assert [len(ids) for ids in id_source(f"{tmp_path}/10:30.parquet:ns:uih").draw(0, 2, 9)] == [2, 1]
    assert read_histories(f"{tmp_path}/10:30.parquet", 9, 9).remarks[0].startswith("No column was named; ")
    with pytest.raises(ValueError, match=r"no file 's3://bucket/data.parquet'"):
        read_histories("s3://bucket/data.parquet:uih", 9, 9)


def test_several_files_are_read_one_after_the_other(parquet: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"uih": [[9] * 5]}), tmp_path / "more.parquet")
    more = str(tmp_path / "more.parquet")
    for sources in ([more, f"{parquet}:uih"], [f"{more}:uih", f"{parquet}:uih"]):
        found = read_histories(sources, 9, 99)
        assert found.lengths.tolist() == [5, 2, 0, 1, 3]
        assert found.title == "more.parquet and 1 more, column uih"
    with pytest.raises(ValueError, match="one column is read of all files, got 'uih' and 'nested'"):
        read_histories([f"{more}:uih", f"{parquet}:nested"], 9, 9)
    with pytest.raises(ValueError, match=r"no file 'missing\.parquet'"):
        read_histories([more, "missing.parquet:uih"], 9, 9)


def test_ids_of_several_files_may_be_of_other_widths_or_kinds_of_text(tmp_path: Path) -> None:
    text = [["b", "a"], ["a"]]
    for name, kind, values in (
        ("narrow", pa.int32(), [[1, 2], [3]]),
        ("wide", pa.uint64(), [[1], [3]]),
        ("text", pa.string(), text),
        ("coded", pa.dictionary(pa.int8(), pa.string()), text),
    ):
        pq.write_table(pa.table({"h": pa.array(values, pa.list_(kind))}), tmp_path / f"{name}.parquet")
    files = {name: f"{tmp_path}/{name}.parquet:h" for name in ("narrow", "wide", "text", "coded")}
    assert read_histories([files["narrow"], files["wide"]], 9, 9).ids.tolist() == [1, 2, 3, 1, 3]
    assert read_histories([files["text"], files["coded"]], 9, 9).ids.tolist() == [0, 1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="ids have to be all text or all integers, files have int32 and string"):
        read_histories([files["narrow"], files["text"]], 9, 9)


def test_nulls_and_columns_without_ids_are_remarked(parquet: Path) -> None:
    assert "2 nulls are taken for empty lists." in read_histories(f"{parquet}:nested", 100, 100).remarks
    assert "hold no ids" in read_histories(f"{parquet}:scores", 100, 100).remarks[0]
    assert "bytes of text" in read_histories(f"{parquet}:text", 100, 100).remarks[0]


@pytest.mark.parametrize("name", ["id", "user_id", "itemIds", "bid", "n_paid"])
def test_a_column_of_ids_is_not_taken_for_lengths(name: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({name: [7, 9]}), tmp_path / "d.parquet")
    if name in ("id", "user_id"):
        with pytest.raises(ValueError, match=f"column '{name}' holds one number a row, by its name an id"):
            read_histories(f"{tmp_path}/d.parquet:{name}", 9, 9)
    else:  # said in a remark alone
        assert "taken for lengths" in read_histories(f"{tmp_path}/d.parquet:{name}", 9, 9).remarks[0]


def test_only_as_many_rows_and_ids_are_kept_as_asked_for(parquet: Path) -> None:
    found = read_histories(f"{parquet}:uih", 3, 2)
    assert found.lengths.tolist() == [2, 0, 1]
    assert (found.ids.tolist(), found.num_rows_with_ids) == ([1, 2], 2)


def test_many_files_are_read_in_the_order_of_their_names(parquet: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"uih": pa.array([[9]], pa.list_(pa.int32()))}), tmp_path / "more.parquet")
    for source in (tmp_path, tmp_path / "*.parquet"):
        found = read_histories(f"{source}:uih", 100, 100)
        assert found.ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
        assert "and 1 more" in found.title


def test_ids_of_rows_are_their_last_items_where_histories_are_cut() -> None:
    histories = Histories("", np.array([2, 0, 1, 3]), np.array([1, 2, 3, 4, 5, 6]), 4)
    assert histories.ids_of(np.array([3, 1, 0])).tolist() == [4, 5, 6, 1, 2]
    assert histories.ids_of(np.array([3, 0, 2]), max_length=1).tolist() == [6, 2, 3]
    assert histories.ids_of(np.array([], dtype=np.int64)).tolist() == []


def test_a_finding_is_what_a_loop_by_hand_finds() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 20, 24)
    ids = random.integers(0, 60, lengths.sum())
    found = inspect_histories(Histories("", lengths, ids, 24), world_size=3, batch_size=4)
    rows = [[lengths[g * 12 + r : (g + 1) * 12 : 3] for r in range(3)] for g in range(2)]
    assert found.batches == 2
    assert found.sparsity == pytest.approx(np.mean([sparsity(torch.tensor(b)) for g in rows for b in g]))
    loads = torch.tensor([[float(b.sum()) for b in g] for g in rows])
    assert found.waiting == pytest.approx(straggler_percentage(loads))
    assert found.waiting_balanced < found.waiting
    ends = lengths.cumsum()
    asked = [
        [set(np.concatenate([ids[ends[i] - lengths[i] : ends[i]] for i in range(g * 12 + r, (g + 1) * 12, 3)]).tolist())
         for r in range(3)]
        for g in range(2)
    ]  # fmt: skip
    later = set.union(*asked[1])
    assert found.rows_per_rank == pytest.approx(sum(len(rows) for batch in asked for rows in batch) / 6)
    assert found.collisions == pytest.approx(100 * sum(len(a & later) for a in asked[0]) / sum(map(len, asked[0])))


def test_a_length_squared_model_gains_more_than_a_linear_one() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 4096), 2000).astype(np.int64)
    found = inspect_histories(Histories("", lengths, np.zeros(0, np.int64)), world_size=16, batch_size=32)
    assert 1 < found.speedup < found.speedup_squared
    assert found.speedup == pytest.approx((100 - found.waiting_balanced) / (100 - found.waiting))
    assert found.collisions is None


def test_the_command_shows_a_table_and_explains_it(
    parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--world-size", "2", "8", "--batch-size", "1", "--json", str(found), "--plot", str(picture)]
    assert inspect.main([f"{parquet}:uih", *options]) == 0
    said = capsys.readouterr().out
    for words in ("waiting:", "padding:", "collisions:", "median 2", "rows were drawn at random"):
        assert words in said
    findings = json.loads(found.read_text())["findings"]
    assert [f["world_size"] for f in findings] == [2, 8]
    assert [f["repeated"] for f in findings] == [False, True]
    assert findings[0]["collisions"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_column_the_history_is_guessed_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"user": [1, 2], "uih_page": [[1, 2], [3]]}), tmp_path / "data.parquet")
    assert inspect.main([str(tmp_path / "data.parquet"), "--world-size", "2", "--batch-size", "1"]) == 0
    assert "No column was named; 'uih_page' looks like the history." in capsys.readouterr().out


def test_little_to_gain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"uih": [[i] for i in range(16)]}), tmp_path / "even.parquet")
    assert inspect.main([f"{tmp_path}/even.parquet:uih", "--world-size", "2", "--batch-size", "4"]) == 0
    said = capsys.readouterr().out
    assert "balancing would bring little" in said
    assert "At most 0.0 % of the rows" in said


def test_rows_that_recur_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"uih": [[1] * (1 + i % 5) for i in range(16)]}), tmp_path / "hot.parquet")
    assert inspect.main([f"{tmp_path}/hot.parquet:uih", "--world-size", "2", "--batch-size", "4"]) == 0
    assert "Most rows recur" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (":nope", "has no column 'nope'; it has uih (list<element: int32>)"),
        (":events", "fields, of which one must be named: id, time"),
        (":events.x", "has no field 'x': id, time"),
        (":uih.x", "has no field 'x': it holds int32 there"),
        (":real", "must hold lists, text or integer lengths, it holds double"),
        (":negative", "lengths must not be negative, got -2"),
    ],
)
def test_bad_columns_are_errors_that_say_what_there_is(
    parquet: Path, column: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect.main([f"{parquet}{column}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_bad_files_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet at all")
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"uih": pa.array([], pa.list_(pa.int64()))}), tmp_path / "none.parquet")
    expected = {
        f"{broken}:uih": "cannot read",
        str(broken): "cannot read",
        f"{tmp_path}/missing.parquet:uih": "no file",
        f"{tmp_path}/empty:uih": "has no file that ends with .parquet",
        f"{tmp_path}/none.parquet:uih": "there are no rows",
    }
    for source, message in expected.items():
        assert inspect.main([source]) == 2
        assert message in capsys.readouterr().err, source


def test_the_command_runs_alone(parquet: Path) -> None:
    command = [sys.executable, "-m", "freescale.bench.inspect", f"{parquet}:uih", "--world-size", "2"]
    done = subprocess.run([*command, "--batch-size", "1"], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
