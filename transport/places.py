"""A place for a channel whose streams may wait, as soon as a closed one has given its own back (section 3.3).

A channel that is closed keeps its place until what was under way has come to its end, here and on its peers. Whoever
closes channels and makes others is to notice nothing of that.
"""

from __future__ import annotations

import math
import time

from .cuda_streams import Streams
from .errors import Unavailable

_PATIENCE_S = 3.0
_NAP_S = 0.01


def take_place(streams: Streams, timeout_s: float = math.inf) -> None:
    """See `Streams.use`. Where all places are taken, waits for seconds until one is given back.

    Peers wait for this rank until `timeout_s` is over: at half of it they are told.

    Raises:
        Unavailable: None was given back: too many streams of the process would wait.
    """
    deadline = time.monotonic() + min(_PATIENCE_S, timeout_s / 2)
    while True:
        try:
            streams.use()
            return
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(_NAP_S)
