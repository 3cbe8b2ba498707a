"""One rank of the embedding checks between real processes: python embedding_rank.py BACKEND DEVICE [STEPS]."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from freescale.embedding import Adam, EmbeddingError, PrioritizedEmbeddingCollection, RowwiseAdagrad, Sgd, Table
from freescale.transport import Transport, connect

from embedding_runs import Data, assert_equal, shard_of, train

TABLES = [Table("item", 300, 128, ["clicked", "shown"]), Table("user", 5, 128), Table("shop", 90, 12)]


def check_parity(transport: Transport, device: str, steps: int) -> None:
    """Weights, states and losses of both orders are equal, for all optimizers and collision ratios."""
    cases: list[tuple[Any, float]] = [(Sgd(lr=0.05), 0.05), (RowwiseAdagrad(lr=0.05), 0.0), (Adam(lr=0.05), 0.25)]
    if steps >= 20:
        cases += [(optimizer, collision) for optimizer, _ in cases for collision in (0.01, 1.0)]
    for optimizer, collision in cases:
        data = Data(TABLES, steps=steps, num_ids=200, collision=collision, empty=[1])
        options: dict[str, Any] = {"optimizer": optimizer, "device": device, "look": lambda step: step % 10 == 3}
        ours = train(transport, data, ids_on=device if collision else "cpu", **options)
        theirs = train(transport, data, ahead=0, synchronous=True, **options)
        assert_equal([ours], [theirs])


def check_hot_rows(transport: Transport, device: str, steps: int) -> None:
    """Rows that occur thousands of times a batch are summed alike in both orders."""
    data = Data([Table("item", 40, 64)], steps=min(steps, 6), num_ids=8000, collision=0.5)
    options: dict[str, Any] = {"optimizer": RowwiseAdagrad(lr=0.001), "device": device}
    assert_equal(
        [train(transport, data, ahead=2, **options)], [train(transport, data, ahead=0, synchronous=True, **options)]
    )


def check_narrow_types(transport: Transport, device: str, steps: int) -> None:
    """bfloat16 tables, and a bfloat16 wire for float32 tables, keep parity too."""
    for dtype, wire in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        data = Data([Table("item", 200, 64, dtype=dtype)], steps=steps, num_ids=300)
        options: dict[str, Any] = {"optimizer": RowwiseAdagrad(lr=0.05), "device": device, "wire_dtype": wire}
        ours = train(transport, data, **options)
        assert_equal([ours], [train(transport, data, ahead=0, synchronous=True, **options)])


def check_other_ids_are_noticed(transport: Transport, device: str, steps: int) -> None:
    """A forward with other ids than were prefetched raises: at once in host memory, soon on a GPU."""
    del steps
    tables = PrioritizedEmbeddingCollection([Table("item", 50, 4)], transport, optimizer=Sgd(lr=0.1), device=device)
    raised = ""
    try:
        tables.prefetch({"item": torch.tensor([1, 2])})
        tables({"item": torch.tensor([0], device=device)})
        for _ in range(20):
            tables.prefetch({"item": torch.tensor([1, 2])})
            tables({"item": torch.tensor([2, 1], device=device)})
            if device != "cpu":
                torch.cuda.synchronize()
    except EmbeddingError as error:
        raised = str(error)
    assert "feature 'item'" in raised, raised
    tables.close()


def check_state_dicts_of_torch(transport: Transport, device: str, steps: int) -> None:
    """What torch.distributed.checkpoint gets of a model, it can set again."""
    del steps
    data = Data(TABLES)
    tables = PrioritizedEmbeddingCollection(TABLES, transport, optimizer=Sgd(lr=0.1), device=device)
    saved: dict[str, Any] = dict(get_model_state_dict(tables))
    saved = {name: value.clone() for name, value in saved.items()}
    before = shard_of(tables)
    sum(each.square().sum() for each in tables(data.batch(transport.rank, 0)).values()).backward()
    assert not torch.equal(shard_of(tables)["item"], before["item"])
    set_model_state_dict(tables, saved)
    for name, value in shard_of(tables).items():
        assert torch.equal(value, before[name]), name
    tables.close()


CHECKS = [
    check_parity,
    check_hot_rows,
    check_narrow_types,
    check_other_ids_are_noticed,
    check_state_dicts_of_torch,
]


def main(backend: str, device: str, steps: int) -> None:
    """Run all checks and say which passed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device = f"cuda:{torch.cuda.current_device()}"
    if backend != "mpi":
        torch.distributed.init_process_group("gloo")
    if backend == "copy_engine":
        transport = connect(backend, through=connect("process_group", timeout_s=60), timeout_s=60)
    else:
        transport = connect(backend, timeout_s=60)
    failed = 0
    for check in CHECKS:
        try:
            check(transport, device, steps)
            print(f"passed {check.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
    transport.close()
    if backend != "mpi":
        torch.distributed.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 40)
