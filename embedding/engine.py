"""Groups, lanes and the queue of upcoming batches behind every module of one collection (section 3.2)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..transport import Transport
from .checkpointing import refuse_checkpointing
from .context import GroupContext, Iteration, gather
from .departure import leave_at_exit
from .errors import EmbeddingError, naming
from .forms import Layout
from .grouping import Place, group_tables, lay_out_slots
from .host_ids import HostIds, same_ids
from .lanes import LAST_PATIENCE_S, open_lanes
from .late_check import LateCheck
from .optimizer import FusedOptimizer, GradScale, Optimizer, Stamp
from .planner import Planner
from .scaling import read_scale
from .settings import describe_settings
from .shard import Shard
from .stages import Batch
from .tables import Table

MAX_AHEAD = 16


@dataclass(eq=False)
class Running:
    """A forward under way.

    Attributes:
        batch: Its batch, as planned.
        given: The ids that it was given.
        iterations: One a group.
        rows: What autograd knows of each group's rows. Shapes [u, D], float32.
    """

    batch: Batch
    given: HostIds
    iterations: list[Iteration]
    rows: list[Tensor]


class Engine:
    """Looks rows up for lists of ids, and updates them.

    Every rank makes it with the same arguments, and calls it in the same order, from one thread.

    Args:
        tables: All tables.
        calls: What is looked up at once, in every batch: for each call, pairs of feature and table name.
        transport: The ranks. Takes three channels of it: ids (host memory), urgent and background (where the tables
            are), unless there are others for these two.
        optimizer: Of all tables, or by table name.
        device: Where the tables are.
        synchronous: Everything is urgent: rows are looked up in forward and updated in backward.
        urgent: Transport of what the next forward waits for.
        background: Transport of all other rows and gradients.
        wire_dtype: Of rows and gradients on their way; None: that of the tables.
        gradient_division: Whether gradients are averaged over ranks, not added.
        grad_scale: What the loss is multiplied with.
        seed: Of the weights; None leaves them zero.
        process_group: The ranks, for DTensors; None: the default group where it has the same ranks.

    Attributes:
        current: The forward under way.
        frozen: Lookups are evaluations that take no gradient, whatever the mode.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        calls: Sequence[Sequence[tuple[str, str]]],
        transport: Transport,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        device: torch.device,
        synchronous: bool,
        urgent: Transport | None,
        background: Transport | None,
        wire_dtype: torch.dtype | None,
        gradient_division: bool,
        grad_scale: GradScale | torch.amp.GradScaler | None,
        seed: int | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.rank, self.world_size, self.device = transport.rank, transport.world_size, device
        self.synchronous = synchronous
        self._divisor = self.world_size if gradient_division else 1
        self._grad_scale = grad_scale
        self.groups = group_tables(tables, optimizer)
        compared = {"synchronous": synchronous, "wire_dtype": wire_dtype, "gradient_division": gradient_division}
        self._settings = describe_settings(self.groups, calls, compared)
        layouts = [Layout(members, self.rank, self.world_size) for members, _ in self.groups]
        self.shards = [Shard(layout, rule, device) for layout, (_, rule) in zip(layouts, self.groups, strict=True)]
        self.table_of = {
            table.name: (g, t) for g, (members, _) in enumerate(self.groups) for t, table in enumerate(members)
        }
        self.calls = [[Place(feature, *self.table_of[table]) for feature, table in call] for call in calls]
        self._slots, self._indices = lay_out_slots(self.calls)
        self._first_slots = list(accumulate(map(len, self.calls), initial=0))
        if seed is not None:
            for shard in self.shards:
                shard.initialise(seed)
        self._process_group = process_group
        self._meshes: dict[str, DeviceMesh] = {}
        settings = [self._param_group(shard) for shard in self.shards]
        self.optimizer = FusedOptimizer(settings, self)
        # The id plane has told every rank how many rows come: no need to compare sizes again, which waits on the host.
        self._ids_channel = transport.channel("embedding ids")
        self._urgent_channel = (urgent or transport).channel("embedding urgent", check_sizes=False)
        self._background_channel = (background or transport).channel("embedding background", check_sizes=False)
        self._wire_dtype = wire_dtype
        self._planner: Planner | None = None
        self._late_check: LateCheck | None = None
        self._contexts: list[GroupContext] = []
        self._queue: deque[Batch] = deque()
        self._running = False
        self.frozen = False
        self._closed = False
        self.current: Running | None = None

    # ---- what a training step does

    def prefetch(self, ids: Sequence[Tensor]) -> None:
        """Plan the upcoming batch in the background.

        Args:
            ids: One tensor a feature of each call, in the order of `calls`.

        Raises:
            EmbeddingError: More batches were prefetched than forwards will take.
        """
        planner = self._open()
        with naming("prefetch", self.shards[0].step):
            planner.check()
        if len(self._queue) == MAX_AHEAD:
            raise EmbeddingError(f"prefetch was called for {MAX_AHEAD} batches that no forward has taken")
        self._queue.append(planner.prefetch(HostIds(ids)))

    def start(self, ids: Sequence[Tensor]) -> Running:
        """Begin the iteration of a batch, which then is `current`."""
        given = HostIds(ids)
        batch, iterations = self._begin(given)
        rows = [context.attach(each) for context, each in zip(self._contexts, iterations, strict=True)]
        self.current = Running(batch, given, iterations, rows)
        return self.current

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """`start` and `lookup` of all that a batch of one call looks up, at once. Shapes [ids, D], float32."""
        assert len(self.calls) == 1, "what other calls look up would need rows of its own"
        batch, iterations = self._begin(HostIds(ids))
        found = [context.look_up(each) for context, each in zip(self._contexts, iterations, strict=True)]
        return self._share_out(batch, found, 0)

    def _begin(self, given: HostIds) -> tuple[Batch, list[Iteration]]:
        """Begin the iteration of a batch; what the caller looks up is there for its stream."""
        refuse_checkpointing()
        with naming("forward", self.shards[0].step):
            planner = self._open()
            planner.check()
            batch = self._take(planner, given)
            planner.wait(batch)
            if self._late_check is not None:
                self._late_check.look()
                self._late_check.add(given, batch.ids)
            upcoming = self._queue[0] if self._queue and not self.synchronous else None
            if upcoming is not None:
                planner.wait(upcoming)
            iterations = [context.start(g, batch, upcoming) for g, context in enumerate(self._contexts)]
            _use(batch)
        return batch, iterations

    def lookup(self, running: Running, call: int) -> list[Tensor]:
        """Rows of a call's features, differentiable. Shapes [ids, D], float32."""
        return self._gather_call(running.batch, running.rows, call)

    def evaluate(self, ids: Sequence[Tensor], calls: Sequence[int]) -> list[list[Tensor]]:
        """Rows of some calls' features, after all updates, leaving no trace; a backward through them raises.

        Args:
            ids: As for `prefetch`; features of other calls should have none.
            calls: Which calls.
        """
        planner = self._open()
        with naming("evaluation", self.shards[0].step):
            batch = planner.evaluate(HostIds(ids))
            planner.wait(batch)
            rows = [context.fetch_now(batch, plan) for context, plan in zip(self._contexts, batch.groups, strict=True)]
        _use(batch)
        if torch.is_grad_enabled() and not self.frozen:
            rows = [context.refuse_gradients(each) for context, each in zip(self._contexts, rows, strict=True)]
        return [self._gather_call(batch, rows, call) for call in calls]

    def only(self, call: int, ids: Sequence[Tensor]) -> list[Tensor]:
        """Ids of one call, and none for all others, as `evaluate` takes them."""
        first = self._first_slots[call]
        nothing = [torch.empty(0, dtype=torch.int64) for _ in self._slots]
        return [*nothing[:first], *ids, *nothing[first + len(ids) :]]

    def sizes_of(self, running: Running, call: int) -> list[int]:
        """How many ids each feature of a call has in a batch."""
        first = self._first_slots[call]
        return running.batch.ids.sizes[first : first + len(self.calls[call])]

    def find_call(self, running: Running, calls: Sequence[int], ids: Sequence[Tensor]) -> int | None:
        """Which of some calls looks these ids up: the columns themselves, or equal ids.

        On a GPU ids cannot be compared without waiting: the first call of the same sizes is taken, and checked later.
        """
        sizes = [each.numel() for each in ids]
        flat = [each.reshape(-1) for each in ids]
        fitting = [call for call in calls if self.sizes_of(running, call) == sizes]
        for call in fitting:
            columns = running.given.tensors[self._first_slots[call] :]
            if all(one.data_ptr() == other.data_ptr() for one, other in zip(flat, columns, strict=False)):
                return call
        for call in fitting:
            planned = running.batch.ids.tensors[self._first_slots[call] :]
            pairs = list(zip(flat, planned, strict=False))
            if all(one.is_cuda or other.is_cuda or same_ids(one, other) for one, other in pairs):
                if self._late_check is not None:
                    self._late_check.add(HostIds(self.only(call, ids)), running.batch.ids)
                return call
        return None

    def dtype_of(self, table: str) -> torch.dtype:
        """Of a table's weights."""
        return self.shards[self.table_of[table][0]].weights.dtype

    def flush(self) -> None:
        """Have all updates applied before anything else that the caller does."""
        with naming("flush", self.shards[0].step):
            for context in self._contexts:
                context.drain()
            if self._planner is not None:
                self._planner.check()

    def reset(self) -> None:
        """Forget batches that were prefetched, and rows that were fetched ahead; updates are applied first."""
        self.flush()
        self._queue.clear()
        self._running = False
        if self._planner is not None and not self._closed:
            self._planner.forget()
        for context in self._contexts:
            context.discard()

    def leave(self) -> None:
        """Close the channels at once, and so what threads wait for: the process ends."""
        self._close_channels()
        self.close()

    def finish(self) -> None:
        """End threads after what they have to do, then close the channels: the process ends, and all went well."""
        if self._planner is not None:
            self._planner.finish()
            if self.device.type == "cuda":  # all is enqueued; peers that wait for more than that are to hear of it
                self._close_channels()
            deadline = time.monotonic() + LAST_PATIENCE_S
            for lane in self._lanes:
                lane.finish(deadline)
        self.close()

    def close(self) -> None:
        """End threads and channels, also after a failure. Weights can still be read."""
        self._closed = True
        if self._planner is None:
            self._close_channels()
            return
        self._planner.close()
        for lane in self._lanes:
            lane.close()

    def _close_channels(self) -> None:
        for channel in (self._ids_channel, self._urgent_channel, self._background_channel):
            channel.close()

    def move(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply what `Module.to` applies."""
        if function(torch.empty(0, dtype=self.shards[0].weights.dtype, device=self.device)).is_meta:
            raise EmbeddingError("tables cannot move to the meta device: their weights would be lost")
        self.reset()
        for shard, settings in zip(self.shards, self.optimizer.param_groups, strict=True):
            shard.move(function)
            settings["params"] = self._param_group(shard)["params"]
        device = self.shards[0].weights.device
        if device != self.device and self._planner is not None:
            raise EmbeddingError(
                f"tables must move to {device} before their first batch: traffic runs for {self.device}"
            )
        self.device = device

    def mesh(self) -> DeviceMesh | None:
        """The ranks as DTensors know them; None without a process group."""
        group = self._process_group or _default_group(self.rank, self.world_size)
        if group is None:
            return None
        kind = self.device.type
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(group, kind)
        return self._meshes[kind]

    def _take(self, planner: Planner, ids: HostIds) -> Batch:
        """Find the batch of this forward among those prefetched, or plan it now."""
        if not self._queue:
            batch = planner.forward(ids, [])
        elif self._running:
            batch = self._queue.popleft()
            self._check(batch.ids, ids)
        elif planner.all_agree(self._queue[0].ids.equal(ids)):
            batch = self._queue.popleft()
        else:
            batch = planner.forward(ids, list(self._queue))
        self._running = bool(self._queue)
        return batch

    def _check(self, prefetched: HostIds, given: HostIds) -> None:
        """Refuse another batch. Ids in host memory are compared; for those on a GPU a fingerprint tells later."""
        rule = "forward must get the batches that were prefetched, in their order (or reset() be called between)"
        for slot, expected, got in zip(self._slots, prefetched.sizes, given.sizes, strict=True):
            if expected != got:
                raise EmbeddingError(
                    f"{rule}: feature '{slot.feature}' was prefetched with {expected} ids, forward got {got}"
                )
        other = prefetched.find_difference(given)
        if other is not None:
            raise EmbeddingError(f"{rule}: feature '{self._slots[other].feature}' was prefetched with other ids")

    def _gather_call(self, batch: Batch, rows: Sequence[Tensor], call: int) -> list[Tensor]:
        found = {
            group: gather(rows[group], batch.groups[group].calls[index])
            for group, (index, _) in self._indices[call].items()
        }
        return self._share_out(batch, found, call)

    def _share_out(self, batch: Batch, found: Mapping[int, Tensor] | Sequence[Tensor], call: int) -> list[Tensor]:
        """Rows of each feature of a call, of what was found for its groups."""
        first = self._first_slots[call]
        outputs: dict[int, Tensor] = {}
        for group, (_, features) in self._indices[call].items():
            sizes = [batch.ids.sizes[first + feature] for feature in features]
            outputs.update(zip(features, found[group].split(sizes) if len(sizes) > 1 else [found[group]], strict=True))
        return [outputs[i] for i in range(len(outputs))]

    def _open(self) -> Planner:
        """Start lanes and the id plane at the first batch, when tables have come to where they stay."""
        if self._closed:
            raise EmbeddingError("the tables were closed: nothing can be looked up; state_dict() still works")
        if self._planner is None:
            leave_at_exit(self)
            self._lanes = open_lanes(self._urgent_channel, self._background_channel, self.device)
            if self.device.type == "cuda":
                self._late_check = LateCheck([slot.feature for slot in self._slots], self.device)
            layouts = [shard.layout for shard in self.shards]
            collides = not self.synchronous
            self._planner = Planner(
                self._ids_channel, layouts, self._slots, self.device, self._settings, collides=collides
            )
            self._contexts = [
                GroupContext(shard, *self._lanes, self._wire_dtype or shard.weights.dtype, partial(self._stamp, g))
                for g, shard in enumerate(self.shards)
            ]
        return self._planner

    def _stamp(self, group: int) -> Stamp:
        self.optimizer.mark_stepped()
        rate = float(self.optimizer.param_groups[group]["lr"])
        return Stamp(rate, self.shards[group].step, self._divisor, read_scale(self._grad_scale))

    def _param_group(self, shard: Shard) -> dict[str, Any]:
        tables = shard.layout.tables
        weights = [shard.of_table(t, shard.weights) for t in range(len(tables))]
        return {"params": weights, "names": [table.name for table in tables], **asdict(shard.optimizer)}


def _default_group(rank: int, world_size: int) -> dist.ProcessGroup | None:
    """The default process group, where it has the same ranks as the tables."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    same = dist.get_world_size() == world_size and dist.get_rank() == rank
    return dist.group.WORLD if same else None


def _use(batch: Batch) -> None:
    if batch.upload is not None:
        batch.upload.use()
