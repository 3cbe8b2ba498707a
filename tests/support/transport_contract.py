"""What every transport must do: functions that each rank runs, on threads or as real processes.

As a script: `python transport_contract.py BACKEND all|late` runs them on the ranks it was started on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from known_rows import DTYPES, column, expected_rows, make_rows, make_splits, same_bytes
from torch import Tensor

from freescale.transport import (
    Pending,
    SizeMismatch,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
    connect,
)
from freescale.transport.lane import HostTransport
from freescale.transport.local import LocalWire


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
        deadline = time.monotonic() + 10
        while not pending.test():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert pending.wait().tolist() == list(range(transport.world_size))


def check_channels_in_threads_do_not_disturb_each_other(transport: Transport) -> None:
    channels = [transport.channel(f"lane {i}", check_sizes=i % 2 == 0) for i in range(3)]
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for step in range(15):
                if (number + step + transport.rank) % 4 == 0:
                    time.sleep(0.001)
                splits = make_splits(100 * number + step, transport.world_size)
                rows, expected = expected_rows(1000 * number + step, splits, transport.rank)
                sent, received = splits[transport.rank], column(splits, transport.rank)
                if not same_bytes(channels[number].all_to_all(rows, sent, received).wait(), expected):
                    wrong.append((number, step))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong, wrong
    assert not any(thread.is_alive() for thread in threads)


def check_threads_make_channels_at_once_in_any_order(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    parents = [transport.channel(f"parent {number}") for number in range(2)]
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for step in range(3):
                if (rank + number + step) % 2:  # each rank begins with another one, long before it comes to this
                    time.sleep(0.2)
                lane = parents[number].channel(f"made {number} {step}")
                block = torch.tensor([100 * number + 10 * step + rank])
                if lane.all_gather(block).wait().tolist() != [100 * number + 10 * step + peer for peer in range(n)]:
                    wrong.append((number, step))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not wrong, wrong
    assert not any(thread.is_alive() for thread in threads), "a thread waits for another one's channel"


def check_two_threads_on_one_channel_are_an_error_that_names_it(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    shared = transport.channel("shared one")
    if transport.rank:
        transport.all_gather(torch.zeros(1)).wait()
        shared.all_gather(torch.tensor([transport.rank])).wait()
        return
    results: list[Tensor] = []
    pending = shared.all_gather(torch.tensor([0]))
    thread = threading.Thread(target=lambda: results.append(pending.wait()), daemon=True, name="waiter")
    thread.start()
    time.sleep(0.1)
    with pytest.raises(TransportError, match="'shared one' is in use by thread 'waiter'"):
        shared.all_gather(torch.tensor([0]))
    transport.all_gather(torch.zeros(1)).wait()
    thread.join(10)
    assert results[0].tolist() == list(range(transport.world_size)), "the thread that held the channel goes on"


def check_a_size_mismatch_is_raised_on_both_sides_only(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    if n == 1:
        return
    lane = transport.channel("mismatched")
    sent, received = [1] * n, [1] * n
    if rank == 0:
        received[1] = 2
    out = torch.full((sum(received),), -1)
    pending = lane.all_to_all(torch.arange(n) + 10 * rank, sent, received, out)
    if rank > 1:
        assert pending.wait().tolist() == [10 * peer + rank for peer in range(n)]
        return
    text = "all_to_all #1 on channel 'mismatched': rank 0 expected 2 rows from rank 1, got 1"
    with pytest.raises(SizeMismatch, match=text):
        pending.wait()
    with pytest.raises(SizeMismatch, match="rank 0 expected 2 rows from rank 1, got 1"):
        pending.wait()
    with pytest.raises(TransportClosed, match="rank 0 expected 2 rows from rank 1, got 1"):
        lane.all_gather(torch.zeros(1))


def check_a_gather_of_wrong_sizes_is_raised_on_both_sides(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    if n == 1:
        return
    lane = transport.channel("gathered")
    sizes = [2] * n
    if rank == n - 1:
        sizes[0] = 3
    pending = lane.all_gather(torch.full((2,), rank), sizes)
    if rank in (0, n - 1):
        with pytest.raises(SizeMismatch, match=f"rank {n - 1} expected 3 rows from rank 0, got 2"):
            pending.wait()
    else:
        assert pending.wait().tolist() == [peer for peer in range(n) for _ in range(2)]


def check_rows_of_another_width_are_a_mismatch(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    lane = transport.channel("widths")
    block = torch.zeros(2, dtype=torch.int32 if transport.rank == 0 else torch.int64)
    pending = lane.all_gather(block)
    if transport.rank == 0:
        with pytest.raises(SizeMismatch, match=r"rank 0 has rows of 4 bytes, rank \d of 8 bytes"):
            pending.wait()
    else:
        with pytest.raises(SizeMismatch, match="has rows of 8 bytes, rank 0 of 4 bytes"):
            pending.wait()


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


def check_different_operations_are_an_error_on_both_sides(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    lane = transport.channel("operations")
    ones = [1] * transport.world_size
    if transport.rank == 0:
        pending = lane.all_gather(torch.zeros(1))
    else:
        pending = lane.all_to_all(torch.zeros(transport.world_size), ones, ones)
    with pytest.raises(TransportError, match=r"rank 0 (is )?at all_gather #1"):
        pending.wait()


def late_check_a_late_rank_is_a_timeout(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    for check_sizes in (True, False):
        lane = transport.channel("late", check_sizes)
        assert isinstance(lane, HostTransport)
        if transport.rank == 1:
            transport.all_gather(torch.zeros(1)).wait()
            lane.timeout_s = 1.0
            # It may complete, or time out, or a backend may say that the others have given up.
            with suppress(TransportError):
                lane.all_gather(torch.zeros(1)).wait()
        else:
            lane.timeout_s = 0.3
            begun = time.monotonic()
            pattern = f"all_gather #1 on channel 'late': rank {transport.rank} of .* waited 0.3 s, .*missing"
            with pytest.raises(TransportTimeout, match=pattern) as caught:
                lane.all_gather(torch.zeros(1)).wait()
            assert 0.2 < time.monotonic() - begun < 3
            if check_sizes:
                assert "missing: ranks [1]" in str(caught.value)
            with pytest.raises(TransportClosed, match=r"waited 0\.3 s"):
                lane.all_gather(torch.zeros(1))
            transport.all_gather(torch.zeros(1)).wait()


def late_check_tests_have_a_deadline_too(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    lane = transport.channel("tested")
    assert isinstance(lane, HostTransport)
    if transport.rank == 0:
        lane.timeout_s = 0.2
        pending = lane.all_gather(torch.zeros(1))
        deadline = time.monotonic() + 5
        while not pending.test():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(TransportTimeout):
            pending.wait()
    transport.all_gather(torch.zeros(1)).wait()
    if transport.rank:
        lane.timeout_s = 1.0
        with suppress(TransportError):
            lane.all_gather(torch.zeros(1)).wait()


def late_check_a_channel_closed_with_transfers_under_way_is_given_back_later(transport: Transport) -> None:
    transport.channel("warm").close()
    before = held()[:2]
    patience, transport.timeout_s = transport.timeout_s, 1.0
    lane = transport.channel("left")
    if transport.rank != 1:
        lane.all_gather(torch.zeros(1))
    transport.timeout_s = patience
    lane.close()
    time.sleep(1.5)
    transport.all_gather(torch.zeros(1)).wait()
    transport.channel("sweeping").close()
    if isinstance(transport, HostTransport) and not isinstance(transport._wire, LocalWire):
        assert all(now <= then for now, then in zip(held()[:2], before, strict=True)), (held(), before)


def check_channels_of_different_names_are_refused(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    parent = transport.channel("parent")
    with pytest.raises(TransportError, match=f"rank {transport.rank} makes channel '.*' with .*, rank .* '"):
        parent.channel("left" if transport.rank == 0 else "right")


def check_sequence_numbers_pass_31_bits(transport: Transport) -> None:
    for start in (2**31 - 2, 2**32 - 2, 2**53 - 2):
        lane = transport.channel("long-lived")
        assert isinstance(lane, HostTransport)
        lane._sequence = start
        for step in range(4):
            assert lane.all_gather(torch.tensor([step])).wait().tolist() == [step] * transport.world_size
        assert lane._sequence == start + 4


def check_a_closed_channel_refuses_and_its_parent_goes_on(transport: Transport) -> None:
    lane = transport.channel("closed")
    below = lane.channel("below")
    assert below.all_gather(torch.tensor([1])).wait().tolist() == [1] * transport.world_size
    done = lane.all_gather(torch.tensor([2]))
    done.wait()
    transport.all_gather(torch.zeros(1)).wait()
    lane.close()
    lane.close()
    for closed in (lane, below):
        with pytest.raises(TransportClosed, match=r"'(closed|below)' was closed"):
            closed.all_gather(torch.zeros(1))
        with pytest.raises(TransportClosed):
            closed.channel("more")
    assert done.wait().tolist() == [2] * transport.world_size
    assert transport.all_gather(torch.tensor([3])).wait().tolist() == [3] * transport.world_size


def held() -> tuple[int, int, int]:
    """Threads and files of this process, and the number that MPI gives to the next communicator."""
    number = 0
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        next_one = MPI.COMM_SELF.Dup()
        number = next_one.py2f()
        next_one.Free()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), number


def check_closed_channels_hold_nothing(transport: Transport) -> None:
    n = transport.world_size
    results: list[Pending] = []
    for step in range(12):
        lane = transport.channel("short-lived", check_sizes=step % 2 == 0)
        below = lane.channel("below")
        for each in (lane, below):
            results.append(each.all_gather(torch.tensor([step])))
            assert results[-1].wait().tolist() == [step] * n
        if step == 1:
            lane.all_gather(torch.tensor([step]))  # nobody waits for it
        transport.all_gather(torch.zeros(1)).wait()
        lane.close()
        if step == 3:
            before = held()
    transport.all_gather(torch.zeros(1)).wait()  # all have closed theirs
    if isinstance(transport, HostTransport) and not isinstance(transport._wire, LocalWire):
        deadline = time.monotonic() + 3  # threads that carry CUDA tensors end by themselves
        while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)
        assert not any(channel.name == "short-lived" for channel in transport._channels)


def check_a_channel_closed_while_another_thread_uses_it_is_an_error_of_that_name(transport: Transport) -> None:
    if transport.world_size > 1:  # ranks close at different times, so that peers would wait for each other
        return
    errors: list[BaseException] = []

    def use(lane: Transport) -> None:
        try:
            while True:
                lane.all_gather(torch.zeros(1)).wait()
        except BaseException as error:
            errors.append(error)

    for step in range(20):
        lane = transport.channel("hurried")
        thread = threading.Thread(target=use, args=(lane,), daemon=True)
        thread.start()
        time.sleep(0.001 * step)
        lane.close()
        thread.join(10)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [TransportClosed] * 20, errors


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


# What leaves transfers unfinished, so that a process may not be able to end normally.
LATE_CHECKS: list[Callable[[Transport], None]] = [
    value for name, value in sorted(globals().items()) if name.startswith("late_check_")
]
CHECKS: list[Callable[[Transport], None]] = [
    value for name, value in sorted(globals().items()) if name.startswith("check_")
]


def main(backend: str, which: str) -> None:
    """Run every check on this rank."""
    if backend == "process_group":
        torch.distributed.init_process_group("gloo")
    transport = connect(backend, timeout_s=20 if which == "all" else 4)
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
