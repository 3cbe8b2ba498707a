"""What every transport must do where ranks disagree or are late. Part of `transport_contract.py`."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
import torch

from freescale.transport import SizeMismatch, Transport, TransportClosed, TransportError, TransportTimeout
from freescale.transport.lane import HostTransport
from freescale.transport.local import LocalWire

from contract_channels import held
from patience import hurry_gloo


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
        lane = hurried_channel(transport, "late", check_sizes)
        assert isinstance(lane, HostTransport)
        if transport.rank == 1:
            waited = transport.all_gather(torch.tensor([False])).wait()
            lane.timeout_s = 1.0
            # It may complete, or time out, or a backend may say that the others have given up.
            with suppress(TransportError):
                lane.all_gather(torch.zeros(1)).wait()
        else:
            waits = waits_in_vain(lane, check_sizes)
            waited = transport.all_gather(torch.tensor([waits])).wait()
        assert waited.any(), "who came first has nobody who could have given up before"


def waits_in_vain(lane: HostTransport, check_sizes: bool) -> bool:
    """Whether the late rank is a timeout; otherwise another one has given up before this one came."""
    lane.timeout_s = 0.3
    begun = time.monotonic()
    with pytest.raises(TransportError) as caught:
        lane.all_gather(torch.zeros(1)).wait()
    text = str(caught.value)
    assert text.startswith("all_gather #1 on channel 'late': ")
    with pytest.raises(TransportClosed, match=re.escape(text)):
        lane.all_gather(torch.zeros(1))
    if not isinstance(caught.value, TransportTimeout):
        return False
    assert re.search(f"rank {lane.rank} of .* waited 0.3 s, .*missing", text)
    assert time.monotonic() - begun >= 0.3
    if check_sizes:  # others may be late too
        assert 1 in ranks_in(text)
    return True


def ranks_in(text: str) -> list[int]:
    """Those that are said to be missing."""
    found = re.search(r"missing: ranks \[([\d, ]+)\]", text)
    assert found, text
    return [int(rank) for rank in found[1].split(", ")]


def late_check_tests_have_a_deadline_too(transport: Transport) -> None:
    if transport.world_size == 1:
        return
    lane = hurried_channel(transport, "tested")
    assert isinstance(lane, HostTransport)
    if transport.rank == 0:
        lane.timeout_s = 0.2
        pending = lane.all_gather(torch.zeros(1))
        deadline = time.monotonic() + 60
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
    lane = hurried_channel(transport, "left")
    if transport.rank != 1:
        lane.all_gather(torch.zeros(1))
    lane.close()
    counts = isinstance(transport, HostTransport) and not isinstance(transport._wire, LocalWire)
    deadline = time.monotonic() + 60
    while True:
        is_given_back = not counts or all(now <= then for now, then in zip(held()[:2], before, strict=True))
        goes_on = torch.tensor([not is_given_back and time.monotonic() < deadline])
        if not transport.all_gather(goes_on).wait().any():
            break
        time.sleep(0.2)
        transport.channel("sweeping").close()
    assert is_given_back, (held(), before)


def hurried_channel(transport: Transport, name: str, check_sizes: bool | None = None) -> Transport:
    """One on which gloo, too, gives up soon what is under way."""
    lane = transport.channel(name, check_sizes)
    hurry_gloo(lane, 4)
    return lane
