"""The contract that every transport keeps: two operations, no reductions (paper, section 3.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .layouts import Splits


class Pending(ABC):
    """A transfer under way."""

    @abstractmethod
    def test(self) -> bool:
        """Advance the transfer without blocking; true once `wait` returns (or raises) at once.

        That is also so when a deadline has passed since the first call.
        """

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the transfer and return what arrived. May be called again, with the same result.

        For CUDA tensors the host does not wait for the data: the current stream does. What goes wrong after that is
        raised by the next call on the channel, and by `Transport.raise_if_failed`.

        Raises:
            TransportTimeout: The deadline passed; names operation, channel, sequence number, missing peers where
                known.
            SizeMismatch: A peer sent another number of rows than expected; raised on both of them.
            TransportClosed: The channel was closed, or had failed before.
            TransportError: The transfer broke.
        """


class Transport(ABC):
    """Ranks that exchange tensors.

    Every rank calls the same operations in the same order, from one thread at a time. A thread of its own takes a
    channel of its own. All sizes are known to the caller; a transport ships no shapes and no Python objects.
    Several transfers may be under way at once; they complete in any order.

    Attributes:
        rank: This process, from 0.
        world_size: Number of ranks.
        timeout_s: Deadline of every wait, in seconds.
        check_sizes: Whether ranks compare sizes before they move data. Without it a disagreement may go unnoticed, so
            turn it off only where the ranks have compared their sizes by other means. Backends for which that would not
            be safe (gloo), or saves nothing (threads), compare whatever is asked; it is always true there.
    """

    rank: int
    world_size: int
    timeout_s: float
    check_sizes: bool

    @abstractmethod
    def all_gather(self, block: Tensor, sizes: Splits | None = None, out: Tensor | None = None) -> Pending:
        """Give every rank the blocks of all ranks, one after the other along dim 0.

        Args:
            block: This rank's rows. Shape [n, ...], any dtype, in host memory or, where the backend moves it, on a GPU.
            sizes: Rows of each rank, when they differ. Length world_size; `sizes[rank] == n`.
            out: Where to put the result, to reuse memory. Shape [sum(sizes), ...], contiguous, dtype of `block`.

        Returns:
            A transfer whose `wait()` gives shape [sum(sizes), ...] ([world_size * n, ...] without sizes).

        Raises:
            ValueError: An argument breaks a rule above.
            TransportClosed: The transport was closed, or has failed.
            TransportError: Another thread is using this channel.
        """

    @abstractmethod
    def all_to_all(
        self,
        rows: Tensor,
        sent_splits: Splits,
        received_splits: Splits,
        out: Tensor | None = None,
    ) -> Pending:
        """Send consecutive pieces of `rows` to ranks 0, 1, …, and receive one piece from each.

        Neither `rows` nor `out` may be changed before the transfer is done.

        Args:
            rows: What to send, ordered by destination. Shape [sum(sent_splits), ...], any dtype, in host memory or,
                where the backend moves it, on a GPU.
            sent_splits: Rows for each rank. Length world_size.
            received_splits: Rows expected from each rank. Length world_size.
            out: Where to put the result, to reuse memory. Shape [sum(received_splits), ...], contiguous.

        Returns:
            A transfer whose `wait()` gives shape [sum(received_splits), ...], ordered by source rank.

        Raises:
            ValueError: An argument breaks a rule above.
            TransportClosed: The transport was closed, or has failed.
            TransportError: Another thread is using this channel.
        """

    @abstractmethod
    def channel(self, name: str, check_sizes: bool | None = None) -> Transport:
        """Make an independent lane between the same ranks. Collective: all ranks make the same channels in order.

        Args:
            name: Says in error messages what the lane is for. At most 64 bytes of UTF-8.
            check_sizes: Whether ranks compare sizes before they move data; None takes over this channel's choice.

        Raises:
            ValueError: The name is empty or too long.
            TransportError: Another rank makes another channel.
        """

    @abstractmethod
    def raise_if_failed(self) -> None:
        """Raise what has gone wrong, if anything, with transfers that the host does not wait for.

        Call it before what came over the channel leaves the process, in a checkpoint say. It does not wait.

        Raises:
            TransportError: A transfer failed, or the channel was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what this channel, and the channels made from it, hold.

        Local, may be called twice; later operations raise TransportClosed.
        """
