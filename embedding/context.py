"""The persistent context of one group and its autograd function: Algorithm 2 (section 3.2).

Where this differs from the algorithm's text: ids and masks have travelled before, on the host; deferred gradients leave
in the backward that made them, right behind the urgent ones, rather than in the next forward, so that nothing but rows
is under way when a step is over. The order of everything on the background lane, which exactness needs, is the same:
deferred update of i - 1, then lookup for i + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.sum_tree import sum_tree
from ..kernels.traced import traced
from ..transport import Pending, Transport, TransportError
from .device_arrays import Upload
from .errors import EmbeddingError, naming
from .lanes import Lane, Ticket
from .optimizer import Stamp
from .plan import CallIndex, Gradients, GroupPlan, Values
from .shard import Shard
from .stages import Batch


@dataclass(eq=False)
class Prepared:
    """Rows of the upcoming batch on their way.

    Attributes:
        batch: The upcoming batch, which holds its index arrays.
        plan: Its requests of the group.
        rows: Where they arrive, early ones first. Shape [u, D], float32.
        early: The transfer of the early part.
        late: The transfer of the late part; None until the backward before has begun it.
    """

    batch: Batch
    plan: GroupPlan
    rows: Tensor
    early: Ticket
    late: Ticket | None = None


@dataclass(eq=False)
class Iteration:
    """One forward of one group and its backward.

    Attributes:
        context: The group's.
        batch: The batch, which holds its index arrays.
        plan: Its requests of the group.
        rows: What the forward reads. Shape [u, D], float32; None once it is autograd's.
        upcoming: Rows of the batch after it, if that was known in forward.
        done: Whether a backward has run.
    """

    context: GroupContext
    batch: Batch
    plan: GroupPlan
    rows: Tensor | None
    upcoming: Prepared | None
    done: bool = False


class GroupContext:
    """What a group carries from iteration to iteration.

    Args:
        shard: Its weights.
        urgent: Lane of what the next forward waits for.
        background: Lane of everything else.
        wire: Dtype of rows and gradients on their way.
        stamp: Called once in each backward: what the updates of this iteration need.
    """

    def __init__(
        self, shard: Shard, urgent: Lane, background: Lane, wire: torch.dtype, stamp: Callable[[], Stamp]
    ) -> None:
        self.shard, self._urgent, self._background = shard, urgent, background
        self._wire, self._stamp = wire, stamp
        self._anchor = torch.zeros((), device=shard.weights.device, requires_grad=True)
        self._prepared: Prepared | None = None
        self._current: Iteration | None = None
        self._torn: BaseException | None = None

    def start(self, group: int, batch: Batch, upcoming: Batch | None) -> Iteration:
        """Begin an iteration: in the background, fetch what the upcoming batch reads and this one leaves alone."""
        self._refuse_torn()
        arriving, self._prepared = self._prepared, None
        if upcoming is not None:
            self._prepared = self._prepare(upcoming, upcoming.groups[group])
        plan = batch.groups[group]
        ready = arriving if arriving is not None and arriving.plan is plan else None
        rows = self.fetch_now(batch, plan) if ready is None else self._arrive(ready)
        self._current = Iteration(self, batch, plan, rows, self._prepared)
        return self._current

    def attach(self, iteration: Iteration) -> Tensor:
        """The iteration's rows as autograd knows them. Shape [u, D], float32."""
        rows: Tensor = _Rows.apply(self._anchor, iteration)  # type: ignore[no-untyped-call]  # torch's own lacks types
        return rows

    def look_up(self, iteration: Iteration) -> Tensor:
        """Rows for all ids of an iteration of one call, differentiable; in place of `attach`. Shape [ids, D]."""
        looked_up: Tensor = _LookUp.apply(self._anchor, iteration)  # type: ignore[no-untyped-call]  # torch's own lacks types
        return looked_up

    def fetch_now(self, batch: Batch, plan: GroupPlan) -> Tensor:
        """Look up all rows of a batch and have the caller wait for them. Shape [u, D], float32."""
        self._refuse_torn()
        rows = self._room(plan)
        self._background.drain()

        def fetch(transport: Transport) -> Pending:
            if plan.early is not None:
                self._fetch(transport, plan.early, rows[: plan.num_early], "early rows").wait()
            return self._fetch(transport, plan.late_values, rows[plan.num_early :], "late rows")

        self._urgent.run(fetch, rows, uploads=_made(batch.upload)).wait()
        return rows

    def refuse_gradients(self, rows: Tensor) -> Tensor:
        """Rows of an evaluation, whose gradients would be lost: a backward through them raises."""
        refusing: Tensor = _Untrained.apply(self._anchor, rows)  # type: ignore[no-untyped-call]  # torch's own lacks types
        return refusing

    def discard(self) -> None:
        """Forget rows that were fetched ahead: the weights have changed since, or will."""
        self._prepared = None

    def drain(self) -> None:
        """Have the caller wait until all updates are applied.

        Raises:
            EmbeddingError: A backward failed half way.
        """
        self._refuse_torn()
        self._background.drain()
        self._urgent.drain()

    def finish(self, iteration: Iteration, gradient: Tensor) -> None:
        """End an iteration; see `_finish`. Weights of one that fails are neither old nor new: nobody gets them."""
        self._refuse_torn()
        try:
            self._finish(iteration, gradient)
        except BaseException as error:
            self._torn = error
            raise

    def _refuse_torn(self) -> None:
        if self._torn is None:
            return
        if isinstance(self._torn, TransportError):
            raise type(self._torn)(f"a backward failed, and weights may be updated in part: {self._torn}")
        raise EmbeddingError(f"a backward failed, and weights may be updated in part: {self._torn!r}")

    def _finish(self, iteration: Iteration, gradient: Tensor) -> None:
        """Send gradients home. Rows that the next batch reads are updated first, and come back at once.

        Args:
            iteration: Where they were made.
            gradient: Of the iteration's rows. Shape [u, D], float32.
        """
        self.shard.step += 1
        stamp = self._stamp()
        in_turn = iteration is self._current and not iteration.done
        ahead = self._prepared if in_turn and self._prepared is iteration.upcoming else None
        iteration.done = True
        if ahead is None:
            # Nothing follows yet, or this backward was not expected: all rows at once, and none ahead of time.
            self.discard()
            self._finish_now(iteration, gradient, stamp)
        else:
            self._finish_ahead(iteration, gradient, stamp, ahead)

    def _finish_ahead(self, iteration: Iteration, gradient: Tensor, stamp: Stamp, ahead: Prepared) -> None:
        batch, plan = iteration.batch, iteration.plan
        urgent, deferred = plan.urgent_gradients, plan.deferred_gradients
        assert urgent is not None, "planned together with the upcoming batch"
        assert deferred is not None, "planned together with the upcoming batch"

        def update_and_fetch(transport: Transport) -> Pending:
            self._update(transport, gradient, urgent, stamp, 0, "urgent gradients")
            return self._fetch(transport, ahead.plan.late_values, ahead.rows[ahead.plan.num_early :], "late rows")

        def update(transport: Transport) -> None:
            self._update(transport, gradient, deferred, stamp, 1, "deferred gradients")

        used = _made(batch.upload, batch.successor)
        also = _made(ahead.batch.upload)
        ahead.late = self._urgent.run(update_and_fetch, gradient, ahead.rows, uploads=[*used, *also])
        self._background.run(update, gradient, uploads=used, after=ahead.late)

    def _finish_now(self, iteration: Iteration, gradient: Tensor, stamp: Stamp) -> None:
        upload = Upload(gradient.device, None)
        iteration.plan.add_all_gradients(upload)
        upload.send()
        gradients = iteration.plan.all_gradients
        assert gradients is not None, "made just now, or with the plan"
        self._background.drain()

        def update(transport: Transport) -> None:
            self._update(transport, gradient, gradients, stamp, 0, "urgent gradients")

        self._urgent.run(update, gradient, uploads=_made(iteration.batch.upload, upload)).wait()

    def _prepare(self, batch: Batch, plan: GroupPlan) -> Prepared:
        rows, early = self._room(plan), plan.early
        if early is None:  # planned at a cold start, before anything was known to come before it
            return Prepared(batch, plan, rows, _Nothing())

        def fetch(transport: Transport) -> Pending:
            return self._fetch(transport, early, rows[: plan.num_early], "early rows")

        return Prepared(batch, plan, rows, self._background.run(fetch, rows, uploads=_made(batch.upload)))

    def _arrive(self, arriving: Prepared) -> Tensor:
        """Have the caller wait for both parts of a batch. The early one was begun a whole step ago."""
        plan, rows = arriving.plan, arriving.rows
        if arriving.late is None:  # the forward before had no backward: nothing is late, nothing was sent
            self._background.drain()

            def fetch(transport: Transport) -> Pending:
                return self._fetch(transport, plan.late_values, rows[plan.num_early :], "late rows")

            arriving.late = self._urgent.run(fetch, rows, uploads=_made(arriving.batch.upload))
        arriving.early.wait()
        arriving.late.wait()
        return rows

    def _room(self, plan: GroupPlan) -> Tensor:
        weights = self.shard.weights
        return torch.empty((plan.num_rows, weights.shape[1]), dtype=torch.float32, device=weights.device)

    def _fetch(self, transport: Transport, values: Values, out: Tensor, name: str) -> Pending:
        """Serve the rows that this rank is asked for, and receive those that it asked for; `name` is for profilers."""
        rows = self.shard.lookup(values.rows).to(self._wire)
        with traced(f"freescale: {name}"):
            if rows.dtype == out.dtype:
                return transport.all_to_all(rows, values.served, values.asked, out=out)
            return _Widened(transport.all_to_all(rows, values.served, values.asked), out)

    def _update(
        self, transport: Transport, gradient: Tensor, plan: Gradients, stamp: Stamp, lane: int, name: str
    ) -> None:
        sent = gradient.index_select(0, plan.positions).to(self._wire)
        with traced(f"freescale: {name}"):
            received = transport.all_to_all(sent, plan.sent, plan.received).wait()
        self.shard.update(received, plan, stamp, lane)


