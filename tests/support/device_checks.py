"""What engines for CUDA tensors promise beyond the contract.

As a script: `python device_checks.py HOST ENGINE CHECK…` runs checks on the ranks it was started on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from freescale.transport import Pending, Transport, TransportError, TransportTimeout
from freescale.transport.lane import HostTransport

from case_report import run_cases
from device_contract import connect_device, set_deadline, timed
from host_streams import HostStreams

MIB = 1 << 20
# Occupies every multiprocessor to the last thread, for so long.
_SPIN = """
extern "C" __global__ void __launch_bounds__(1024) spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""


def fill_multiprocessors() -> Callable[[float], None]:
    """A function that keeps all multiprocessors of the current device busy for a number of seconds."""
    kernel = torch.cuda._compile_kernel(_SPIN, "spin")
    num = torch.cuda.get_device_properties().multi_processor_count

    def fill(seconds: float) -> None:
        kernel(grid=(2 * num, 1, 1), block=(1024, 1, 1), args=[int(seconds * 1e9)])

    fill(1e-4)
    torch.cuda.synchronize()
    return fill


def expect(transport: Transport, out: Tensor, size: int, step: int) -> None:
    """What `pattern` made on the peer arrived."""
    pieces = out.reshape(transport.world_size, size)
    for peer in range(transport.world_size):
        wanted = torch.arange(size, dtype=torch.int32, device="cuda") + 1000 * peer + step + transport.rank
        assert torch.equal(pieces[peer], wanted), (peer, step)


def pattern(transport: Transport, size: int, step: int) -> Tensor:
    """Rows that name their sender, their receiver and the step."""
    base = torch.arange(size, dtype=torch.int32, device="cuda") + 1000 * transport.rank + step
    return torch.cat([base + peer for peer in range(transport.world_size)])


