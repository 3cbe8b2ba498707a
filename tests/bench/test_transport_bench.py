"""What bench.transport makes of figures, and what it says without two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.bench.tables import Table, markdown
from freescale.bench.transport import _report, main
from freescale.bench.transport_ways import to_others


def contention(sequence: int, traffic: str, way: str, ms: float, slowdown: float) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "hidden": 512,
        "traffic": traffic,
        "way": way,
        "compute_ms": ms,
        "slowdown": slowdown,
        "moved_gb": 1.0,
        "rate": 100.0,
        "outlasted": way != "segment",
    }


def found() -> dict[str, Any]:
    rows = []
    for sequence in (1024, 8192):
        rows.append(contention(sequence, "none", "alone", 30.0, 0.0))
        rows.append(contention(sequence, "endless", "NCCL", 36.0, 0.2))
        rows.append(contention(sequence, "endless", "copy_engine", 30.6, 0.02))
    rows.append(contention(8192, "endless", "segment", 33.0, 0.1))
    transfers = [
        {"way": "NCCL", "size_bytes": 1 << 20, "correct": True, "latency_us": 20.0, "flight_us": 10.0, "host_us": 5.0},
        {"way": "staged", "size_bytes": 1 << 20, "correct": False},
    ]
    return {"limits": {"peer copy, all GPUs at once": 400.0}, "transfers": transfers, "contention": rows}


def test_a_report_compares_the_same_workloads_and_times_no_wrong_output() -> None:
    parts = _report(found())
    text = "\n".join(markdown(part) if isinstance(part, Table) else part for part in parts)
    assert "| NCCL | 1,048,576 | 20.0 | 10.0 | 104.9 | 26% | 5 |" in text
    assert "| staged | 1,048,576 | wrong output, not timed |" in text
    assert "| 1024, 512 | 30.0 | 20.0% (100) | 2.0% (100) | - |" in text
    assert "10.0% (100, ended early)" in text
    assert "endless: copy_engine adds 0.10 of the time that NCCL adds." in text
    assert "endless: segment adds 0.50 of the time that NCCL adds." in text, "compared on the one workload both ran"


def test_a_rank_sends_to_the_others_alone() -> None:
    assert to_others(1, 3, 20) == [10, 0, 10]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_without_two_gpus_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs two GPUs of one host, found" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from freescale.bench.transport_plot import draw

    draw(found()["contention"], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
