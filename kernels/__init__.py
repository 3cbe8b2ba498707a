"""Jagged-tensor operations: copy ranges of rows from one buffer to another (paper, section 4.2)."""

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
