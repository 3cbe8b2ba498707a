"""What every transport must do: functions that each rank runs, on threads or as real processes.

Here is what moves; `contract_channels.py` and `contract_failures.py` have the rest of the contract.
As a script: `python transport_contract.py BACKEND all|late` runs them on the ranks it was started on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from freescale.transport import SizeMismatch, Transport, connect

import contract_channels
import contract_failures
from known_rows import DTYPES, column, expected_rows, make_rows, make_splits, same_bytes


def check_an_all_gather_of_equal_blocks_is_in_rank_order(transport: Transport) -> None:
    for dtype in DTYPES:
        blocks = [make_rows(rank, 3, (2,), dtype) for rank in range(transport.world_size)]
        out = transport.all_gather(blocks[transport.rank]).wait()
        assert same_bytes(out, torch.cat(blocks)), dtype


def check_the_same_gather_again_moves_what_its_tensors_hold_by_then(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    block, out = torch.zeros(3, 2, dtype=torch.int32), torch.empty(3 * n, 2, dtype=torch.int32)
    other = torch.empty_like(out)
    for step in range(6):
        block.fill_(100 * step + rank)
        target = other if step == 4 else out
        expected = 100 * step + torch.arange(n, dtype=torch.int32).repeat_interleave(3)[:, None].expand(-1, 2)
        assert torch.equal(transport.all_gather(block, out=target).wait(), expected)
        assert torch.equal(target, expected)
    block.resize_(1, 2).fill_(rank)  # the same tensor in the same memory, with fewer rows
    out.resize_(n, 2)
    assert transport.all_gather(block, out=out).wait()[:, 0].tolist() == list(range(n))


def check_an_all_gather_of_uneven_blocks_allows_empty_ones(transport: Transport) -> None:
    sizes = [(rank * 3) % 5 for rank in range(transport.world_size)]
    for trailing in [(), (1,), (3, 2), (0,), (2, 0, 3)]:
        blocks = [make_rows(rank, n, trailing) for rank, n in enumerate(sizes)]
        out = transport.all_gather(blocks[transport.rank], sizes).wait()
        assert same_bytes(out, torch.cat(blocks)), trailing


def check_an_all_to_all_moves_every_dtype_exactly(transport: Transport) -> None:
    for seed, dtype in enumerate(DTYPES):
        splits = make_splits(seed, transport.world_size)
        rows, expected = expected_rows(100 * seed, splits, transport.rank, (3,), dtype)
        out = transport.all_to_all(rows, splits[transport.rank], column(splits, transport.rank)).wait()
        assert same_bytes(out, expected), dtype


def check_an_all_to_all_moves_every_shape_exactly(transport: Transport) -> None:
    for seed, trailing in enumerate([(), (1,), (4, 1, 2), (0,), (3, 0)]):
        splits = make_splits(seed, transport.world_size)
        rows, expected = expected_rows(100 * seed, splits, transport.rank, trailing)
        out = transport.all_to_all(rows, splits[transport.rank], column(splits, transport.rank)).wait()
        assert same_bytes(out, expected), trailing


def check_the_same_splits_again_move_what_rows_hold_by_then(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    splits = make_splits(3, n)
    sent, received = splits[rank], column(splits, rank)
    sizes = [1 + (peer * 2) % 3 for peer in range(n)]
    for lane in (transport, transport.channel("unchecked", check_sizes=False)):
        for step in range(3):
            pairs = [expected_rows(50 * step + number, splits, rank) for number in range(3)]
            under_way = [lane.all_to_all(rows, sent, received) for rows, _ in pairs]
            blocks = [torch.full((size,), 10 * step + peer) for peer, size in enumerate(sizes)]
            gathered = lane.all_gather(blocks[rank], sizes)
            for pending, (_, expected) in zip(under_way, pairs, strict=True):
                assert same_bytes(pending.wait(), expected), step
            assert same_bytes(gathered.wait(), torch.cat(blocks)), step


def check_the_core_is_not_given_away_for_what_is_there_already(transport: Transport) -> None:
    if transport.world_size > 1:  # a peer may not be there yet
        return
    yields: list[None] = []
    sched_yield, os.sched_yield = os.sched_yield, lambda: yields.append(None)
    try:
        for lane in (transport, transport.channel("unchecked", check_sizes=False)):
            for _ in range(20):
                assert lane.all_to_all(torch.ones(3), [3], [3]).wait().tolist() == [1, 1, 1]
    finally:
        os.sched_yield = sched_yield
    assert not yields, "on a busy host each may cost a time slice"


def check_a_long_wait_leaves_the_core_to_others(transport: Transport) -> None:
    lane = transport.channel("late", check_sizes=False)
    block = torch.zeros(2 << 20, dtype=torch.uint8)  # waited for awake for a while, as it may be on its way

    def cpu_seconds(late_s: float) -> float:
        transport.all_gather(torch.zeros(1)).wait()
        if transport.rank == 0:
            time.sleep(late_s)
        begun = time.thread_time()
        lane.all_gather(block).wait()
        return time.thread_time() - begun

    for _ in range(3):  # a slow machine, an emulated one say, needs long for the bytes alone
        prompt_s, late_s = cpu_seconds(0.0), cpu_seconds(1.0)
        leaves_it = late_s < 0.5 + 2 * prompt_s
        if transport.all_gather(torch.tensor([leaves_it])).wait().all():
            return
    assert leaves_it, (prompt_s, late_s)


def check_splits_may_be_numpy_arrays_or_tensors(transport: Transport) -> None:
    splits = make_splits(7, transport.world_size)
    rows, expected = expected_rows(0, splits, transport.rank)
    sent, received = splits[transport.rank], column(splits, transport.rank)
    for kind in (np.array, torch.tensor, tuple, lambda x: np.array(x, dtype=np.uint8)):
        out = transport.all_to_all(rows, kind(sent), kind(received)).wait()
        assert same_bytes(out, expected)


def check_nothing_to_move_is_fine(transport: Transport) -> None:
    nothing = [0] * transport.world_size
    for dtype in (torch.bool, torch.float32):
        rows = torch.empty(0, 3, dtype=dtype)
        assert same_bytes(transport.all_to_all(rows, nothing, nothing).wait(), rows)
        assert same_bytes(transport.all_gather(rows).wait(), rows)
        assert same_bytes(transport.all_gather(rows, nothing).wait(), rows)
    without_stride = torch.from_numpy(np.empty(0, dtype=np.int64))  # as NumPy makes them
    assert len(transport.all_to_all(without_stride, nothing, nothing).wait()) == 0


def check_ranks_without_rows_may_have_another_dtype(transport: Transport) -> None:
    sizes = [2] + [0] * (transport.world_size - 1)
    block = torch.tensor([5, 6]) if transport.rank == 0 else torch.empty(0, dtype=torch.int64)
    if transport.rank:
        out = torch.empty(2, dtype=torch.int64)
        assert transport.all_gather(block, sizes, out).wait().tolist() == [5, 6]
    else:
        assert transport.all_gather(block, sizes).wait().tolist() == [5, 6]
    nothing = [0] * transport.world_size
    odd = torch.empty(0, transport.rank + 1, dtype=torch.float64 if transport.rank else torch.int8)
    assert len(transport.all_to_all(odd, nothing, nothing).wait()) == 0


def check_rows_may_lie_anyhow_and_may_require_grad(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    wide = torch.arange(n * 12, dtype=torch.float32).reshape(2, n * 6).add(100 * rank).requires_grad_()
    out = transport.all_to_all(wide.T, [6] * n, [6] * n).wait()
    assert not out.requires_grad
    for peer in range(n):
        theirs = (torch.arange(n * 12, dtype=torch.float32).reshape(2, n * 6) + 100 * peer).T
        assert torch.equal(out[6 * peer : 6 * peer + 6], theirs[6 * rank : 6 * rank + 6])


def check_out_is_filled_and_returned(transport: Transport) -> None:
    splits = make_splits(3, transport.world_size)
    for seed in range(3):
        rows, expected = expected_rows(seed, splits, transport.rank, (2,))
        out = torch.full((len(expected), 2), -1)
        got = transport.all_to_all(rows, splits[transport.rank], column(splits, transport.rank), out).wait()
        assert got.data_ptr() == out.data_ptr()
        assert same_bytes(out, expected)
        blocks = [make_rows(seed + rank, 2) for rank in range(transport.world_size)]
        out = torch.full((2 * transport.world_size,), -1)
        transport.all_gather(blocks[transport.rank], out=out).wait()
        assert same_bytes(out, torch.cat(blocks))


def check_what_was_received_does_not_change_with_what_was_sent(transport: Transport) -> None:
    n = transport.world_size
    block = torch.full((4,), transport.rank)
    out = transport.all_gather(block).wait()
    transport.all_gather(torch.zeros(1)).wait()
    block.fill_(-1)
    out += 10
    transport.all_gather(torch.zeros(1)).wait()
    assert out.tolist() == [10 + rank for rank in range(n) for _ in range(4)]
    assert block.tolist() == [-1] * 4


def check_several_transfers_may_be_under_way(transport: Transport) -> None:
    for lane in (transport, transport.channel("unchecked", check_sizes=False)):
        pending, answers = [], []
        for seed in range(12):
            splits = make_splits(seed, transport.world_size)
            rows, expected = expected_rows(10 * seed, splits, transport.rank)
            pending.append(lane.all_to_all(rows, splits[transport.rank], column(splits, transport.rank)))
            answers.append(expected)
            if (seed + transport.rank) % 3 == 0:
                pending[seed // 2].test()
        order = torch.randperm(12, generator=torch.Generator().manual_seed(transport.rank)).tolist()
        for index in order:
            assert same_bytes(pending[index].wait(), answers[index])
            assert pending[index].test()
            assert same_bytes(pending[index].wait(), answers[index])


def check_a_transfer_completes_by_tests_alone(transport: Transport) -> None:
    for lane in (transport, transport.channel("unchecked", check_sizes=False)):
        pending = lane.all_gather(torch.tensor([transport.rank]))
        deadline = time.monotonic() + 60
        while not pending.test():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert pending.wait().tolist() == list(range(transport.world_size))


def check_a_default_device_of_torch_changes_nothing(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    rows = torch.arange(n) + 10 * rank
    odd = torch.zeros(n + (rank == 0), dtype=torch.int64)
    with torch.device("meta"):
        lane = transport.channel("default device")
        assert lane.all_gather(rows[:1]).wait().tolist() == [10 * peer for peer in range(n)]
        assert lane.all_to_all(rows, [1] * n, [1] * n).wait().tolist() == [10 * peer + rank for peer in range(n)]
        if n > 1:
            sent = [1] * (n - 1) + [1 + (rank == 0)]
            pending = lane.all_to_all(odd, sent, [1] * n)
            if rank in (0, n - 1):
                with pytest.raises(SizeMismatch):
                    pending.wait()
            else:
                assert pending.wait().tolist() == [0] * n


def check_wrong_arguments_cost_nothing(transport: Transport) -> None:
    n = transport.world_size
    with pytest.raises(ValueError, match="sent_splits must add up"):
        transport.all_to_all(torch.zeros(n + 1), [1] * n, [1] * n)
    with pytest.raises(ValueError, match="name of a channel"):
        transport.channel("")
    assert transport.all_gather(torch.tensor([1])).wait().tolist() == [1] * n


def check_large_and_small_messages_mix(transport: Transport) -> None:
    n, rank = transport.world_size, transport.rank
    splits = [[(100_000 if (a + b) % 3 == 0 else b) for b in range(n)] for a in range(n)]
    rows, expected = expected_rows(5, splits, rank)
    for _ in range(2):
        assert same_bytes(transport.all_to_all(rows, splits[rank], column(splits, rank)).wait(), expected)


_PARTS = {**globals(), **vars(contract_channels), **vars(contract_failures)}
# What leaves transfers unfinished, so that a process may not be able to end normally.
LATE_CHECKS: list[Callable[[Transport], None]] = [
    value for name, value in sorted(_PARTS.items()) if name.startswith("late_check_")
]
CHECKS: list[Callable[[Transport], None]] = [
    value for name, value in sorted(_PARTS.items()) if name.startswith("check_")
]


def main(backend: str, which: str) -> None:
    """Run every check on this rank."""
    if backend == "process_group":
        torch.distributed.init_process_group("gloo")
    transport = connect(backend, timeout_s=60)
    for check in CHECKS if which == "all" else LATE_CHECKS:
        begun = time.monotonic()
        check(transport)
        print(f"passed {check.__name__} in {time.monotonic() - begun:.2f} s", flush=True)
    transport.close()
    if backend == "process_group":
        torch.distributed.destroy_process_group()
    print("all passed", transport.world_size, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