def exchange(transport: Transport, rows: Tensor) -> Tensor:
    """An all_to_all of equal pieces, waited for."""
    splits = [len(rows) // transport.world_size] * transport.world_size
    return transport.all_to_all(rows, splits, splits).wait()


def check_streams_order_what_hosts_do_not_wait_for(transport: HostTransport) -> None:
    lane = transport.channel("ordered", check_sizes=False)
    exchange(lane, pattern(lane, 16, 0))
    size = 3 * MIB
    outs = []
    for step in range(2):  # a kernel that is loaded while a stream waits blocks the host
        torch.cuda._sleep(20_000)
        rows = pattern(lane, size, step)
        out = exchange(lane, rows) + 0
        rows.fill_(-1)
        expect(lane, out, size, step)
    torch.cuda.synchronize()
    transport.all_gather(torch.zeros(1)).wait()
    if lane.rank == 0:
        time.sleep(1.0)
    begun = time.monotonic()
    for step in range(6):
        torch.cuda._sleep(20_000_000)  # rows are not there yet when the call is made
        rows = pattern(lane, size, step)
        out = exchange(lane, rows)
        rows.fill_(-1)  # after the wait they are the caller's again
        outs.append(out + 0)
        out.fill_(-2)
    seconds = time.monotonic() - begun
    assert seconds < 0.5, f"the host was blocked for {seconds:.2f} s"
    for step, out in enumerate(outs):
        expect(lane, out, size, step)


def check_many_uneven_messages_arrive(transport: HostTransport) -> None:
    lane, n = transport.channel("uneven", check_sizes=False), transport.world_size
    generator = torch.Generator().manual_seed(5)
    results = []
    for step in range(60):
        most = [3, 5000, 3 * MIB, 20 * MIB][step % 4]
        splits = torch.randint(0, most, (n, n), generator=generator)
        splits[splits < most // 8] = 0
        sent, received = splits[lane.rank].tolist(), splits[:, lane.rank].tolist()
        rows = torch.cat(
            [
                torch.arange(k, dtype=torch.int32, device="cuda") * 7 + 13 * lane.rank + peer + step
                for peer, k in enumerate(sent)
            ]
        )
        results.append((lane.all_to_all(rows, sent, received), received, step))
        if len(results) == 5:
            verify(lane, results)
    verify(lane, results)


def verify(lane: Transport, results: list[tuple[Pending, list[int], int]]) -> None:
    for pending, received, step in results:
        pieces = pending.wait().split(received)
        for peer, piece in enumerate(pieces):
            wanted = torch.arange(len(piece), dtype=torch.int32, device="cuda") * 7 + 13 * peer + lane.rank + step
            assert torch.equal(piece, wanted), (peer, step)
    results.clear()


def check_more_than_2_gib_arrive(transport: HostTransport) -> None:
    lane = transport.channel("large", check_sizes=False)
    size = 2**31 + 4096
    rows = torch.zeros(size, dtype=torch.int8, device="cuda")
    rows[:100], rows[-100:] = 1 + lane.rank, 3 + lane.rank
    sent, received = [0] * lane.world_size, [0] * lane.world_size
    if lane.rank == 0:
        sent[1] = size
    if lane.rank == 1:
        received[0] = size
    out = lane.all_to_all(rows if lane.rank == 0 else rows[:0], sent, received).wait()
    if lane.rank == 1:
        assert bool((out[:100] == 1).all())
        assert bool((out[-100:] == 3).all())
        assert not bool(out[100:-100].any())


def check_a_transfer_needs_no_multiprocessor(transport: HostTransport) -> None:
    lane = transport.channel("beside compute", check_sizes=False)
    fill = fill_multiprocessors()
    size = 4 * MIB
    rows = pattern(lane, size, 1)
    exchange(lane, rows)
    # What a rank keeps is copied within its GPU, which does need multiprocessors.
    splits = [0 if peer == lane.rank else size for peer in range(lane.world_size)]
    rows = rows[: sum(splits)]
    lane.all_to_all(rows, splits, splits).wait()
    torch.cuda.synchronize()
    transport.all_gather(torch.zeros(1)).wait()
    compute = torch.cuda.Stream()
    ended, side = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(compute):
        fill(1.0)
        ended.record()
    time.sleep(0.05)
    with torch.cuda.stream(side):
        pending = lane.all_to_all(rows, splits, splits)
        out = pending.wait()
        arrived = torch.cuda.Event()
        arrived.record()
    arrived.synchronize()
    assert not ended.query(), "the transfer waited for a multiprocessor"
    torch.cuda.synchronize()
    for number, peer in enumerate(peer for peer in range(lane.world_size) if peer != lane.rank):
        place = lane.rank - (lane.rank > peer)
        wanted = torch.arange(size, dtype=torch.int32, device="cuda") + 1000 * peer + 1 + place
        assert torch.equal(out[number * size : number * size + size], wanted)


def check_ranks_that_come_together_copy_a_piece_each(transport: HostTransport) -> None:
    """And both see it alike; where one comes late, it copies both pieces."""
    device = transport_device(transport)
    lane = transport.channel("together", check_sizes=False)
    assert isinstance(lane, HostTransport)
    size = (1 if device.type == "cpu" else 16) * MIB
    as_it_is, patient, one_late = range(8), range(8, 16), range(16, 24)
    seen = torch.zeros(2, len(one_late) * 3, dtype=torch.int64)  # both copied; the other copied for this rank
    for step in (*as_it_is, *patient, *one_late):
        if step not in as_it_is:
            meetings = lane._wire._engine._meetings  # type: ignore[attr-defined]  # a CopyEngine's
            meetings._patience_s = 20.0 if step in patient else 0.02
        rows = torch.arange(2 * size, dtype=torch.int32, device=device) + 1000 * lane.rank + step
        transport.all_gather(torch.zeros(1)).wait()
        if step in one_late and step % 2 == lane.rank:
            transport.all_gather(torch.zeros(1)).wait()  # until the other has come, and has looked in vain
        pending = lane.all_to_all(rows, [size, size], [size, size])
        if step in one_late and step % 2 != lane.rank:
            transport.all_gather(torch.zeros(1)).wait()
        met = pending._exchange.join._transfer.met  # type: ignore[attr-defined]  # a CopyEngine's
        seen[:, step] = torch.tensor([met[0].both_here, met[0].is_first])
        for peer, piece in enumerate(pending.wait().cpu().split(size)):
            wanted = torch.arange(size, dtype=torch.int32) + size * lane.rank + 1000 * peer + step
            assert torch.equal(piece, wanted), (peer, step)
    views = transport.all_gather(seen[None]).wait()
    both, first = views[:, 0], views[:, 1]
    assert torch.equal(both[0], both[1]), "one thinks that both copied, the other does not"
    assert torch.equal(first.sum(0), 1 - both[0]), "where not both copied, one was first"
    assert first[0, one_late.start :].tolist() == [step % 2 for step in one_late], "the late one copies both"
    together, with_patience = (int(both[0, steps.start : steps.stop].sum()) for steps in (as_it_is, patient))
    print(f"both copied in {together} of 8 meetings, in {with_patience} of 8 with more patience", flush=True)
    assert with_patience == 8, "ranks that come together do not copy a piece each"


def check_a_profile_shows_copies_alone(transport: HostTransport) -> None:
    lane = transport.channel("profiled", check_sizes=False)
    rows = pattern(lane, 8 * MIB, 1)
    exchange(lane, rows)
    torch.cuda.synchronize()
    splits = [8 * MIB] * lane.world_size
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            lane.all_to_all(rows, splits, splits).wait()
        torch.cuda.synchronize()
    names = {event.name for event in found.events() if event.device_type.name == "CUDA"}
    print("profiled:", sorted(names), flush=True)
    assert names, "the profiler saw something"
    assert all(name.startswith("Memcpy") for name in names), names


def check_a_rank_that_never_comes_is_raised_at_the_next_call(transport: HostTransport) -> None:
    lane = transport.channel("late", check_sizes=False)
    exchange(lane, pattern(lane, 1024, 0))
    torch.cuda.synchronize()
    short = lane.channel("short", check_sizes=False)
    assert isinstance(short, HostTransport)
    exchange(short, pattern(lane, 1024, 0))
    torch.cuda.synchronize()
    short.timeout_s = 1.5
    set_deadline(short._wire._engine, 1.5)  # type: ignore[attr-defined]  # a DeviceWire
    if lane.rank == 0:
        begun = time.monotonic()
        out = exchange(short, pattern(lane, 64 * 1024, 0))
        assert time.monotonic() - begun < 0.5
        torch.cuda.synchronize()  # ends, although nothing arrived
        assert 0.5 < time.monotonic() - begun < 6
        assert out.numel()
        with pytest.raises(TransportError, match=r"missing: ranks|not moved the data"):
            exchange(short, pattern(lane, 16, 0))
    else:
        time.sleep(4)
        with pytest.raises(TransportError):
            exchange_again_and_again(short)
    transport.all_gather(torch.zeros(1)).wait()
    exchange(lane, pattern(lane, 1024, 3))
    torch.cuda.synchronize()


def exchange_again_and_again(lane: Transport) -> None:
    for _ in range(30):
        exchange(lane, pattern(lane, 16, 0))
        torch.cuda.synchronize()
        time.sleep(0.1)


def check_a_killed_peer_is_raised_at_the_next_call(transport: HostTransport) -> None:
    lane = transport.channel("killed", check_sizes=False)
    exchange(lane, pattern(lane, 1024, 0))
    torch.cuda.synchronize()
    if lane.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    out = exchange(lane, pattern(lane, 64 * 1024, 0))
    begun = time.monotonic()
    torch.cuda.synchronize()
    assert out.numel()
    assert time.monotonic() - begun < 8
    with pytest.raises(TransportError) as caught:
        exchange(lane, pattern(lane, 16, 0))
    print("raised", type(caught.value).__name__, caught.value, flush=True)


def check_channels_do_not_wait_for_each_other(transport: HostTransport) -> None:
    first = transport.channel("first", check_sizes=False)
    second = transport.channel("second", check_sizes=False)
    size = 1 * MIB
    for lane in (first, second):
        exchange(lane, pattern(lane, size, 0))
    torch.cuda.synchronize()
    lanes = [first, second] if transport.rank == 0 else [second, first]
    results = []
    for step in range(20):
        for lane in lanes:
            splits = [size] * lane.world_size
            results.append((lane.all_to_all(pattern(lane, size, step), splits, splits), lane, step))
    for pending, lane, step in results:
        expect(lane, pending.wait(), size, step)


def check_new_channels_wait_for_no_stream(transport: HostTransport) -> None:
    """Each rank has a stream that waits for the other, whose thread comes later; meanwhile a third channel begins.

    If that had to register memory, CUDA would wait for the streams first and let no thread enqueue what they wait for.
    """
    device = transport_device(transport)
    lanes = [transport.channel(f"new {number}", check_sizes=False) for number in range(3)]
    size = 1 if device.type == "cpu" else 1024  # small enough to go through slots
    rows = [torch.arange(size * lane.world_size, device=device) + 7 * lane.rank + k for k, lane in enumerate(lanes)]
    outs = [torch.zeros_like(each) for each in rows]
    splits = [size] * transport.world_size
    for number in (0, 2):
        lanes[number].all_to_all(rows[number], splits, splits, outs[number]).wait()
    transport.all_gather(torch.zeros(1)).wait()
    late = 2 if transport.rank == 0 else 0
    naps = {late: 0.6, 1: 0.2, 2 - late: 0.0}

    def work(number: int) -> None:
        with own_stream(device) as has_ended:
            time.sleep(naps[number])
            lanes[number].all_to_all(rows[number], splits, splits, outs[number]).wait()
            has_ended()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a channel waits for a stream"
    for number in range(3):
        first = torch.arange(size) + size * transport.rank + number
        wanted = torch.cat([first + 7 * peer for peer in range(transport.world_size)])
        assert torch.equal(outs[number].cpu(), wanted), number


def transport_device(transport: HostTransport) -> torch.device:
    """Where its engine's tensors are; threads as streams then behave like CUDA in what they wait for."""
    if transport._wire.devices == ("cpu",):
        HostStreams.synchronises = True
        transport._wire._engine._window_bytes = 96 * MIB  # type: ignore[attr-defined]  # a ThreadsWire
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def own_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """Around what a thread enqueues. Gives a function that waits for it, which blocks no other thread's CUDA calls."""
    if device.type == "cpu":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)

    def wait() -> None:
        done, deadline = stream.record_event(), time.monotonic() + 60
        while not done.query():
            assert time.monotonic() < deadline, "nothing arrived"
            time.sleep(0.0002)

    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield wait


def main(host: str, engine: str, *names: str) -> None:
    transport = connect_device(host, engine, 60)
    run_cases({name: partial(timed, globals()[f"check_{name}"], transport) for name in names})
    print("all passed", flush=True)
    with suppress(TransportTimeout):
        transport.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
