"""A gather of messages that are equally long in each step, from and into the same memory (paper, Algorithm 1)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...transport import Pending, Transport


class Gather:
    """Gives all ranks the message of each, again and again: transports lay out only once what stays where it is.

    Args:
        transport: Moves the messages.
        num_words: Length of a rank's message.

    Attributes:
        message: What this rank says; to be written while nothing is on the way. Shape [num_words], int64.
        gathered: What all said, once it has arrived. Shape [world_size, num_words], int64.
    """

    def __init__(self, transport: Transport, num_words: int) -> None:
        self._transport = transport
        self.message: NDArray[np.int64] = np.zeros(num_words, np.int64)
        self._block = torch.from_numpy(self.message)
        self._out = torch.empty(transport.world_size * num_words, dtype=torch.int64, device="cpu")
        self.gathered: NDArray[np.int64] = self._out.numpy().reshape(-1, num_words)

    def post(self) -> Pending:
        """Put the message on its way. What is gathered is overwritten."""
        return self._transport.all_gather(self._block, out=self._out)
