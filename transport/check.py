"""`python -m freescale.transport.check`: which transports can run here, and what to do for the others (section 3.3)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from .findings import Finding, find_all

_BACKENDS = ("process_group", "mpi", "copy_engine", "verbs")
_EPILOG = """examples:
  python -m freescale.transport.check
  python -m freescale.transport.check --need mpi verbs && mpiexec -n 16 python train.py
  mpiexec -n 2 --map-by node python -m freescale.transport.check --json

It looks at the host that it runs on, alone; it joins no ranks and moves nothing. "ok": can be used; "note": could be
better, or is not needed; "missing": this transport cannot run. `connect("local")` needs nothing.

Exit status: 0; 1 where something is missing for a transport named by --need; 2 for a mistake in the arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 1 where a transport that is needed cannot run."""
    options = _parser().parse_args(arguments)
    findings = []
    for finding in find_all():
        findings.append(finding)
        if not options.json:
            sys.stdout.write(describe(finding) + "\n")
            sys.stdout.flush()
    lacking = sorted({each.backend for each in findings if each.state == "missing"} & set(options.need))
    if options.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=1) + "\n")
    if lacking:
        sys.stderr.write(f"error: cannot run here: {', '.join(lacking)}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.transport.check",
        description="Say what this machine has for each transport, what it means, and what to do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--need", nargs="+", choices=_BACKENDS, default=[], help="fail where one of these cannot run")
    parser.add_argument("--json", action="store_true", help="print JSON instead: a list with one object a line of text")
    return parser


def describe(finding: Finding) -> str:
    """Say a finding in two or three lines.

    Example:
        >>> print(describe(Finding("mpi", "missing", "no mpi4py", "connect('mpi') cannot run", "pip install mpi4py")))
        missing  mpi            no mpi4py
                                connect('mpi') cannot run
                                -> pip install mpi4py
    """
    lines = [f"{finding.state:8} {finding.backend:14} {finding.found}", finding.meaning]
    if finding.action:
        lines.append(f"-> {finding.action}")
    return f"\n{'':24}".join(lines)


if __name__ == "__main__":
    sys.exit(main())
