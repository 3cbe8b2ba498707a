"""One command for each question that a user or the paper asks: `python -m freescale.bench.NAME --help`.

A command is a file with `main`; what its ranks run ends with _rank, plots of its figures with _plot, its tables with
_report. Results lie in results/, dated, with their hardware and command. Start with `inspect`, `demo` and `report`.
"""

import importlib.util
import sys

# `python -m freescale.bench.x` comes by here before it imports anything of the command: a line instead of a traceback
if sys.argv[:1] == ["-m"] and importlib.util.find_spec("rich") is None:
    sys.exit(
        "error: the commands of freescale.bench need rich, and matplotlib for pictures: pip install rich matplotlib"
    )
