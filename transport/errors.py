"""Everything that a transport raises, drawn as a tree (paper, section 3.3).

    TransportError            the network, or a peer, did not do what was agreed
    ├── TransportTimeout      a wait passed its deadline
    ├── SizeMismatch          two ranks disagree about the size of a message
    ├── TransportClosed       the transport was closed, here or by an earlier failure
    └── Unavailable           the backend is not installed, or cannot run here; the message says what to install

Wrong arguments are ValueError and TypeError, raised before anything moves.
"""


class TransportError(RuntimeError):
    """The network, or a peer, did not do what was agreed. The channel cannot be used afterwards."""


class TransportTimeout(TransportError):
    """A wait passed its deadline."""


class SizeMismatch(TransportError):
    """Two ranks disagree about the size of a message; raised on both."""


class TransportClosed(TransportError):
    """The transport was closed, here or by an earlier failure."""


class Unavailable(TransportError):
    """The backend is not installed, or cannot run here; the message says what to install or change."""
