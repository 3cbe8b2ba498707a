"""What a rank brings to a step of the protocol, what is on the way in it, and what comes out (paper, Algorithm 1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...transport import Pending
from ..batches.batch import JaggedBatch
from ..report import Report
from .header import State
from .payload import Sections
from .schema import Schema

Int64s = NDArray[np.int64]


@dataclass
class LocalBatch:
    """What a rank brings to a step.

    Attributes:
        state: Whether there is a batch, or why there is none.
        schema: The columns of the batch, when there is one.
        sections: Their bytes.
        samples: What stage I tells of each sample, from `Selection.sample_words`.
        items: Values in each column. Shape [num_columns], int64.
        text: Why the rank failed.
        load_seconds: How long loading took.
    """

    state: State
    schema: Schema | None = None
    sections: Sections | None = None
    samples: Int64s = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    items: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    text: str = ""
    load_seconds: float = 0.0

    @property
    def has_samples(self) -> bool:
        """Whether there is a batch, and it is not empty. The types of an empty one may be anything."""
        return len(self.samples) > 0

    def fingerprint(self) -> int:
        """A checksum that tells this batch from most others: all heads, and the first bytes of what varies."""
        return 0 if self.sections is None else self.sections.fingerprint()


@dataclass  # not frozen, nor is `Outcome`: that would be a call a field
class Posted:
    """Messages that are on the way.

    Attributes:
        stage: "hello", "gather_lengths", "gather_candidates", "plan" or "shuffle".
        work: Whether they have arrived.
    """

    stage: str
    work: Pending


@dataclass
class Outcome:
    """How a step ended: with a batch, or, without one, with the end of the data.

    Attributes:
        columns: This rank's share, or None.
        report: About the global batch, or None.
        left: Rank that closed, if the data ended because one did.
        dropped: The global batch was smaller than the world and was dropped.
        scraps: What holds tensors of no use any more. To free one lets go of the interpreter lock,
            so whoever takes the batch frees them, for whom that is nothing, instead of the thread beside it.
    """

    columns: JaggedBatch | None = None
    report: Report | None = None
    left: int | None = None
    dropped: bool = False
    scraps: Sequence[object] = ()


@dataclass
class Clock:
    """Wall seconds of the stages of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Give the time since the last call to a stage."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