class _Nothing(Ticket):
    """No job."""

    def wait(self) -> None:
        """See `Ticket.wait`."""


class _Widened(Pending):
    """Rows that travel in a narrower type than they arrive in."""

    def __init__(self, pending: Pending, out: Tensor) -> None:
        self._pending, self._out = pending, out

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._pending.test()

    def wait(self) -> Tensor:
        """See `Pending.wait`."""
        return self._out.copy_(self._pending.wait())


class _Rows(torch.autograd.Function):
    """The rows of one batch and group: one node, whatever reads them, so one backward after the last gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, iteration: Iteration) -> Tensor:
        """Hand out the rows. `anchor` is a scalar that requires a gradient, so that the rows do."""
        del anchor
        ctx.iteration = iteration
        rows, iteration.rows = iteration.rows, None
        assert rows is not None, "rows are handed out once"
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        """Update the tables. Gradient of shape [u, D]."""
        iteration: Iteration = ctx.iteration
        with naming("backward", iteration.context.shard.step):
            iteration.context.finish(iteration, gradient)
        return None, None


class _LookUp(torch.autograd.Function):
    """`_Rows` and `_Gather` in one node, where nothing else reads the rows: half of what a node takes a host."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, iteration: Iteration) -> Tensor:
        """Hand out the rows of all ids. `anchor` is as for `_Rows`."""
        del anchor
        ctx.iteration, ctx.index = iteration, iteration.plan.calls[0]
        rows, iteration.rows = iteration.rows, None
        assert rows is not None, "rows are handed out once"
        return rows.index_select(0, ctx.index.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        """Sum duplicates and update the tables. Gradient of shape [ids, D]."""
        iteration: Iteration = ctx.iteration
        with naming("backward", iteration.context.shard.step):
            iteration.context.finish(iteration, sum_tree(gradient, ctx.index.tree))
        return None, None


class _Untrained(torch.autograd.Function):
    """Rows that were looked up in eval mode with gradients enabled."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor) -> Tensor:
        """The rows, which require a gradient as `anchor` does."""
        del ctx, anchor
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        """Raise."""
        del ctx, gradient
        raise EmbeddingError(
            "the tables were in eval mode in this forward, and eval mode does not train them: call train() before it; "
            "to train other parameters only, freeze the tables with requires_grad_(False) on the module that stands "
            "for all of them"
        )


class _Gather(torch.autograd.Function):
    """Rows for ids, duplicates included; their gradients are summed in an order that is a row's own affair."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: CallIndex) -> Tensor:
        """Shape [ids, D]."""
        ctx.index = index
        return rows.index_select(0, index.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Gradients of the rows. Shape [u, D]."""
        return sum_tree(gradient, ctx.index.tree), None


def gather(rows: Tensor, index: CallIndex) -> Tensor:
    """Rows of a batch for a call's ids. Shape [ids, D], float32; differentiable."""
    looked_up: Tensor = _Gather.apply(rows, index)  # type: ignore[no-untyped-call]  # torch's own lacks types
    return looked_up


def _made(*uploads: Upload | None) -> list[Upload]:
    return [upload for upload in uploads if upload is not None]
