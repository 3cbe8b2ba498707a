"""The contract on threads, and what only threads can do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from freescale.transport import (
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
    local_group,
)

from rank_threads import run_in_threads
from transport_contract import CHECKS, LATE_CHECKS


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("check", CHECKS + LATE_CHECKS, ids=lambda check: check.__name__)
def test_threads_keep_the_contract(check: Callable[[Transport], None], world_size: int) -> None:
    run_in_threads(world_size, check)


def test_a_timeout_names_all_missing_ranks() -> None:
    transports = local_group(4, timeout_s=0.2)
    run_in_threads(2, lambda t: None, transports=transports[:2])
    with pytest.raises(TransportTimeout, match=r"all_gather #0 .* missing: ranks \[1, 2, 3\]"):
        transports[0].all_gather(torch.zeros(1)).wait()


def test_a_rank_that_leaves_is_an_error_at_once() -> None:
    transports = local_group(3, timeout_s=200)
    pending = transports[0].all_gather(torch.zeros(1))
    transports[2].all_gather(torch.zeros(1))
    threading.Timer(0.1, transports[1].close).start()
    with pytest.raises(TransportError, match="rank 1 has left: it closed the channel"):
        pending.wait()


def test_closing_from_another_thread_ends_a_wait() -> None:
    transport = local_group(2, timeout_s=200)[0]
    pending = transport.all_gather(torch.zeros(1))
    threading.Timer(0.1, transport.close).start()
    with pytest.raises(TransportClosed):
        pending.wait()


def test_who_comes_while_another_thread_is_at_closing_hears_that_it_is_closed() -> None:
    transport = local_group(2, timeout_s=30)[0]
    pending = transport.all_gather(torch.zeros(1))
    transport._turn.lock.acquire()  # type: ignore[attr-defined]  # as that thread has, which gets no core for a while
    transport.close()
    for use in (lambda: transport.all_gather(torch.zeros(1)), pending.wait, lambda: transport.channel("more")):
        with pytest.raises(TransportClosed, match="channel 'main' was closed"):
            use()


def test_what_is_under_way_on_a_closed_channel_is_an_error_and_holds_nothing() -> None:
    transport = local_group(2, timeout_s=30)[0]
    pending = transport.all_gather(torch.zeros(1))
    transport.close()
    assert pending.test()
    assert pending._data is None  # type: ignore[attr-defined]  # there is no public view of it
    with pytest.raises(TransportClosed, match="all_gather #0 on channel 'main': channel 'main' was closed"):
        pending.wait()
    with pytest.raises(TransportClosed):
        transport.channel("more")


def test_memory_of_a_finished_exchange_is_let_go() -> None:
    transports = local_group(2)

    def run(transport: Transport) -> None:
        for _ in range(50):
            transport.all_gather(torch.zeros(10)).wait()

    run_in_threads(2, run, transports=transports)
    assert transports[0]._wire._meeting.posted == {}  # type: ignore[attr-defined]  # there is no public view of it


def test_more_than_2_gib_between_threads_arrive() -> None:
    size = 2**31 + 4096

    def run(transport: Transport) -> int:
        rows = torch.zeros(size if transport.rank == 0 else 0, dtype=torch.int8)
        rows[-4096:] = 7
        splits = ([0, size], [0, 0]) if transport.rank == 0 else ([0, 0], [size, 0])
        out = transport.all_to_all(rows, *splits).wait()
        return int(out[-5000:].sum())

    assert run_in_threads(2, run, timeout_s=250) == [0, 7 * 4096]
