"""Jagged-tensor operations: copy ranges of rows from one buffer to another (paper, section 4.2).

reference.py defines each operation plainly; jagged.py is what users call, ops.py registers it, shapes.py is the door of
both. On the host NumPy and Arrow do it (host_jagged.py, host_rows.py, host_copy.py) or FBGEMM (host_fbgemm.py), after
checks (host_checks.py), on a GPU Triton (device_jagged.py, copy_ranges.py, copy_narrow.py). sum_*.py and update_rows.py
are for the embeddings: add rows up in a fixed order, and take an optimizer's step on some. one_core.py and traced.py
are for threads and steps of balancer and embeddings alike.
"""

from .bucketize import Buckets, bucketize_rows
from .host_copy import gather_ranges
from .jagged import combine_ranges, dispatch_ranges, permute_jagged, transpose_keyed

__all__ = [
    "Buckets",
    "bucketize_rows",
    "combine_ranges",
    "dispatch_ranges",
    "gather_ranges",
    "permute_jagged",
    "transpose_keyed",
]
