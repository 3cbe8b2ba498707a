"""Prioritized embeddings: row-wise shards whose communication hides behind compute, exactly (paper, section 3.2).

Start with `prioritize` (swap.py) or `PrioritizedEmbeddingCollection` (prioritized.py). engine.py orders a step; the id
plane is planner.py, its threads stages.py, and collision.py, on the host; shard.py and optimizer.py keep the rows;
checkpoint.py saves them.
"""

from .errors import EmbeddingError, IdOutOfRange
from .optimizer import Adam, FusedOptimizer, RowwiseAdagrad, Sgd
from .prioritized import PrioritizedEmbeddingCollection
from .swap import PrioritizedEmbeddings, prioritize
from .tables import Table

__all__ = [
    "Adam",
    "EmbeddingError",
    "FusedOptimizer",
    "IdOutOfRange",
    "PrioritizedEmbeddingCollection",
    "PrioritizedEmbeddings",
    "RowwiseAdagrad",
    "Sgd",
    "Table",
    "prioritize",
]
