"""One collective of MPI under way: begun, looked after, waited for with naps and a deadline (paper, section 3.3)."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from .errors import TransportError
from .exchange import Exchange
from .mpi_messages import Messages
from .mpi_parting import Kept, Parting
from .roll import Column

if TYPE_CHECKING:
    from mpi4py import MPI

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00002, 0.001
_SHARE = 16  # of a long wait, at most, is a nap
_NAPS_BESIDE = (0.00025, 0.004, 4)  # the first, the longest of a short wait, and part of a long one
_AWAKE_S = 0.0005
_FAST_BYTES_PER_S, _SLOW_BYTES_PER_S = 8e9, 1e9
_LOOKS = 16  # one after the other, a few microseconds


class MpiTicket:
    """One non-blocking collective. MPI's own wait spins and has no deadline, so this one tests and naps.

    Args:
        exchange: What is exchanged.
        again: Whether the same exchange is begun again and again, so that it is described once.
        messages: Describes it to MPI.
        communicator: Where.
        parting: Tells of peers that failed.
        column: Counts this.
    """

    def __init__(
        self,
        exchange: Exchange,
        again: bool,
        messages: Messages,
        communicator: MPI.Intracomm,
        parting: Parting,
        column: Column,
    ) -> None:
        self._messages, self._parting, self._column = messages, parting, column
        self._exchange = exchange
        self._datatypes: list[MPI.Datatype] = []
        try:
            self._request = self._post(communicator, again)
        except messages.error_type as error:
            raise translate(error) from error
        self._number = column.begin()
        self.done = False
        self._is_new = True
        self._awake_until = self._expected_until = 0.0
        # MPI works on this memory until it is done, whatever becomes of us.
        self._keep = Kept(self._request, exchange)

    def _post(self, communicator: MPI.Intracomm, again: bool) -> MPI.Request:
        exchange = self._exchange
        if exchange.prepared is not None:
            return communicator.Ialltoallw(*exchange.prepared)
        (sent, received), self._datatypes = self._messages.describe(exchange)
        if again and not self._datatypes:  # those made for large pieces are freed afterwards
            exchange.prepared = sent, received
        return communicator.Ialltoallw(sent, received)

    def poll(self) -> bool:
        """See `Ticket.poll`."""
        if self.done:
            return True
        if self._is_new:  # MPI has just done what can be done at once
            self._is_new = False
            return False
        self._test()
        if not self.done:
            self._parting.raise_if_a_peer_failed()
        return self.done

    def _test(self) -> bool:
        try:
            self.done = self._request.Test()
        except self._messages.error_type as error:
            raise translate(error) from error
        if self.done:
            self._column.finish()
            self._keep.release()
            for datatype in self._datatypes:
                datatype.Free()
        return self.done

    def block(self, seconds: float) -> bool:
        """See `Ticket.block`."""
        exchange = self._exchange
        # Each look of another thread takes the interpreter from the trainer's: such a thread naps for longer, and first
        # for half of what it waited for in the step before. Peers that let us wait long are busy themselves, or nap.
        started = time.monotonic()
        if not self._expected_until:  # for all calls together
            size = exchange.source.nbytes + exchange.target.nbytes
            self._awake_until = started + _AWAKE_S + size / _FAST_BYTES_PER_S
            self._expected_until = started + size / _SLOW_BYTES_PER_S
        if threading.current_thread() is threading.main_thread():
            naps = _SHORTEST_NAP_S, _LONGEST_NAP_S, _SHARE
            return self._stay_awake(started, seconds) or self._nap(started, seconds, naps, self._expected_until)
        shortest_s, longest_s, share = _NAPS_BESIDE
        first_s = max(shortest_s, min(exchange.waited_s / 2, longest_s))
        return self._nap(started, seconds, (first_s, longest_s, share), started)

    def _stay_awake(self, started: float, seconds: float) -> bool:
        """Look often, for to fall asleep takes longer than to send 100 kB.

        After a few looks others may have the core: to yield it first costs a time slice on a busy host.
        """
        until, now = min(started + seconds, self._awake_until), started
        while now < until:
            for _ in range(_LOOKS):
                if self._test():
                    return True
            now = time.monotonic()
            self._column.look(now)
            self._parting.raise_if_a_peer_failed(now)
            os.sched_yield()
        return False

    def _nap(self, started: float, seconds: float, naps: tuple[float, float, int], expected_until: float) -> bool:
        """Look between naps.

        They are as short as the first until the message is overdue, as MPI moves bytes while it is looked at. Then they
        grow, to the longest or to a share of a long wait. A thread beside the trainer's expects none.
        """
        nap_s, longest_s, share = naps
        waited_s = time.monotonic() - started
        while waited_s < seconds:
            time.sleep(min(nap_s, seconds - waited_s))
            is_done, now = self._test(), time.monotonic()
            waited_s = self._exchange.waited_s = now - started
            self._column.look(now)
            if is_done:
                return True
            self._parting.raise_if_a_peer_failed(now)
            if now >= expected_until:
                nap_s = min(nap_s * 2, max(longest_s, waited_s / share))
        return False

    def missing(self) -> list[int] | None:
        """See `Ticket.missing`. A collective does not tell; what ranks of this host have counted does."""
        return self._column.missing(self._number)


def translate(error: MPI.Exception) -> TransportError:
    """What an error of MPI means here."""
    from mpi4py import MPI

    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TransportError(
            "MPI: a peer sent more bytes than expected, so ranks disagree about which operation this is or about its "
            f"size; connect with check_sizes=True to learn who and how ({error.Get_error_string()})"
        )
    return TransportError(f"MPI: {error.Get_error_string()}")
