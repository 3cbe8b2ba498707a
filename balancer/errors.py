"""Everything that the balancer raises on its own account, drawn as a tree.

BalancerError
├── PeerFailed        a rank's loader, adapter, partitioner or trainer raised
├── PeerClosed        a rank stopped iterating before the data ended, and this rank asks for more
├── PlanMismatch      partitioners gave different plans on different ranks
├── SchemaMismatch    ranks hold different columns, or options that must agree differ
└── ProtocolError     a message breaks the protocol: another version, lengths that cannot be
"""

from __future__ import annotations


class BalancerError(RuntimeError):
    """A global batch could not be balanced. Raised on every rank for the same step."""


class PeerFailed(BalancerError):
    """A rank's loader, adapter, partitioner or trainer raised.

    Attributes:
        rank: The rank that failed first.
        step: Step it failed at.
        message: What it said, cut to 500 bytes.
    """

    def __init__(self, rank: int, step: int, message: str) -> None:
        super().__init__(f"rank {rank} failed at step {step}: {message}")
        self.rank, self.step, self.message = rank, step, message

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[int, int, str]]:
        return type(self), (self.rank, self.step, self.message)


class PeerClosed(BalancerError):
    """A rank stopped iterating before the data ended, and this rank asks for a step that needs it.

    Attributes:
        rank: The rank that left.
        step: First step it will not take.
    """

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(
            f"rank {rank} stopped iterating before step {step} while this rank goes on; "
            "all ranks have to leave the loop at the same step"
        )
        self.rank, self.step = rank, step

    def __reduce__(self) -> tuple[type[PeerClosed], tuple[int, int]]:
        return type(self), (self.rank, self.step)


def describe(error: BaseException) -> str:
    """Type and text of an error, also of one whose text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class PlanMismatch(BalancerError):
    """Partitioners gave different plans on different ranks; no sample was moved."""


class SchemaMismatch(BalancerError):
    """Ranks hold different columns, or options that must agree differ."""


class ProtocolError(BalancerError):
    """A message breaks the protocol: another version, or numbers that cannot be."""
