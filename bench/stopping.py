"""Ends a long measurement early, at a point where what was measured can still be written (beside the paper)."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Whether Ctrl-C was pressed or the process was told to end, while the `with` block runs.

    The first signal only sets `requested`, so that work on a GPU is left in order; the second raises
    KeyboardInterrupt. Shells start background jobs with SIGINT ignored, and `timeout` and job schedulers send SIGTERM:
    both are seen here.

    Example:
        >>> with Stopping() as stopping:
        ...     stopping.requested
        False
    """

    requested = False

    def __enter__(self) -> Stopping:
        self._before = [signal.signal(number, self._receive) for number in _SIGNALS]
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for number, before in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, before)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
