"""A rank's rows of a group of tables, and their updates (section 3.2).

Weights are plain tensors, neither parameters nor buffers: DistributedDataParallel overwrites both with those of rank 0.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..kernels.sum_tree import sum_tree
from .forms import Layout
from .optimizer import Optimizer, Stamp
from .plan import Gradients
from .tables import Table

_random_numbers = threading.Lock()
_INIT_ROWS = 1 << 14  # drawn at a time, from a generator of their own: what is drawn does not depend on world size


class Shard:
    """Weights and optimizer state of one group on this rank.

    Args:
        layout: The group's row space.
        optimizer: How rows are updated.
        device: Where they lie.

    Attributes:
        weights: Shape [local_rows, D], the tables' dtype.
        states: The optimizer's, by name. Shapes [local_rows] or [local_rows, D], float32.
        step: Iterations so far.
    """

    def __init__(self, layout: Layout, optimizer: Optimizer, device: torch.device) -> None:
        self.layout, self.optimizer, self.step = layout, optimizer, 0
        columns, dtype = layout.tables[0].embedding_dim, layout.tables[0].dtype
        self.weights = torch.zeros((layout.local_rows, columns), dtype=dtype, device=device)
        self.states: dict[str, Tensor] = {}
        for name in optimizer.states:
            width = optimizer.width(name, columns)
            shape = (layout.local_rows, width) if width else (layout.local_rows,)
            self.states[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        # Two, since urgent and deferred updates may run at once.
        self.skipped = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]

    def initialise(self, seed: int) -> None:
        """Draw the weights; the same table whatever the number of ranks."""
        for t, table in enumerate(self.layout.tables):
            start, first, rows = self.layout.place(t)
            while rows > 0:
                begin = first // _INIT_ROWS * _INIT_ROWS
                drawn = _draw(table, seed, begin, self.weights.device)[first - begin :][:rows]
                self.weights[start : start + len(drawn)] = drawn
                start, first, rows = start + len(drawn), first + len(drawn), rows - len(drawn)

    def of_table(self, table: int, tensor: Tensor) -> Tensor:
        """The part of weights or of a state that belongs to a table; shares memory."""
        start, _, rows = self.layout.place(table)
        return tensor[start : start + rows]

    def move(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply what `Module.to` and its like apply; state stays float32."""
        self.weights = function(self.weights)
        self.states = {name: state.to(self.weights.device) for name, state in self.states.items()}
        self.skipped = [count.to(self.weights.device) for count in self.skipped]

    def lookup(self, rows: Tensor) -> Tensor:
        """Read rows. Shape [n, D], the tables' dtype."""
        return self.weights.index_select(0, rows)

    def update(self, gradients: Tensor, plan: Gradients, stamp: Stamp, lane: int) -> None:
        """Add up what the ranks sent for each row, and apply it.

        Args:
            gradients: Ordered by sender. Shape [plan.received.sum(), D], float32 or what the wire carries.
            plan: Which rows they belong to.
            stamp: The iteration they belong to.
            lane: 0 or 1: which counter of skipped rows to use.
        """
        if len(plan.rows) == 0:
            return
        sums = sum_tree(gradients.float(), plan.tree)
        if self.weights.is_cuda:
            self._update_on_device(sums, plan.rows, stamp, lane)
            return
        if stamp.divisor != 1:
            sums = sums / stamp.divisor
        if isinstance(stamp.scale, Tensor) or stamp.scale != 1:
            sums = sums / stamp.scale
        before = [self.weights.index_select(0, plan.rows).float()]
        before += [state.index_select(0, plan.rows) for state in self.states.values()]
        after = self.optimizer.apply(before[0], sums, before[1:], stamp)
        finite = sums.isfinite().all(dim=1)
        self.skipped[lane] += (~finite).sum()
        for target, old, new in zip([self.weights, *self.states.values()], before, after, strict=True):
            kept = torch.where(finite.view(-1, *[1] * (new.dim() - 1)), new, old)
            target.index_copy_(0, plan.rows, kept.to(target.dtype))

    def _update_on_device(self, sums: Tensor, rows: Tensor, stamp: Stamp, lane: int) -> None:
        from ..kernels.update_rows import update_rows

        scale, factor = None, 1.0
        if isinstance(stamp.scale, Tensor):
            scale = stamp.scale.to(self.weights.device, torch.float32, non_blocking=True)
        else:
            factor = stamp.scale
        numbers = [float(stamp.divisor), factor, *self.optimizer.numbers(stamp)]
        states, skipped = list(self.states.values()), self.skipped[lane]
        update_rows(self.weights, sums, rows, states, numbers, scale, skipped, self.optimizer.rule)


def _draw(table: Table, seed: int, begin: int, device: torch.device) -> Tensor:
    """Rows `begin` to `begin + _INIT_ROWS` of a table, as far as it has them."""
    rows = min(_INIT_ROWS, table.num_embeddings - begin)
    drawn = torch.empty((rows, table.embedding_dim), dtype=torch.float32, device=device)
    digest = hashlib.sha256(f"{seed}/{table.name}/{begin}".encode()).digest()
    number = int.from_bytes(digest[:7])
    if table.init_fn is None:
        generator = torch.Generator(device).manual_seed(number)
        bound = table.num_embeddings**-0.5
        return drawn.uniform_(-bound, bound, generator=generator)
    with torch.no_grad(), _own_random_numbers(number, device):
        table.init_fn(drawn)
    return drawn


@contextmanager
def _own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators for a user's function, and put them back after it; ranks may be threads."""
    devices = [device] if device.type == "cuda" else []
    with _random_numbers, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
