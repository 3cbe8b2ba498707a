"""What every transport must do with channels: threads, names, closing. Part of `transport_contract.py`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freescale.transport import Pending, Transport, TransportClosed, TransportError
from freescale.transport.lane import HostTransport
from freescale.transport.local import LocalWire

from known_rows import column, expected_rows, make_splits, same_bytes


def in_threads(count: int, work: Callable[[int], None], timeout_s: float) -> None:
    """Do work 0, 1, … each in a thread of its own; what one raises, or does not end, is a failure."""
    wrong: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not wrong, wrong
    assert not any(thread.is_alive() for thread in threads), "a thread waits for another one's channel"


def check_channels_in_threads_do_not_disturb_each_other(transport: Transport) -> None:
    channels = [transport.channel(f"lane {i}", check_sizes=i % 2 == 0) for i in range(3)]

    def work(number: int) -> None:
        for step in range(15):
            if (number + step + transport.rank) % 4 == 0:
                time.sleep(0.001)
            splits = make_splits(100 * number + step, transport.world_size)
            rows, expected = expected_rows(1000 * number + step, splits, transport.rank)
            sent, received = splits[transport.rank], column(splits, transport.rank)
            assert same_bytes(channels[number].all_to_all(rows, sent, received).wait(), expected), (number, step)

    in_threads(3, work, 60)


def check_threads_make_channels_at_once_in_any_order(transport: Transport) -> None:
    rank, n = transport.rank, transport.world_size
    parents = [transport.channel(f"parent {number}") for number in range(2)]

    def work(number: int) -> None:
        for step in range(3):
            if (rank + number + step) % 2:  # each rank begins with another one, long before it comes to this
                time.sleep(0.2)
            first = 100 * number + 10 * step
            lane = parents[number].channel(f"made {number} {step}")
            got = lane.all_gather(torch.tensor([first + rank])).wait()
            assert got.tolist() == [first + peer for peer in range(n)], (number, step)
            parents[number].all_gather(torch.zeros(1)).wait()
            lane.close()

    in_threads(2, work, 60)
    transport.all_gather(torch.zeros(1)).wait()
    for parent in parents:
        parent.close()


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
    assert isinstance(shared, HostTransport)
    deadline = time.monotonic() + 60
    while shared._turn._holder != thread.ident and time.monotonic() < deadline:  # it has the lock and has said so
        time.sleep(0.001)
    with pytest.raises(TransportError, match="'shared one' is in use by thread 'waiter'"):
        shared.all_gather(torch.tensor([0]))
    transport.all_gather(torch.zeros(1)).wait()
    thread.join(60)
    assert results[0].tolist() == list(range(transport.world_size)), "the thread that held the channel goes on"


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
        deadline = time.monotonic() + 60  # threads that carry CUDA tensors end by themselves
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
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [TransportClosed] * 20, errors
