"""Types of command-line arguments that the commands of this folder share (beside the paper)."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """Read a count, as `type=` of an argparse argument.

    Raises:
        argparse.ArgumentTypeError: Not an integer of at least 1.

    Example:
        >>> at_least_one("12")
        12
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value
