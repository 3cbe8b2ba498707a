"""Batches with the scale of their loss, for trainers that take batches ahead, and where they stand (section 4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from .loader import BalancedLoader

T = TypeVar("T")
_MOST_AHEAD = 256  # states kept of batches that nobody has said were trained on


class LossScaled(Generic[T]):
    """Batches with the scale of their loss, anew each time it is iterated. From `BalancedLoader.with_loss_scale`.

    Trainers that take batches ahead of the model cannot ask the loader for its last report; a number beside the batch
    is what every trainer passes on. Nor can the loader know which batch was trained on last: tell it with `trained`,
    and save this `state_dict` in place of the loader's. There is no length on purpose: a rank's own number of batches
    is not the number of steps, which is that of the rank with the most, and trainers that ask would stop early on some
    ranks.

    Args:
        loader: Gives the batches. An epoch begins when its first batch is taken, not before.
        column: See `Report.loss_scale`.

    Example:
        >>> import torch
        >>> from freescale.balancer import balance
        >>> from freescale.transport import connect
        >>> batches = [{"label": torch.tensor([1.0, 0.0]), "length": torch.tensor([30, 5])}] * 4
        >>> pairs = balance(batches, connect("local"), lengths="length").with_loss_scale()
        >>> iterator = iter(pairs)
        >>> ahead = [next(iterator), next(iterator), next(iterator)]
        >>> pairs.trained()  # on the first of them
        >>> pairs.state_dict()["step"]  # so the second is next
        1
    """

    def __init__(self, loader: BalancedLoader[T], column: str | None) -> None:
        self._loader = loader
        self._column = column
        self._begin: dict[str, Any] | None = None  # before the oldest batch that is ahead
        self._ahead: deque[dict[str, Any]] = deque()  # after each batch that was handed out and not trained on yet
        self._lost = False
        self._ended = self._told = False  # the last epoch was taken to its end; `trained` was called in it

    def __iter__(self) -> Iterator[tuple[T, float]]:
        batches = self._loader.with_reports()
        begin = self._loader.running_state
        assert begin is not None
        if self._ended and self._told and self._ahead and not self._lost and not self._loader.has_loaded_state:
            self._ahead[-1] = begin  # whoever takes batches ahead over the end of an epoch trains on the last ones yet
        else:
            self._begin, self._lost = begin, False
            self._ahead.clear()
        self._ended = self._told = False
        for batch, report in batches:
            after = self._loader.running_state
            assert after is not None
            self._ahead.append(after)
            if len(self._ahead) > _MOST_AHEAD:
                self._ahead.popleft()
                self._lost = True
            yield batch, report.loss_scale(self._column)
        self._ended = True

    def trained(self) -> None:
        """Say that one more of the batches was trained on, in the order in which they came.

        Raises:
            ValueError: All batches that were handed out have been trained on already.
        """
        if not self._ahead:
            raise ValueError("trained() was called more often than batches were handed out; once a batch is right")
        self._begin, self._told = self._ahead.popleft(), True

    def state_dict(self) -> dict[str, Any]:
        """The state of the balanced loader after the batch that was trained on last: what was taken ahead comes again.

        Every rank saves its own; load it with the loader's `load_state_dict`.

        Raises:
            ValueError: `trained` was not called after each step; or the loader has no state (see its `state_dict`).
        """
        if self._loader.has_loaded_state:  # since the last batch: what was ahead then does not count any more
            return self._loader.state_dict()
        if self._lost:
            raise ValueError("call trained() after each step: which batch was trained on last is not known otherwise")
        return self._loader.state_dict(self._begin) if self._ahead else self._loader.state_dict()
