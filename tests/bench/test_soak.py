"""The soak runs, checks its samples, and sees what grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freescale.bench import soak


def a_rank(steps: int, **per_look: int) -> dict[str, Any]:
    """Ten looks at a rank, of whose figures some grow from look to look."""
    start = {"memory_bytes": 400 << 20, "threads": 9, "files": 30, "pinned_bytes": 0}
    looks = [
        {"step": k * steps // 9, "seconds": k}
        | {name: value + k * per_look.get(name, 0) for name, value in start.items()}
        for k in range(10)
    ]
    return {"steps": steps, "epochs": 3, "samples": 10, "looks": looks}


def test_what_grows_is_said_of_rank_and_kind() -> None:
    assert soak.growth([a_rank(100_000), a_rank(100_000, memory_bytes=1 << 20)]) == []
    assert soak.growth([a_rank(600, memory_bytes=100 << 10)]) == [], "allocators settle: too short to tell"
    leaks = soak.growth([a_rank(100_000), a_rank(100_000, memory_bytes=10 << 20, files=1)])
    assert leaks == ["memory of rank 1 by 9.0 MiB in 10,000 steps", "files of rank 1 from 35 to 39"]
    assert soak.growth([a_rank(900, threads=1)]) == ["threads of rank 0 from 14 to 18"]


@pytest.mark.multirank
def test_a_short_soak_checks_every_sample_and_writes_what_it_saw(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "found.json"), "--results", str(tmp_path)]
    assert soak.main(["--steps", "40", "--ranks", "2", "--epoch-steps", "15", "--looks", "4", *files]) == 0
    ranks = json.loads((tmp_path / "found.json").read_text())["ranks"]
    assert [one["epochs"] for one in ranks] == [3, 3]
    assert all(one["steps"] == 54 for one in ranks), "rank 1 has three batches more, and rank 0 takes part"
    assert [look["step"] for look in ranks[0]["looks"]][-1] == 54
    assert sum(one["samples"] for one in ranks) > 3 * 33
    assert "each trained on once in its epoch" in next(tmp_path.glob("*-soak.md")).read_text()
