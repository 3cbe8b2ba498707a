"""Runs what this machine allows and writes one page with plots, tables, hardware and commands (paper, section 5)."""

from __future__ import annotations

import argparse
import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .arguments import seconds, status_of
from .compute_fit import RESULTS
from .environment import environment
from .progress import progress
from .report_claims import claims
from .report_parts import EARLIER, Machine, Part, Ran, newest, pages_of, parts_for, run_part

try:
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from markupsafe import Markup
except ImportError as missing:  # torch brings the first, rich the second
    raise SystemExit(f"error: the report needs jinja2 and markdown-it-py: {missing}") from missing

_HERE = Path(__file__).parent
_TITLE = "FreeScale: the paper's evaluation"
_EPILOG = """examples:
  python -m freescale.bench.report                                       # what this machine allows, into out/report
  python -m freescale.bench.report --data data.parquet:uih_page --quick  # a few minutes, on your data
  python -m freescale.bench.report --only virtual_ranks simulate

The page holds its pictures and opens without anything beside it; PNGs and JSON files lie next to it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 if a part failed, or 2 for a mistake."""
    options = _parser().parse_args(arguments)
    console = Console(emoji=False, highlight=False)
    return status_of(lambda: _run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.report",
        description="Answer the paper's questions on this machine, and write one self-contained page.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", metavar="SOURCE", help="path.parquet:column of histories to look at too")
    parser.add_argument("--output", type=Path, default=Path("out/report"), metavar="FOLDER", help="default out/report")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run; the others only by earlier results")
    parser.add_argument("--quick", action="store_true", help="a few minutes in all")
    parser.add_argument("--limit-s", type=seconds, default=1e5, metavar="S", help="start no part after S seconds")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parts = chosen(parts_for(Machine(gpus, options.data, options.quick), folder, options.only), options.only)
    done = []
    started, page = time.monotonic(), folder / "index.html"
    with progress(console, "parts", len(parts)) as advance:
        for part in parts:
            if not part.lacks and time.monotonic() - started >= options.limit_s:
                part = replace(part, lacks=f"more than the {options.limit_s:g} s of --limit-s")
            console.print(f"{part.name}: {part.title}", markup=False)
            ran = run_part(part, folder)
            done.append(ran)
            console.print(f"  {ran.fault or f'{ran.seconds:.0f} s'}", markup=False, soft_wrap=True)
            page.write_text(render(done, RESULTS))  # at once: a report that is cut shows what it has
            advance()
    console.print(f"page: {page}", soft_wrap=True)
    return int(any(ran.fault and ran.command for ran in done))


def chosen(parts: Sequence[Part], only: Sequence[str] | None) -> list[Part]:
    """The parts to run; those not asked for are kept and say so.

    Raises:
        ValueError: No part has a name that was asked for.
    """
    if only is None:
        return list(parts)
    names = [part.name for part in parts]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(f"--only must name some of {', '.join(names)}, got {', '.join(unknown)}")
    return [part if part.name in only else replace(part, lacks="to be asked for with --only") for part in parts]


def render(done: Sequence[Ran], results: Path) -> str:
    """Make the page.

    Args:
        done: What came of each part.
        results: Folder of earlier results, shown newest first.
    """
    template = Environment(loader=FileSystemLoader(_HERE), autoescape=True).get_template("report_page.html")
    earlier = [
        {"name": path.stem, "html": html_of(path), "simulated": path.stem in _simulated(done, results)}
        for path in sorted(results.glob("*.md"), reverse=True)
    ]
    shown = [_shown(ran, results) for ran in done]
    files = {f"earlier {name}": newest(pattern, results) for name, pattern in EARLIER.items()}
    files |= {ran.part.name: ran.json for ran in done}
    page = template.render(title=_TITLE, environment=environment(), claims=claims(files), parts=shown, earlier=earlier)
    return str(page)


def _simulated(done: Sequence[Ran], results: Path) -> list[str]:
    """Names of the earlier results whose figures are simulated."""
    return [path.stem for ran in done if ran.part.simulated for path in results.glob(pages_of(ran.part.name))]


def _shown(ran: Ran, results: Path) -> dict[str, Any]:
    before = newest(pages_of(ran.part.name), results)
    drawn = before.with_suffix(".png") if before is not None else None
    return {
        "name": ran.part.name,
        "title": ran.part.title,
        "figure": ran.part.figure,
        "simulated": ran.part.simulated,
        "command": ran.command,
        "seconds": ran.seconds,
        "fault": ran.fault,
        "earlier": before.stem if before is not None else "",
        "drawn": _inline(drawn) if drawn is not None and drawn.is_file() and not ran.command else "",
        "printed": ran.printed,
        "html": _html(ran.markdown, results) if ran.markdown else "",  # written by our own commands
        "picture": _inline(ran.picture) if ran.picture is not None else "",
    }


def html_of(path: Path) -> Markup:
    """Turn a result file into HTML, with the pictures it shows inside, and links to other results within the page."""
    return _html(path.read_text(), path.parent)


def _html(text: str, folder: Path) -> Markup:
    markdown = _markdown()
    tokens = markdown.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):  # below the headings of the page
            token.tag = f"h{min(6, int(token.tag[1:]) + 2)}"
        for child in token.children or []:
            beside = folder / str(child.attrs.get("src", "") or child.attrs.get("href", ""))
            if child.type == "image" and beside.is_file():
                child.attrs["src"] = _inline(beside)
            elif child.type == "link_open" and beside.suffix == ".md" and beside.is_file():
                child.attrs["href"] = f"#{beside.stem}"
    return Markup(markdown.renderer.render(tokens, markdown.options, {}))


def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _inline(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


if __name__ == "__main__":
    sys.exit(main())
