"""`BalancerNode`: the balancer as a node of torchdata.nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from ..transport import Transport
from .iterator import BalancedIterator
from .loader import BalancedLoader, Lengths
from .partitioners.partition import greedy_batch_size
from .plan import Partitioner
from .report import Report


class BalancerNode(BaseNode[Any]):
    """Balance every global batch of a node over the ranks; arguments as in `balance`.

    Example:
        >>> from torchdata.nodes import IterableWrapper, Loader
        >>> from freescale.transport import connect
        >>> batches = [{"label": torch.tensor([0, 1]), "length": torch.tensor([3, 5])}]
        >>> node = BalancerNode(IterableWrapper(batches), connect("local"), lengths="length")
        >>> [batch["label"].tolist() for batch in Loader(node)]
        [[0, 1]]
    """

    def __init__(
        self,
        source_node: BaseNode[Any],
        transport: Transport,
        lengths: Lengths,
        partitioner: Partitioner = greedy_batch_size,
        *,
        candidates: str | None = None,
        gather: str | Sequence[str] = (),
        jagged: Mapping[str, str | tuple[str, ...]] | None = None,
        example: Any = None,
        prefetch: int = 2,
        drop_small: bool = False,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata
        self.loader: BalancedLoader[Any] = BalancedLoader(
            source_node,
            transport,
            lengths,
            partitioner,
            candidates=candidates,
            gather=gather,
            jagged=jagged,
            example=example,
            prefetch=prefetch,
            drop_small=drop_small,
            pin_memory=pin_memory,
        )
        self._iterator: BalancedIterator[Any] | None = None

    @property
    def last_report(self) -> Report | None:
        """About the batch handed out last; None before the first."""
        return self.loader.last_report

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin an epoch, or go on from a state."""
        super().reset(initial_state)
        self._iterator = None
        self.loader.close()
        self.loader.forget_loaded_state()  # of an earlier call: to go on from it was asked for once
        if initial_state is not None:
            self.loader.load_state_dict(initial_state)
        self._iterator = self.loader.start()

    def next(self) -> Any:
        """Give the next balanced batch."""
        assert self._iterator is not None
        batch, _ = next(self._iterator)
        return batch

    def get_state(self) -> dict[str, Any]:
        """What to load to go on with the first batch that was not handed out yet."""
        return self.loader.state_dict()

    def close(self) -> None:
        """Leave the running epoch, and wait until no thread is left."""
        self._iterator = None
        self.loader.close()
