"""Normalized entropy, and the bench that shows that balancing and prioritizing leave it alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from freescale.bench import ne_parity
from freescale.bench.normalized_entropy import curve, normalized_entropy
from freescale.bench.synthetic import write_synthetic


def test_predicting_the_average_rate_is_one_and_knowing_better_is_less() -> None:
    rate = 0.2
    of_average = -(2 * math.log(rate) + 8 * math.log(1 - rate))
    assert normalized_entropy(of_average, 2, 10) == pytest.approx(1)
    assert normalized_entropy(of_average / 2, 2, 10) == pytest.approx(0.5)
    assert math.isnan(normalized_entropy(1.0, 0, 10))
    assert math.isnan(normalized_entropy(0.0, 0, 0))


def test_a_curve_counts_everything_up_to_a_step() -> None:
    losses, clicks, counts = [3.0, 1.0, 2.0], [1.0, 2.0, 0.0], [4.0, 3.0, 5.0]
    expected = [normalized_entropy(3, 1, 4), normalized_entropy(4, 3, 7), normalized_entropy(6, 3, 12)]
    assert curve(losses, clicks, counts) == pytest.approx(expected)


@pytest.mark.multirank
def test_four_ways_to_train_are_one_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_synthetic(tmp_path / "data.parquet", 96, 2, length_scale=0.004)
    arguments = ["--data", str(tmp_path / "data.parquet"), "--ranks", "2", "--batch-size", "6"]
    files = ["--json", str(tmp_path / "found.json"), "--results", str(tmp_path)]
    assert ne_parity.main([*arguments, *files]) == 0
    printed = capsys.readouterr().out
    assert "within 1e-06" in printed
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert len(runs["reference"]) == 8
    assert runs["prioritized"] == runs["reference"], "bit for bit: nothing else differs"
    assert runs["balanced"] != runs["reference"], "samples moved, and sums took another order"
    curves = ne_parity.curves(runs)
    first = curves["as loaded, synchronous"]
    assert len(set(first)) == 8, "it learns"
    assert list(tmp_path.glob("*-ne-parity.md"))
    assert list(tmp_path.glob("*-ne-parity.png"))


def test_curves_that_are_apart_are_seen() -> None:
    steps = [[3.0, 1.0, 4.0], [1.0, 2.0, 3.0]]
    other = [[3.0, 1.0, 4.0], [1.001, 2.0, 3.0]]
    table, largest = ne_parity.compare({"reference": steps, "balanced": other})
    assert largest == pytest.approx(abs(normalized_entropy(4.001, 3, 7) - normalized_entropy(4, 3, 7)))
    assert [row[-1] for row in table.rows] == ["1", "2"]


def test_a_file_without_labels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"uih": pa.array([[1, 2], [3]], pa.list_(pa.int64()))}), path)
    assert ne_parity.main(["--data", str(path)]) == 2
    assert "has no label that a click rate could be told of" in capsys.readouterr().err
