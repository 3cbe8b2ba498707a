"""What the ranks of bench.embedding are told: what to run, on which link, and until when (section 5.2)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "shared memory": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
"""What NCCL is told, so that it uses a link: it reads these variables once a process."""


@dataclass(frozen=True)
class Cell:
    """One workload.

    Attributes:
        cut: Longest history.
        ratio: Share of the distinct rows of a batch that are also in the next.
        num_tables: Tables.
        recurring: See `Workload`.
    """

    cut: int
    ratio: float
    num_tables: int = 1
    recurring: str = "spread"

    @property
    def title(self) -> str:
        """For people."""
        tables = "1 table" if self.num_tables == 1 else f"{self.num_tables} tables"
        popular = ", the popular rows recur" if self.recurring == "popular" else ""
        return f"cut {self.cut:,}, {100 * self.ratio:g} % of rows collide, {tables}{popular}"


@dataclass(frozen=True)
class Sizes:
    """Sizes that all cells share.

    Attributes:
        batch_size: Samples a rank.
        num_rows: Rows of a table.
        dim: Columns of a table.
        width: Of the dense part.
        num_layers: Of the dense part.
        median: Median length of a history before the cut.
    """

    batch_size: int
    num_rows: int
    dim: int
    width: int
    num_layers: int
    median: float


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        warm_up: Steps before each measurement.
        timed: Steps timed in a row.
        rounds: How often each contender is timed, in turn with the others.
        traced: Steps under the profiler, of which three are left out; 0: none.
        traced_ours: The same for ours in the first cell, to look for waits of the host.
        memory_steps: Steps over which memory is watched; 0: none.
    """

    warm_up: int
    timed: int
    rounds: int
    traced: int
    traced_ours: int
    memory_steps: int


@dataclass(frozen=True)
class Settings:
    """What one launch of the ranks does.

    Attributes:
        device: "cuda" or "cpu".
        world_size: Ranks.
        link: A name in `LINKS`.
        contenders: Names in `embedding_contenders.BUILDERS`.
        cells: Workloads, most important first.
        sizes: See `Sizes`.
        pace: See `Pace`.
        check: Whether to compare losses and weights first.
        until: No measurement starts after that time (of `time.time`).
    """

    device: str
    world_size: int
    link: str
    contenders: list[str]
    cells: list[Cell]
    sizes: Sizes
    pace: Pace
    check: bool
    until: float

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read from a file."""
        given = json.loads(path.read_text())
        given["cells"] = [Cell(**cell) for cell in given["cells"]]
        given["sizes"], given["pace"] = Sizes(**given["sizes"]), Pace(**given["pace"])
        return cls(**given)
