"""Keeps torch's operations of a background thread on that thread, beside a busy trainer (paper, section 3.1).

Torch splits an operation on host memory between cores by OpenMP, which gives every thread that asks for it helpers of
its own. When the operation is over they wait for the next one without sleeping, for milliseconds: three helpers take
three cores from trainers that launch kernels, for a sort that one core does in less than one.
"""

from __future__ import annotations

import ctypes

import torch


def use_one_core() -> None:
    """Have torch's operations on the calling thread use no other, whatever `torch.set_num_threads` says for others.

    Torch itself can only change this for all threads that begin later. Where torch was built without OpenMP, nothing
    changes.

    Example:
        >>> import threading
        >>> counts = []
        >>> thread = threading.Thread(target=lambda: (use_one_core(), counts.append(torch.get_num_threads())))
        >>> thread.start()
        >>> thread.join()
        >>> counts
        [1]
    """
    torch.get_num_threads()  # the first call in a thread sets the number for it, as one to an operation would later
    limit = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if limit is not None:
        limit(ctypes.c_int(1))
