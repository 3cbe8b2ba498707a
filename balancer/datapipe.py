"""`.balance(…)` on any IterDataPipe: the balancer as a DataPipe stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterDataPipe, functional_datapipe

from ..transport import Transport
from .loader import BalancedLoader, Lengths
from .partitioners.partition import greedy_batch_size
from .plan import Partitioner
from .report import Report


@functional_datapipe("balance")
class BalancerIterDataPipe(IterDataPipe[Any]):
    """Balance every global batch of a DataPipe over the ranks; arguments as in `balance`.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> import freescale.balancer
        >>> from freescale.transport import connect
        >>> batches = [{"label": torch.tensor([0, 1]), "length": torch.tensor([3, 5])}]
        >>> pipe = IterableWrapper(batches).balance(connect("local"), lengths="length")
        >>> [batch["label"].tolist() for batch in pipe]
        [[0, 1]]
    """

    def __init__(
        self,
        source_datapipe: Any,
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
        self.loader: BalancedLoader[Any] = BalancedLoader(
            source_datapipe,
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

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def with_reports(self) -> Iterator[tuple[Any, Report]]:
        """Iterate over (batch, report) pairs."""
        return self.loader.with_reports()

    def state_dict(self) -> dict[str, Any]:
        """What to load to go on with the first batch that was not handed out yet."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration."""
        self.loader.load_state_dict(state)
