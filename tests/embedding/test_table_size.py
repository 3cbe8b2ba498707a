"""What a step costs does not grow with the rows of a table."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from freescale.embedding import PrioritizedEmbeddingCollection, RowwiseAdagrad, Table
from freescale.transport import connect

BILLED_MS = 1.5  # less than any pass over what the large table has


def step_ms(num_rows: int) -> float:
    """CPU milliseconds, of all threads, of the middle one of many steps on the same few ids."""
    table = Table("item", num_rows, 1, init_fn=lambda rows: rows.zero_())
    tables = PrioritizedEmbeddingCollection([table], connect("local"), optimizer=RowwiseAdagrad(lr=0.1))
    batches = [{"item": torch.arange(100) * 7 + step % 3} for step in range(40)]
    tables.prefetch(batches[0])
    spent = []
    for current, upcoming in zip(batches, [*batches[1:], None], strict=True):
        before = time.process_time()
        if upcoming is not None:
            tables.prefetch(upcoming)
        tables(current)["item"].square().sum().backward()
        tables.flush()
        spent.append(1e3 * (time.process_time() - before))
    tables.close()
    return statistics.median(spent[2:-2])


def test_a_step_costs_the_same_for_forty_million_rows_as_for_a_thousand() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(5):  # a busy machine may disturb some
            small, large = step_ms(1_000), step_ms(40_000_000)
            if large < small + BILLED_MS:
                break
        gc.collect()
        weights = torch.zeros(40_000_000)
        before = time.process_time()
        weights.add_(1.0)
        one_pass = 1e3 * (time.process_time() - before)
    finally:
        torch.set_num_threads(num_threads)
    assert one_pass > BILLED_MS, "what this test looks for would not be seen here"
    assert large < small + BILLED_MS, (small, large)
