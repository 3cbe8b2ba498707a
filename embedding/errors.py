"""What embeddings raise besides errors of the transport (section 3.2)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ..transport import TransportError


class EmbeddingError(RuntimeError):
    """Lookups, prefetches or backwards came in an order that cannot be served."""


class IdOutOfRange(IndexError):
    """A table was asked for a row that it does not have. Raised on every rank, naming table, feature and value.

    Args:
        rank: Whose batch has the id.
        table: Name of the table.
        num_embeddings: Its rows.
        feature: Name of the feature.
        place: Where among the feature's ids.
        value: The id.
    """

    def __init__(self, rank: int, table: str, num_embeddings: int, feature: str, place: int, value: int) -> None:
        self._fields = rank, table, num_embeddings, feature, place, value
        self._range = f"must be from 0 to {num_embeddings - 1}, the rows of table '{table}'"
        self._found = f"got {value} at place {place} on rank {rank}"
        super().__init__(f"ids of feature '{feature}' {self._range}: {self._found}")

    def __reduce__(self) -> Any:
        return type(self), self._fields, {**vars(self), "args": self.args}

    def within(self, module: str) -> IdOutOfRange:
        """The same of a lookup that a module was called for, whatever feature it was."""
        told = IdOutOfRange(*self._fields)
        told.__dict__.update(vars(self))  # notes, too
        told.args = (f"ids that '{module}' looks up {self._range}: {self._found}",)
        return told


class SettingsDiffer(EmbeddingError):
    """Ranks made their tables with different settings. Raised on every rank at its first batch.

    Args:
        name: Of the setting.
        value: What this rank has.
        rank: This rank.
        other: One that has something else.
    """

    def __init__(self, name: str, value: str, rank: int, other: int) -> None:
        super().__init__(
            f"{name} must be the same on all ranks: rank {rank} has {value}, rank {other} something else; "
            "every rank makes its tables with the same arguments"
        )


class OutOfStep(EmbeddingError):
    """Ranks call prefetch and forward in different orders."""


class naming:  # noqa: N801  # reads as a statement: `with naming("forward", step):`
    """Have errors say what the trainer was at, and in which step since the tables were made.

    Those of the transport say it first; a note does for those whose text is about something else.

    Args:
        stage: What the trainer is at.
        step: Number of the step.
    """

    __slots__ = ("_stage", "_step")

    def __init__(self, stage: str, step: int) -> None:
        self._stage, self._step = stage, step

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, EmbeddingError | IdOutOfRange):
            note = f"the trainer was at embedding {self._stage}, step {self._step}"
            if note not in getattr(error, "__notes__", ()):  # several batches may have one error
                error.add_note(note)
        elif isinstance(error, TransportError):
            raise type(error)(f"embedding {self._stage}, step {self._step}: {error}") from error
