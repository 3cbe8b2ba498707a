"""What the command lines of this folder share: types of arguments, mistakes, files of figures (beside the paper)."""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .launch import LaunchError

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")


def status_of(command: Callable[[], int | None]) -> int:
    """Run a command.

    Returns:
        Its exit status; 2 for a mistake or a file that fails, 1 for a rank that fails, told in one line.
    """
    try:
        return command() or 0
    except (ValueError, OSError, LaunchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1 if isinstance(error, LaunchError) else 2


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


def over_zero(text: str) -> float:
    """Read a number over 0, as `type=`.

    Raises:
        argparse.ArgumentTypeError: Not a number over 0.

    Example:
        >>> over_zero("1.5")
        1.5
    """
    if not (value := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be a number over 0, got {text!r}")
    return value


def seconds(text: str) -> float:
    """Read how long something may take, as `type=`; "inf" is no limit.

    Raises:
        argparse.ArgumentTypeError: Not a number of at least 0.
    """
    if not (value := _number(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def file_and_column(text: str) -> tuple[str, str]:
    """Divide `path:column`, either of which may have colons: the longest path that exists is taken, wildcards too.

    Returns:
        Path and column, which is empty where none is named. Where no such path exists, the last colon divides, unless
        what follows it looks like a part of a path (as in s3://bucket/file).

    Example:
        >>> file_and_column("missing.parquet:uih_page")
        ('missing.parquet', 'uih_page')
    """
    ends = [len(text), *(place for place in range(len(text) - 1, -1, -1) if text[place] == ":")]
    for end in ends:
        if Path(text[:end]).exists() or glob.glob(text[:end]):
            return text[:end], text[end + 1 :]
    path, colon, column = text.rpartition(":")
    return (path, column) if colon and "/" not in column else (text, "")


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


def picture_file(text: str) -> Path:
    """As `output_file`, for pictures: the ending names the format.

    Raises:
        argparse.ArgumentTypeError: The file cannot be written there, or has another ending than these.
    """
    if Path(text).suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"must end with one of {', '.join(_PICTURES)}, got {text!r}")
    return output_file(text)


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


def write_figures(path: Path, found: Any) -> None:
    """Write measurements as JSON.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def input_files(paths: Sequence[Path], needed: Sequence[str]) -> list[dict[str, Any]]:
    """Read what --json wrote.

    Args:
        paths: Of the files.
        needed: Keys that each must have.

    Raises:
        ValueError: One is no file, no JSON, or lacks a key; names it.
    """
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--read must name files that --json wrote, {path} is none: {error}") from error
        if not isinstance(read, dict) or (missing := [key for key in needed if key not in read]):
            lacks = "no object" if not isinstance(read, dict) else f"{', '.join(missing)} missing"
            raise ValueError(f"--read must name files that --json wrote, {path} is none: {lacks}")
        found.append(read)
    return found


def read_parameters(name: str, text: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """Read `key=number,…` over defaults, which also say what keys there are.

    Raises:
        ValueError: Another key, or not a number.

    Example:
        >>> read_parameters("zipf", "rows=50", {"exponent": 1.05, "rows": 1e7})
        {'exponent': 1.05, 'rows': 50.0}
    """
    values = dict(defaults)
    for part in filter(None, text.split(",")):
        key, _, number = part.partition("=")
        if key not in values:
            raise ValueError(f"{name} has parameters {', '.join(values)}, not {key!r}")
        try:
            values[key] = float(number)
        except ValueError:
            raise ValueError(f"{name}: {key} must be a number, got {number!r}") from None
    return values
