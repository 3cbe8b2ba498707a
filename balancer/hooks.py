"""`attach`: the balancer's stages run at hooks of any trainer's model and optimizer, without a thread (section 4.3).

    optimizer step    load the next local batch; post stage I (gather lengths)
    forward           post stage II (gather candidate lengths); plan, pack and post the agreement on the plan
    backward          post stage III (shuffle samples); put the batch together

A hook never waits: it goes on only where messages have arrived, so that a rank in a hook cannot wait for one that
waits for it in a collective of the trainer. What hooks have not done, since the trainer skipped a step, evaluated or is
early, `next` does. So hooks decide when, never whether or in which order: all ranks run the same stages in the same
order on the balancer's own channel, wherever each of them has its hooks, or none.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from .loader import BalancedLoader

_FORWARD = frozenset({"hello", "gather_lengths", "gather_candidates"})
_AFTER_FORWARD = _FORWARD | {"load"}  # where no optimizer step did it: at the start, between accumulated gradients
_BACKWARD = _FORWARD | {"plan", "shuffle"}
_OPTIMIZER = _BACKWARD | {"load"}
_PARAMETERS = 16  # whose gradients are moments of the backward pass


class Attachment:
    """Hooks of one balancer in one trainer; `detach`, or the end of a `with`, removes them."""

    def __init__(self, loader: BalancedLoader[Any], model: nn.Module, optimizer: Any) -> None:
        self._loader = loader
        loader.pace(by_hooks=True)
        self._handles = [
            optimizer.register_step_post_hook(lambda *_: loader.advance(_OPTIMIZER)),
            model.register_forward_pre_hook(lambda *_: loader.advance(_FORWARD)),
            model.register_forward_hook(lambda *_: loader.advance(_AFTER_FORWARD)),
        ]
        learning = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        for parameter in learning[:: -(-len(learning) // _PARAMETERS) or 1]:
            hook = parameter.register_post_accumulate_grad_hook(lambda _: loader.advance(_BACKWARD))
            self._handles.append(hook)

    def detach(self) -> None:
        """Remove the hooks. An epoch that is under way goes on in a thread; later ones as without `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._loader.pace(by_hooks=False)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(balancer: Any, model: nn.Module, optimizer: Any) -> Attachment:
    """Run the balancer at hooks of a trainer instead of in a thread, from its next epoch on.

    The trainer stays as it is. Ranks with hooks and ranks without may be mixed. Gradient accumulation, steps that are
    skipped and evaluation between steps need nothing: a hook that does not come leaves its stage to the next one.

    Source: FreeScale, sections 3.1 and 4.3. Deviation: forward and backward have several moments each (before and
    after the forward; when the gradients of up to 16 parameters are there), since a stage may only go on once all ranks
    have answered. The moments of the backward are those of parameters, as hooks of whole modules do not fire for
    outputs that are dicts or dataclasses.

    Args:
        balancer: From `balance`, a `BalancerNode`, or a DataPipe with `.balance`.
        model: What the trainer calls.
        optimizer: A torch.optim.Optimizer.

    Returns:
        What removes the hooks again.

    Raises:
        TypeError: An argument is of another type.

    Example:
        >>> import torch
        >>> from freescale.balancer import balance
        >>> from freescale.transport import connect
        >>> loader = balance([{"x": torch.ones(2, 1), "length": torch.tensor([3, 5])}] * 3, connect("local"), "length")
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with attach(loader, model, optimizer):
        ...     for batch in loader:  # a trainer that knows nothing of this
        ...         model(batch["x"]).sum().backward()
        ...         optimizer.step()
    """
    loader = balanced_loader(balancer)
    if loader is None:
        raise TypeError(f"balancer must come from balance(…) or be a BalancerNode, got {type(balancer).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return Attachment(loader, model, optimizer)


def balanced_loader(loader: Any) -> BalancedLoader[Any] | None:
    """The balanced loader that is, or is inside, what the user iterates; None when nothing is balanced."""
    inner = loader if isinstance(loader, BalancedLoader) else getattr(loader, "loader", None)  # of a node or DataPipe
    return inner if isinstance(inner, BalancedLoader) else None
