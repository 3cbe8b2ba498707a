"""One table, two ways out: printed for people, and written to a dated Markdown file under bench/results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

_PIPE_WIDTH = 170
_LINE_WIDTH = 120


@dataclass
class Table:
    """A title, column heads and rows of text; the first column is left-aligned.

    Example:
        >>> table = Table("Sizes", ["name", "bytes"])
        >>> table.add("a", "1")
        >>> print(markdown(table))
        ### Sizes
        <BLANKLINE>
        | name | bytes |
        | --- | ---: |
        | a | 1 |
    """

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row, one cell a column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row needs {len(self.columns)} cells, got {len(cells)}")
        self.rows.append(cells)


def print_part(part: Table | str, console: Console) -> None:
    """Print a table or a paragraph."""
    if isinstance(part, Table):
        print_table(part, console)
    else:
        console.print(part, soft_wrap=True, highlight=False)


def print_table(table: Table, console: Console) -> None:
    """Print a table to a terminal or a pipe. Names are folded where a terminal is narrow; figures never are."""
    drawn = RichTable(title=table.title, title_justify="left", box=SIMPLE, pad_edge=False)
    for index, column in enumerate(table.columns):
        widest = max(len(text) for text in [*column.split(), *(row[index] for row in table.rows)])
        if index:
            drawn.add_column(column, justify="right", min_width=widest)
        else:
            drawn.add_column(column, overflow="fold", min_width=10)
    for row in table.rows:
        drawn.add_row(*row)
    needed = Measurement.get(console, console.options.update(width=_PIPE_WIDTH), drawn)
    available = console.width if console.is_terminal else _PIPE_WIDTH
    drawn.width = min(needed.maximum, max(needed.minimum, available))
    console.print(drawn, crop=False)


def markdown(table: Table) -> str:
    """The table as Markdown, under its title."""
    rows = [table.columns, ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"### {table.title}", "", *lines])


def _wrapped(text: str) -> str:
    """Break a paragraph of one line into lines; what has lines already stays."""
    return text if "\n" in text else textwrap.fill(text, _LINE_WIDTH)


def write_result(
    folder: Path, name: str, title: str, environment: Mapping[str, str], parts: Sequence[Table | str]
) -> Path:
    """Write tables, paragraphs and what they came from to `folder/YYYY-MM-DD-name.md`; one of the same day is replaced.

    Returns:
        The file.

    Raises:
        ValueError: The file cannot be written.
    """
    path = folder / f"{datetime.now(UTC):%Y-%m-%d}-{name}.md"
    about = [f"- {key}: `{value}`" if key == "command" else f"- {key}: {value}" for key, value in environment.items()]
    body = [_wrapped(part) if isinstance(part, str) else markdown(part) for part in parts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join([f"# {title}", "\n".join(about), *body]) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    return path


def picture_beside(plot: Path | None, folder: Path, title: str) -> list[str]:
    """The line that shows a picture in a result file, where the picture lies in the same folder; else nothing.

    Example:
        >>> picture_beside(Path("results/steps.png"), Path("results"), "steps")
        ['![steps](steps.png)']
    """
    beside = plot is not None and plot.parent.resolve() == folder.resolve()
    return [f"![{title}]({plot.name})"] if plot is not None and beside else []
