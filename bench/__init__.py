"""One command for each question that a user or the paper asks: `python -m freescale.bench.NAME --help`.

A command is a file with `main`; what ranks run ends with _rank, pictures with _plot, tables with _report. Results
lie in results/, dated, with their hardware and command. `inspect`, `demo` and `report` are where to start.
"""

import importlib.util
import sys

# `python -m freescale.bench.x` comes by here before it imports anything of the command: a line instead of a traceback
if sys.argv[:1] == ["-m"] and importlib.util.find_spec("rich") is None:
    sys.exit(
        "error: the commands of freescale.bench need rich, and matplotlib for pictures: pip install rich matplotlib"
    )
