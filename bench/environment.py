"""What a result came from: hardware, versions, command. A figure without them cannot be compared."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def environment(packages: tuple[str, ...] = ("torch", "numpy", "pyarrow")) -> dict[str, str]:
    """Describe this machine, its software and the running command.

    Args:
        packages: Distributions whose versions matter.

    Returns:
        Titles and values, in the order to print them.
    """
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores usable of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.2f} when it was written",
    }
    if torch.cuda.is_available():
        found["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = [f"{name} {_version(name)}" for name in packages]
    found["software"] = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, " + ", ".join(
        versions
    )
    found["command"] = command()
    return found


def command() -> str:
    """The command line that runs now, as one would type it."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"python -m {module.name}" if module is not None else f"python {Path(sys.argv[0]).name}"
    return shlex.join([*program.split(), *sys.argv[1:]])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
