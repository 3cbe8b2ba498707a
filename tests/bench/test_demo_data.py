"""Data of the demo: which column plays which role, and synthetic histories as the paper describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.balancer import sparsity
from freescale.bench import synthetic
from freescale.bench.roles import infer_roles
from freescale.bench.synthetic import NUM_TOPICS, lognormal_lengths, write_synthetic

# ---- columns -----------------------------------------------------------------------------------------------------


def _file(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_roles_follow_names_and_lengths(tmp_path: Path) -> None:
    columns = {
        "id": [1, 2],
        "item_history": [[1, 2], [3]],
        "watched": [[0.5, 1.5], [2.0]],
        "clicked": [[1.0, 0.0, 0.0], [0.0]],
        "shown_items": [[4, 5, 6], [7]],
        "tags": [[[1], [], [2]], [[3, 3]]],
        "others": [[1, 2, 3, 4], [5, 6]],
        "texts": [["a"], ["b"]],
    }
    roles = infer_roles(_file(tmp_path / "a.parquet", columns))
    assert (roles.uih, roles.uih_sides) == ("item_history", ("watched",))
    assert (roles.candidates, roles.label, roles.contents) == ("shown_items", "clicked", ("tags",))
    chosen = infer_roles(tmp_path / "a.parquet", uih="others")
    assert (chosen.uih, chosen.uih_sides, chosen.mean_length) == ("others", (), 3.0)


def test_without_telling_names_the_longest_list_is_the_history(tmp_path: Path) -> None:
    roles = infer_roles(_file(tmp_path / "b.parquet", {"a": [[1], [2]], "b": [[1, 2, 3], [4, 5]]}))
    assert (roles.uih, roles.candidates, roles.label) == ("b", None, None)


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"label": [0, 1]}, {}, (None, "label")),
        ({"is_click": [True, False]}, {}, (None, "is_click")),
        ({"label": [0.5, 1.0], "item": [8, 9]}, {}, ("item", "label")),
        ({"label": [1, 5]}, {}, (None, None)),  # a rating: what was taken must be said
        ({"label": [1, 5]}, {"label": "label"}, (None, "label")),
        ({"target_item": [70, 80]}, {}, (None, None)),
        ({"page": [8, 9], "seen": [0, 1]}, {"candidates": "page", "label": "seen"}, ("page", "seen")),
        ({"click": [0, 1], "label": [[0], [1]], "cands": [[8], [9]]}, {}, ("cands", "label")),
    ],
)
def test_a_label_of_one_number_a_row_is_found(
    columns: dict[str, Any], options: dict[str, str], expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    roles = infer_roles(_file(tmp_path / "d.parquet", {"hist": [[1, 2], [3, 4, 5]]} | columns), **options)
    assert (roles.candidates, roles.label) == expected


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": [1, 2]}, {}, "no column can be the history"),
        ({"a": [[1]], "b": [[1, 2]], "c": [[1]]}, {"uih": "b", "candidates": "a"}, "label must be named too"),
        ({"a": [[1]], "b": [[1, 2]]}, {"uih": "a", "label": "z"}, "label names column 'z'"),
        (
            {"h": [[1, 2, 3]], "a": [[1]], "b": [[1, 2]]},
            {"candidates": "a", "label": "b"},
            "candidates 'a' and label 'b' must have the same lengths",
        ),
        ({"a": pa.array([], pa.list_(pa.int64()))}, {}, "has no rows"),
        ({"h": [[1]], "x": [0.5], "y": [1]}, {"candidates": "x", "label": "y"}, "candidates 'x' must be integers"),
        (
            {"h": [[1]], "x": [5], "y": ["no"]},
            {"candidates": "x", "label": "y"},
            "label 'y' must be numbers, one a row",
        ),
    ],
)
def test_columns_that_cannot_play_a_role_are_named(
    columns: dict[str, Any], options: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        infer_roles(_file(tmp_path / "c.parquet", columns), **options)


# ---- synthetic data ----------------------------------------------------------------------------------------------


def test_sparsity_rises_with_the_cut_and_flattens_after_16000() -> None:
    def at(cut: int) -> float:
        lengths = lognormal_lengths(128 * 400, np.random.default_rng(0), cut=cut)
        return float(np.mean([sparsity(torch.from_numpy(batch)) for batch in lengths.reshape(-1, 128)]))

    cuts = [2000, 4000, 8000, 12000, 16000, 21000]
    curve = [at(cut) for cut in cuts]
    slopes = np.diff(curve) / np.diff(cuts)
    assert (slopes > 0).all()
    assert slopes[-1] < 0.5 * slopes[1]
    assert 0.5 < curve[-1] < 0.75


def test_scaling_lengths_keeps_their_shape() -> None:
    full = lognormal_lengths(1000, np.random.default_rng(1))
    small = lognormal_lengths(1000, np.random.default_rng(1), length_scale=1 / 16)
    np.testing.assert_array_equal(small, full_scaled := (full / 16).astype(np.int64), strict=True)
    assert full_scaled.max() == 21000 // 16


def test_the_taken_candidate_shares_the_topic_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.parquet"
    advanced: list[int] = []
    write_synthetic(path, 300, 4, seed=3, length_scale=0.01, advance=advanced.append)
    table = pq.read_table(path)
    assert advanced == [75] * 4
    assert pq.read_metadata(path).num_row_groups == 4
    same: dict[int, list[bool]] = {0: [], 1: []}
    for row in table.to_pylist():
        assert len(row["uih_page"]) == len(row["uih_time"])
        assert len(row["candidate_page"]) == len(row["candidate_editors"]) == len(row["label"])
        for page, label in zip(row["candidate_page"], row["label"], strict=True):
            same[label].append(page % NUM_TOPICS == row["user_id"] % NUM_TOPICS)
    assert np.mean(same[1]) > 0.8
    assert np.mean(same[0]) < 0.3
    again = tmp_path / "again.parquet"
    write_synthetic(again, 300, 4, seed=3, length_scale=0.01)
    assert pq.read_table(again).equals(table)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.parquet", "synthetic.parquet"]


def test_a_file_that_is_there_is_somebodys_data_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"months of clicks")
    few = ["--rows", "8", "--row-groups", "2"]
    assert synthetic.main([str(path), *few]) == 0
    assert path.read_bytes() == b"months of clicks"
    assert "is there already and stays as it is" in capsys.readouterr().out
    assert synthetic.main([str(path), *few, "--replace"]) == 0
    assert pq.read_metadata(path).num_rows == 8
