"""Shows on a terminal that a command works, and how far it is; a log gets nothing of it (beside the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show a bar below what is printed, until the block ends.

    Args:
        console: What the block prints on, too.
        what: Is done, in a few words.
        total: Steps, if they are known; else the bar counts the seconds, twice each.

    Yields:
        To be called after each step.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    by_itself = total is None  # what is timed in this process shall not share it with a thread that draws
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=by_itself,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance() -> None:
            bar.update(task, advance=1, refresh=True)

        yield advance
