"""How fast samples are packed for their new ranks, as a share of a plain copy (paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..balancer.batches.batch import Column, JaggedBatch
from ..balancer.protocol.payload import Sections, message_bytes, pack, unpack
from ..balancer.protocol.schema import Schema
from .arguments import at_least_one, output_file, output_folder, picture_file, status_of, write_figures
from .environment import environment
from .tables import Table, picture_beside, print_table, write_result

_EPILOG = """examples:
  python -m freescale.bench.packing
  python -m freescale.bench.packing --mean 500 3000 --samples 128 2560 --destinations 4 512 --json packing.json

One thread. All samples of a batch leave for random ranks. "pack" is what the balancer does: find the bytes of each
sample, order them by destination, copy them into messages. "unpack" makes columns of these messages, as if each came
from another rank. "torch.cat" joins slices of one column in the same order into a reused buffer, without lengths or
padding. FBGEMM, where installed, permutes one column by the same order, without a look at lengths or order."""


@dataclass(frozen=True)
class Outcome:
    """One batch and number of destinations. Milliseconds are medians; shares are of the copy of as many bytes."""

    mean_length: int
    num_samples: int
    columns: int
    destinations: int
    size_bytes: int
    copy_ms: float
    pack_ms: float
    pack_ms_range: tuple[float, float]
    pack_share: float
    unpack_ms: float
    unpack_share: float
    cat_share: float
    fbgemm_share: float | None


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake, which was printed."""
    parser = argparse.ArgumentParser(
        prog="python -m freescale.bench.packing",
        description="Time the packing of jagged samples into one message a rank, against a plain copy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mean", type=at_least_one, nargs="+", default=[500, 3000], help="mean lengths (default 500 3000)"
    )
    parser.add_argument(
        "--samples", type=at_least_one, nargs="+", default=[128, 2560], help="batch sizes (default 128 2560)"
    )
    parser.add_argument(
        "--columns", type=at_least_one, nargs="+", default=[1], help="int64 columns a batch has (default 1)"
    )
    parser.add_argument(
        "--destinations", type=at_least_one, nargs="+", default=[4, 64, 512], help="ranks (default 4 64 512)"
    )
    parser.add_argument("--repeats", type=at_least_one, default=25, help="times each is done (default 25)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and destinations (default 0)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw the rates (needs matplotlib)")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write a dated Markdown file")
    options = parser.parse_args(arguments)
    return status_of(lambda: _run(options, Console(emoji=False)))


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.plot is not None:
        from .packing_plot import draw  # before the work, so that a missing library shows at once
    torch.set_num_threads(1)
    cases = [
        (mean, samples, columns) for mean in options.mean for samples in options.samples for columns in options.columns
    ]
    outcomes = [
        outcome
        for case in track(cases, "packing", console=console, disable=not console.is_terminal, transient=True)
        for outcome in measure(*case, options.destinations, options.repeats, options.seed)
    ]
    table = _table(outcomes)
    print_table(table, console)
    if options.json is not None:
        write_figures(options.json, {"environment": environment(), "outcomes": [asdict(o) for o in outcomes]})
    if options.plot is not None:
        draw(outcomes, options.plot)
    if options.results is not None:
        about = environment(("torch", "numpy", "pyarrow", "fbgemm-gpu-cpu"))
        shown = picture_beside(options.plot, options.results, "rates of packing")
        parts: list[Table | str] = [_EPILOG.partition("\n\n")[2], *shown, table]
        path = write_result(options.results, "packing", "Packing samples into messages", about, parts)
        console.print(f"written to {path}")


def measure(
    mean_length: int, num_samples: int, columns: int, destinations: list[int], repeats: int, seed: int
) -> list[Outcome]:
    """Check and time packing and its peers in turns, for one batch and each number of destinations.

    Lengths are lognormal with sigma 0.9, scaled to the mean; values are random int64.
    """
    random = np.random.default_rng(seed)
    raw = random.lognormal(0.0, 0.9, num_samples)
    lengths = torch.from_numpy(np.maximum(raw * (mean_length / raw.mean()), 1).astype(np.int64))
    batch = JaggedBatch(
        {
            f"column{index}": Column(torch.from_numpy(random.integers(0, 1 << 40, int(lengths.sum()))), (lengths,))
            for index in range(columns)
        },
        num_samples,
    )
    return [_measure_one(batch, mean_length, n, repeats, random) for n in destinations]


