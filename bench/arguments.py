"""Types of command-line arguments that the commands of this folder share (beside the paper)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


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


def output_file(text: str) -> Path:
    """Read the path of a file to write, as `type=`: a command shall not fail for it when its work is done.

    Makes the folder that it is to be in.

    Raises:
        argparse.ArgumentTypeError: The file cannot be written there.
    """
    path = Path(text)
    output_folder(str(path.parent))
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def output_folder(text: str) -> Path:
    """Read the path of a folder to write into, as `type=`; makes it.

    Raises:
        argparse.ArgumentTypeError: There is no such folder, and none can be made.
    """
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {error.strerror}") from None
    return Path(text)
