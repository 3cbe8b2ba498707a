"""`StagedPipeline`: a training step as five stages, with batches balanced, copied and prefetched ahead (section 4.3).

The stages of step i, and what runs ahead of it:

    data loading    take batch i + 2 from the loader, or i + 3 and hand it to the modules that prefetch; copy it over
    forward         of batch i
    backward        of batch i
    optimizer       step
    metrics         of batch i, while what the backward sent still travels

Data loading comes between forward and backward: by then the GPU has a forward pass to do, and everything that follows
from its ids has a backward pass, an optimizer step, the metrics and, where modules prefetch, a whole step to arrive in.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..kernels.traced import traced
from .adapters.device import moved, pinned, record_stream
from .hooks import balanced_loader
from .iterator import BalancedIterator
from .report import Report
from .stopwatch import Stopwatch

LossFunction = Callable[[Any, Any, Report | None], Tensor]
Ids = Callable[[Any], Any]
_AHEAD = 2  # batches staged beside the one that is trained on
_IDS_AHEAD = 3  # the same when modules prefetch: forward i needs the ids of i + 1, which so had more than a step's time


@runtime_checkable
class Prefetching(Protocol):
    """A module that wants to know what it will look up before its forward."""

    def prefetch(self, upcoming: Any, /) -> object:
        """Take what the module will be called with three batches from now. In the order of the batches."""


@dataclass
class _Staged:
    """A batch on its way to the forward pass.

    Attributes:
        batch: On the device of the model.
        report: About the global batch, when it was balanced.
        before: State of the loader before this batch was taken.
        arrived: On CUDA: recorded when the copy to the device ends.
        epoch: Number of the iterator that it came from.
    """

    batch: Any
    report: Report | None
    before: dict[str, Any] | None
    arrived: torch.cuda.Event | None
    epoch: int


class StagedPipeline:
    """Trains a model batch by batch, and has everything ready that a batch needs before its turn comes.

    No graph is traced and the model is not changed: any module that takes a batch will do. Modules that have a
    `prefetch` are found through `named_modules()`. Every stage has a name in a PyTorch profiler's trace
    ("freescale.forward", …).

    Source: FreeScale, section 4.3, Figure 1. Deviation: batch i + 3 is taken and its ids are handed out between forward
    and backward of batch i (Algorithm 2 prefetches i + 1 before the forward of i), so that no rank waits for ids. A
    model without modules that prefetch has batch i + 2 taken there.

    Args:
        model: Called with one batch. Without `loss_fn` it returns the loss, or a tuple that begins with it.
        optimizer: Anything with `zero_grad` and `step`. None: the caller's `metrics`, or hooks, do it.
        loader: What the iterators given to `progress` come from: `balance(…)`, `BalancerNode` or `.balance` of a
            DataPipe; it is told how long the compute of each step took, if its partitioner reads that. Any other
            loader, or None, is not.
        loss_fn: Gives the loss of what the model returned, the batch, and the report of a balanced loader, whose
            `loss_scale` makes gradients right: `lambda scores, batch, report: … .sum() * report.loss_scale("label")`.
        metrics: Called with what the model returned, the batch and the report, after the optimizer's step.
        grad_scaler: A `torch.amp.GradScaler`; scales the loss, unscales and steps the optimizer, and is updated.
        prepare: Makes what the model takes of what the loader gave and the report: a batch class of the user's, with
            the scale of its loss, say. Runs in data loading, in host memory.
        ids: What the modules' `prefetch` gets: for each module's name a function of the batch, or one function for
            all. Without it the batch itself, as modules made by `freescale.embedding.prioritize` expect it.
        device: Where the model is; taken from its parameters by default.
        clock: For compute on the CPU, in seconds: `time.thread_time` where ranks share cores.

    Raises:
        TypeError, ValueError: An argument breaks a rule above.

    Example:
        >>> from freescale.balancer import balance
        >>> from freescale.transport import connect
        >>> batches = [{"x": torch.ones(2, 3), "length": torch.tensor([3, 5])}] * 4
        >>> loader = balance(batches, connect("local"), lengths="length")
        >>> weights = nn.ParameterDict({"w": torch.zeros(3)})
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(3, 1)
        ...     def forward(self, batch):
        ...         return self.linear(batch["x"])
        >>> model = Model()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> squares = lambda out, batch, report: out.square().sum() * report.loss_scale()
        >>> pipeline = StagedPipeline(model, optimizer, loader, loss_fn=squares)
        >>> outputs = list(pipeline)
        >>> len(outputs), outputs[-1].square().sum() < outputs[0].square().sum()
        (4, tensor(True))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        metrics: Callable[[Any, Any, Report | None], object] | None = None,
        grad_scaler: Any = None,
        prepare: Callable[[Any, Report | None], Any] | None = None,
        ids: Ids | Mapping[str, Ids] | None = None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        for name, part, needed in (("optimizer", optimizer, "step"), ("grad_scaler", grad_scaler, "scale")):
            if part is not None and not callable(getattr(part, needed, None)):
                raise TypeError(f"{name} must have a method {needed!r}, got {type(part).__name__}")
        if grad_scaler is not None and optimizer is None:
            raise ValueError("grad_scaler needs an optimizer: it is what decides whether a step is taken")
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.device = device or _device_of(model)
        self._loss_fn, self._metrics, self._scaler = loss_fn, metrics, grad_scaler
        self._prepare = prepare
        self._balanced = balanced_loader(loader)
        self._stopwatch = Stopwatch(self.device, clock)
        self._staged: deque[_Staged] = deque()
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False
        self._epoch = 0
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._prefetching = _prefetching_modules(model, ids)
        self._ahead = _IDS_AHEAD if self._prefetching else _AHEAD
        waiting = [m for m in model.modules() if isinstance(m, Prefetching) or getattr(m, "waits_for_peers", False)]
        self._hooks = [hook for module in waiting for hook in self._watch_waits(module)]

    def __iter__(self) -> Iterator[Any]:
        """Train on one epoch of `loader`; yields what the model returned for each batch."""
        if self.loader is None:
            raise ValueError("there is nothing to iterate: pass loader=, or call progress(iterator)")
        iterator = iter(self.loader)
        while True:
            try:
                output = self.progress(iterator)
            except StopIteration:
                return
            yield output

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Train on the next batch, and take one from the iterator that is two or three ahead.

        In evaluation mode (`model.eval()`) only forward and metrics run, without gradients.

        Args:
            iterator: Gives batches, or the pairs of a balanced loader's `with_reports()`. At its end what was taken
                from it is trained on; give another one for the next epoch.

        Returns:
            What the model returned; without `loss_fn` and with a tuple, what comes after the loss.

        Raises:
            StopIteration: All batches of the iterator were trained on.
        """
        with traced("freescale.data_loading"):
            self._fill(iterator)
        if not self._staged:
            raise StopIteration
        staged = self._staged.popleft()
        self._await_copy(staged)
        if not self.model.training:
            with torch.no_grad(), traced("freescale.forward"):
                output = self.model(staged.batch)
            self._finish(output, staged)
            return output
        with traced("freescale.forward"):
            loss, output = self._forward(staged)
        with traced("freescale.data_loading"):
            self._fill_quietly(iterator)
        with traced("freescale.backward"):
            self._backward(loss)
        with traced("freescale.optimizer"):
            self._step()
        self._finish(output, staged)
        return output

    def detach(self) -> nn.Module:
        """Remove everything that was hooked into the model, and give it back. Batches that were taken stay staged.

        Called before an epoch has ended, `state_dict` tells the loader to begin with the first batch that was not
        trained on.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._prefetching = [], []
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """The state of the balanced loader after the batch that was trained on last: what was staged comes again.

        Raises:
            ValueError: There is no balanced loader.
        """
        if self._balanced is None:
            raise ValueError("only a loader from balance() has a state that this pipeline can tell; save your own")
        if self._staged and self._staged[0].before is not None:
            return self._balanced.state_dict(self._staged[0].before)
        return self._balanced.state_dict()

    # ---- data loading

    def _fill(self, iterator: Iterator[Any]) -> None:
        """Stage batches until there is the current one and the upcoming one."""
        if iterator is not self._iterator:
            self._iterator, self._exhausted = iterator, False
            self._epoch += 1
            if isinstance(iterator, BalancedIterator):
                self._balanced = iterator.loader
        while len(self._staged) < self._ahead and not self._exhausted:
            before = None if self._balanced is None else self._balanced.running_state
            try:
                entry = next(iterator)
            except StopIteration:
                self._exhausted = True
                return
            self._staged.append(self._stage(entry, before))

    def _fill_quietly(self, iterator: Iterator[Any]) -> None:
        """As `_fill`, but the balancer's thread sleeps on: it would take the interpreter from each line of this.

        In the backward pass, for which it is woken, the trainer needs the interpreter least.
        """
        if self._balanced is None:
            self._fill(iterator)
            return
        self._balanced.lets_thread_sleep = True
        try:
            self._fill(iterator)
        finally:
            self._balanced.lets_thread_sleep = False

    def _stage(self, entry: Any, before: dict[str, Any] | None) -> _Staged:
        report = None if self._balanced is None else self._balanced.last_report
        batch = entry[0] if isinstance(self._iterator, BalancedIterator) else entry
        if self._prepare is not None:
            batch = self._prepare(batch, report)
        arrived, on_host = None, batch
        if self._copies is not None:
            with traced("freescale.copy_to_device"), torch.cuda.stream(self._copies):
                batch = moved(pinned(batch), self.device)
                arrived = torch.cuda.Event()
                arrived.record(self._copies)
        # Last, since it may wake threads that need the interpreter.
        for name, module, ids_of in self._prefetching if self.model.training else ():
            with traced(f"freescale.prefetch {name}"):
                module.prefetch(ids_of(on_host))
        return _Staged(batch, report, before, arrived, self._epoch)

    def _await_copy(self, staged: _Staged) -> None:
        """Order the current stream after the copy; the host goes on."""
        if staged.arrived is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(staged.arrived)
        record_stream(staged.batch, stream)

    # ---- the other stages

    def _forward(self, staged: _Staged) -> tuple[Tensor, Any]:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self._balanced is not None and staged.report is not None and self._balanced.reads_seconds:
            self._stopwatch.begin((staged.epoch, staged.report.step))
        output = self.model(staged.batch)
        if self._loss_fn is not None:
            loss = self._loss_fn(output, staged.batch, staged.report)
        elif isinstance(output, (tuple, list)):
            loss, *rest = output
            output = rest[0] if len(rest) == 1 else tuple(rest)
        else:
            loss, output = output, output.detach() if isinstance(output, Tensor) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}; pass loss_fn=")
        return loss.sum() if loss.dim() else loss, output

    def _backward(self, loss: Tensor) -> None:
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        if self._stopwatch.is_timing:
            scaled.register_hook(self._end_lap_first)
        if self._balanced is not None:
            self._balanced.wake_thread()
        scaled.backward()

    def _end_lap_first(self, grad: Tensor) -> None:
        """Have the watch stopped when gradients are computed, before data parallelism waits for its peers.

        The engine runs what is queued here at the end of the backward pass, in order; DistributedDataParallel queues
        its waiting later, from the hooks of parameters.
        """
        del grad
        torch.autograd.Variable._execution_engine.queue_callback(self._stopwatch.end)

    def _step(self) -> None:
        if self.optimizer is None:
            return
        if self._scaler is None:
            self.optimizer.step()
            return
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def _finish(self, output: Any, staged: _Staged) -> None:
        with traced("freescale.metrics"):
            if self._metrics is not None:
                self._metrics(output, staged.batch, staged.report)
            for (epoch, step), seconds in self._stopwatch.collect():
                if self._balanced is not None and epoch == self._epoch:
                    self._balanced.record_seconds(seconds, step)

    def _watch_waits(self, module: nn.Module) -> list[Any]:
        """What a module waits for in its forward, such as rows of other ranks, is no compute of this one.

        That goes for modules that prefetch, and for those that say `waits_for_peers = True`.
        """
        return [
            module.register_forward_pre_hook(lambda *_: self._stopwatch.pause()),
            module.register_forward_hook(lambda *_: self._stopwatch.resume()),
        ]


def _device_of(model: nn.Module) -> torch.device:
    """Where a model is: on the first CUDA device that a parameter is on, else on the CPU."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _prefetching_modules(model: nn.Module, ids: Any) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Name and module of all that prefetch one batch, with the function that gives them their part of it.

    TorchRec's sharded modules have a `prefetch` too, which asks for more than a batch: those are left alone.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, Prefetching):
            continue
        try:
            inspect.signature(module.prefetch).bind(None)
        except TypeError:
            continue
        found.append((name, module))
    if isinstance(ids, Mapping):
        names = [name for name, _ in found]
        if set(ids) != set(names):
            raise ValueError(f"ids must name the modules that prefetch, {names}, got {sorted(ids)}")
        return [(name, module, ids[name]) for name, module in found]
    if ids is not None and not callable(ids):
        raise TypeError(f"ids must be a function of the batch, or one for each module, got {type(ids).__name__}")
    return [(name, module, ids or (lambda batch: batch)) for name, module in found]
