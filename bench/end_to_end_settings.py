"""What the ranks of bench.end_to_end are told: which techniques, workloads and link, and until when (section 5.4)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .embedding_settings import LINKS, Sizes

ALONE = "one rank"
ALL_LINKS = (*LINKS, ALONE)
"""What there is to travel over; a rank alone has nobody to send to, and shows what pipelines cost by themselves."""

CONTENDERS: dict[str, str] = {
    "base": "TorchRec, TrainPipelineBase",
    "sdd": "TorchRec, SDD",
    "sdd_dedup": "TorchRec, SDD with use_index_dedup",
    "balanced": "TorchRec, SDD, balanced",
    "prioritized": "prioritized embeddings alone",
    "synchronous": "our tables, synchronous, balanced",
    "freescale": "prioritized and balanced",
}
"""What is compared: the baselines, each technique alone, and both."""


@dataclass(frozen=True)
class Cell:
    """One workload.

    Attributes:
        cut: Longest history, in ids.
        batch_size: Samples a rank.
        even: Nothing to gain: all histories are as long as the cut, and no table has more than a thousand rows.
    """

    cut: int
    batch_size: int
    even: bool = False

    @property
    def title(self) -> str:
        """For people."""
        nothing = ", nothing to gain" if self.even else ""
        return f"cut {self.cut:,}, {self.batch_size} samples a rank{nothing}"


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        warm_up: Steps before each measurement.
        timed: Steps timed in a row.
        rounds: How often each contender is timed, in turn with the others.
        traced: Steps under the profiler, of which three are left out; 0: none.
        ring: Different batches of a rank, given again and again.
    """

    warm_up: int
    timed: int
    rounds: int
    traced: int
    ring: int


@dataclass(frozen=True)
class Settings:
    """What one launch of the ranks does.

    Attributes:
        device: "cuda" or "cpu".
        world_size: Ranks.
        link: A name in `ALL_LINKS`.
        contenders: Names in `CONTENDERS`.
        cells: Workloads, most important first.
        sizes: Of the model; its batch size is the cells'.
        ratio: Share of the distinct rows of a global batch that are also in the next one.
        pace: See `Pace`.
        all_threads: Whether traces show the balancer's thread and others, which takes time of its own.
        until: No measurement starts after that time (of `time.time`).
    """

    device: str
    world_size: int
    link: str
    contenders: list[str]
    cells: list[Cell]
    sizes: Sizes
    ratio: float
    pace: Pace
    all_threads: bool
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
