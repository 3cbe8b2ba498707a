"""What bench.embedding and bench.end_to_end keep of measured steps of two ranks, with bubbles of one's choice."""

from __future__ import annotations


def embedding_records(link: str, bubbles: dict[str, float]) -> list[dict[str, object]]:
    """What bench.embedding keeps of two ranks of one workload."""
    cell = {"cut": 8000, "ratio": 0.05, "num_tables": 1, "recurring": "spread"}
    same = {"link": link, "cell": cell, "launch": 0}
    table: dict[str, object] = {
        "rows": 0.05,
        "requests": 0.05,
        "occurrences": 0.05,
        "num_rows": 250_000,
        "num_requests": 280_000,
    }
    table |= {"num_occurrences": 800_000, "remote_requests": [7_000, 7_000]}
    found: list[dict[str, object]] = [
        {"kind": "workload", "rank": 0, **same, "urgent_bytes": 2 * 4 * 128 * 7_000.0, "tables": [table]}
    ]
    for name, bubble in bubbles.items():
        times: dict[str, object] = {
            "step_ms": 100 + bubble,
            "compute_ms": 100.0,
            "bubble_ms": bubble,
            "exposed_ms": bubble,
        }
        times |= {"side_ms": 0.0, "copy_ms": 0.0, "idle_ms": 0.0, "traffic": {}}
        for rank in range(2):
            timed = {"step_ms": [100 + bubble] * 3, "host_ms": [1.0], "peak_bytes": 0}
            found.append({"kind": "measurement", "contender": name, "rank": rank, **same, **timed})
            found.append({"kind": "trace", "contender": name, "rank": rank, **same, "times": times})
    return found


def step_records(bubbles: dict[str, float]) -> list[dict[str, object]]:
    """What bench.end_to_end keeps of two steps of two uneven ranks, over NVLink."""
    cell = {"cut": 8000, "batch_size": 128, "even": False}
    found: list[dict[str, object]] = []
    for rank, computing in enumerate(([100.0, 120.0], [110.0, 90.0])):
        same = {"link": "nvlink", "rank": rank, "cell": cell}
        found.append({"kind": "workload", **same, "ids_of_steps": [500_000, 520_000]})
        for name, bubble in bubbles.items():
            timed = {"step_ms": [105.0 + bubble], "losses": [1.0], "peak_bytes": 0, "waited_ms": []}
            times: dict[str, object] = {"step_ms": 105.0 + bubble, "compute_ms": 105.0, "bubble_ms": bubble}
            times |= {
                "compute_by_step": computing,
                "exposed_ms": bubble,
                "side_ms": 0.0,
                "copy_ms": 0.0,
                "idle_ms": 0.0,
                "traffic": {},
            }
            found.append({"kind": "measurement", "contender": name, **same, **timed})
            found.append({"kind": "trace", "contender": name, **same, "times": times})
    return found