def _measure_one(
    batch: JaggedBatch, mean_length: int, destinations: int, repeats: int, random: np.random.Generator
) -> Outcome:
    schema = Schema.of(batch)
    owners = random.integers(1, destinations + 1, batch.batch_size)
    num_samples = np.bincount(owners, minlength=destinations + 1)
    payload = Sections(batch, schema).payload_bytes()
    sizes = message_bytes(
        schema,
        np.bincount(owners, weights=payload, minlength=destinations + 1).astype(np.int64),
        num_samples,
    )
    values, lengths = batch["column0"].values, batch["column0"].levels[0]
    sources = [batch[name].values.clone() for name in batch.names]
    targets = [torch.empty_like(source) for source in sources]
    order = np.argsort(owners, kind="stable")
    buffer = torch.empty_like(values)

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def packed() -> Tensor:
        return pack(Sections(batch, schema), owners, 0, num_samples, sizes)

    def cat() -> Tensor:
        slices = values.split(lengths.tolist())
        return torch.cat([slices[i] for i in order.tolist()], out=buffer)

    messages, nothing = packed(), Sections(schema.empty_batch(), schema)

    def unpacked() -> JaggedBatch:
        return unpack(messages.numpy(), sizes, num_samples, nothing, order[:0], schema, 0)

    permute = _fbgemm_permute(values, lengths, order)
    _check(messages, batch, owners, sizes, cat())
    assert unpacked().equal(batch.take(order.tolist())), "messages were unpacked wrongly"
    if permute is not None:
        assert torch.equal(permute(), cat()), "FBGEMM gave another order"
    timed: list[Callable[[], object]] = [copy, packed, unpacked, cat, *([permute] if permute is not None else [])]
    return _outcome(batch, mean_length, destinations, int(payload.sum()), _times(timed, repeats))


def _outcome(
    batch: JaggedBatch, mean_length: int, destinations: int, size_bytes: int, times: list[list[float]]
) -> Outcome:
    """From the times of each way: a copy, packing, unpacking, torch.cat of slices, and FBGEMM where it is loaded."""
    copy_ms, pack_ms, unpack_ms, cat_ms = (statistics.median(t) for t in times[:4])
    one_column_ms = copy_ms / len(batch.names)
    return Outcome(
        mean_length=mean_length,
        num_samples=batch.batch_size,
        columns=len(batch.names),
        destinations=destinations,
        size_bytes=size_bytes,
        copy_ms=copy_ms,
        pack_ms=pack_ms,
        pack_ms_range=(min(times[1]), max(times[1])),
        pack_share=copy_ms / pack_ms,
        unpack_ms=unpack_ms,
        unpack_share=copy_ms / unpack_ms,
        cat_share=one_column_ms / cat_ms,
        fbgemm_share=one_column_ms / statistics.median(times[4]) if len(times) > 4 else None,
    )


def _check(
    message: Tensor, batch: JaggedBatch, owners: NDArray[np.int64], sizes: NDArray[np.int64], joined: Tensor
) -> None:
    """Every message holds, for its samples in order, the lengths of all columns and then the first column's values."""
    start = np.cumsum(sizes) - sizes
    lengths, position = batch["column0"].levels[0].numpy(), 0
    for owner in np.unique(owners):
        expected = lengths[owners == owner]
        body = message[start[owner] : start[owner] + sizes[owner]].view(torch.int64)
        heads, total = len(expected) * len(batch.names), int(expected.sum())
        packed = body[:heads].view(len(expected), -1)
        assert (packed.numpy() == expected[:, None]).all(), "lengths were packed wrongly"
        assert torch.equal(body[heads : heads + total], joined[position : position + total]), "values were"
        position += total


def _fbgemm_permute(values: Tensor, lengths: Tensor, order: NDArray[np.int64]) -> Callable[[], Tensor] | None:
    try:
        import fbgemm_gpu  # noqa: F401  # registers the operators
    except ImportError:
        return None
    permutation = torch.from_numpy(order).to(torch.int32)

    def permute() -> Tensor:
        result: Tensor = torch.ops.fbgemm.permute_1D_sparse_data(permutation, lengths, values, None, None)[1]
        return result

    return permute


def _times(functions: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of each, taken in turns so that all meet the same conditions."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 2):
        for function, taken in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            if turn >= 2:
                taken.append(1e3 * (time.perf_counter() - started))
    return times


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(
        "Packing on one thread",
        [
            "mean length x samples",
            "columns",
            "ranks",
            "MB",
            "copy ms",
            "pack ms",
            "range",
            "pack",
            "unpack ms",
            "unpack",
            "torch.cat",
            "FBGEMM",
        ],
    )
    for o in outcomes:
        table.add(
            f"{o.mean_length} x {o.num_samples}",
            str(o.columns),
            str(o.destinations),
            f"{o.size_bytes / 1e6:.1f}",
            f"{o.copy_ms:.3f}",
            f"{o.pack_ms:.3f}",
            f"{o.pack_ms_range[0]:.3f}-{o.pack_ms_range[1]:.3f}",
            f"{o.pack_share:.2f}",
            f"{o.unpack_ms:.3f}",
            f"{o.unpack_share:.2f}",
            f"{o.cat_share:.2f}",
            "not installed" if o.fbgemm_share is None else f"{o.fbgemm_share:.2f}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
