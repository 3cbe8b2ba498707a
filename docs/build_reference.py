"""Builds the API reference from the docstrings: `make docs` runs it, and any warning ends it (beside the paper)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc
from pdoc.doc_ast import walk_tree

import freescale.balancer
from freescale.balancer import ParquetSource, loader, plan, read_parquet
from freescale.balancer.partitioners import partition

PUBLIC = ("freescale", "freescale.balancer", "freescale.embedding", "freescale.kernels", "freescale.transport")
LAZY = (ParquetSource, read_parquet)  # the balancer imports them when they are asked for; pdoc does not ask
DEFINE = (loader, plan, partition)
# pdoc looks for the types of a NamedTuple's fields where Python makes its constructor, not where the class is
_OF_NAMED_TUPLES = (
    r"Error parsing type annotation ForwardRef\('\w+'\) for freescale\.[\w.]+\.(Buckets|ChunkEvent)\.__init__"
)


def build(folder: Path) -> None:
    """Write a page for each public package: what its `__all__` names, and no more.

    Raises:
        Warning: A name does not resolve, an annotation cannot be understood, …
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", _OF_NAMED_TUPLES)
    template = Path(__file__).with_name("reference_template")
    pdoc.render.configure(docformat="google", search=False, show_source=False, template_directory=template)
    for module in DEFINE:  # of values, pdoc reads what is said where they are defined, not where they are imported to
        walk_tree(freescale.balancer).var_docstrings.update(walk_tree(module).var_docstrings)
    internal = (f"!{package}\\." for package in PUBLIC[1:])
    pdoc.pdoc("freescale", *internal, r"!freescale\.bench", output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/build_reference.py FOLDER")
    build(Path(sys.argv[1]))
