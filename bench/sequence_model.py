"""A small sequence recommender: jagged attention over the history, scored candidates (paper, section 2.1).

Its time grows with the tokens and, in the attention, with the square of each history's length, as that of
production models does. It reads `JaggedBatch`es as they come from Parquet; ids find their row by remainder. Its
attention is that of `embedding_model`: PyTorch's jagged flash kernel on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..balancer import Column, JaggedBatch
from .embedding_model import jagged_attention
from .roles import Roles

_LARGE_PRIME = 1_000_003


class SequenceModel(nn.Module):
    """Embeds the history, attends over it causally, pools it and scores candidates against the pool.

    Args:
        roles: Which column does what.
        width: Embedding width.
        num_heads: Attention heads.
        num_rows: Rows of each embedding table.
    """

    def __init__(self, roles: Roles, width: int = 32, num_heads: int = 2, num_rows: int = 2048) -> None:
        super().__init__()
        self.roles = roles
        self.items = _table(num_rows, width)
        self.sides = nn.ModuleDict({name: nn.Linear(1, width, bias=False) for name in roles.uih_sides})
        self.contents = nn.ModuleDict({name: _table(num_rows, width) for name in roles.contents})
        if roles.label is not None and roles.candidates is None:
            self.question = nn.Parameter(torch.randn(width) * width**-0.5)  # the candidate of every sample
        self.attention = JaggedAttention(width, num_heads)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.score = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        """Score the candidates.

        Args:
            batch: Samples with the columns that the roles name.

        Returns:
            Logits and labels of all candidates, sample after sample. Each of shape [num_items(batch)],
            float32.
        """
        history, lengths = self._history(batch)
        pooled = _mean_by_segment(self._encode(history, lengths), lengths)
        candidates, counts, labels = self._candidates(batch)
        of_sample = torch.repeat_interleave(pooled, counts, dim=0)
        pairs = torch.cat([of_sample, candidates, of_sample * candidates], dim=1)
        return self.score(pairs).squeeze(1) + (of_sample * candidates).sum(1), labels

    def num_items(self, batch: JaggedBatch) -> int:
        """Count the candidates that `forward` scores."""
        label = self.roles.label
        return 2 * batch.batch_size if label is None else len(batch[label].values)

    def _encode(self, history: Tensor, lengths: Tensor) -> Tensor:
        attended = history + self.attention(history, lengths)
        encoded: Tensor = attended + self.mix(attended)
        return encoded

    def _history(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        column = batch[self.roles.uih]
        embedded = self.items(self._rows(column.values))
        for name, project in self.sides.items():
            embedded = embedded + project(_squash(batch[name].values).unsqueeze(1))
        lengths = column.levels[0]
        if self.roles.label is None:  # the last item is what is to be told: the model may not see it
            ends = lengths.cumsum(0)
            kept = torch.ones(len(embedded), dtype=torch.bool, device=embedded.device)
            kept[ends[lengths > 0] - 1] = False
            embedded, lengths = embedded[kept], (lengths - 1).clamp(min=0)
        return embedded, lengths

    def _candidates(self, batch: JaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Embed the candidates; returns them with their number in each sample and their labels."""
        if self.roles.label is None:
            return self._last_items(batch[self.roles.uih])
        labels = (batch[self.roles.label].values > 0).float()
        one_each = torch.ones(batch.batch_size, dtype=torch.int64, device=labels.device)
        if self.roles.candidates is None:
            return self.question.expand(batch.batch_size, -1), one_each, labels
        column = batch[self.roles.candidates]
        embedded = self.items(self._rows(column.values))
        for name, table in self.contents.items():
            content = batch[name]
            rows = torch.remainder(content.values.long(), self.items.num_embeddings)
            embedded = embedded + _mean_by_segment(table(rows), content.levels[1])
        return embedded, column.levels[0] if column.levels else one_each, labels

    def _last_items(self, column: Column) -> tuple[Tensor, Tensor, Tensor]:
        """Make two candidates of each history: its last item, and another that the last one determines."""
        lengths = column.levels[0]
        last = torch.zeros(len(lengths), dtype=torch.int64, device=lengths.device)
        last[lengths > 0] = column.values[lengths.cumsum(0)[lengths > 0] - 1].long()
        pairs = torch.stack([last, last * _LARGE_PRIME + 1], dim=1).flatten()
        labels = torch.tensor([1.0, 0.0], device=lengths.device).repeat(len(lengths))
        return self.items(self._rows(pairs)), torch.full_like(lengths, 2), labels

    def _rows(self, ids: Tensor) -> Tensor:
        return torch.remainder(ids.long(), self.items.num_embeddings)


class JaggedAttention(nn.Module):
    """Causal self-attention inside each segment; no padding is computed. On a GPU use it under bfloat16 autocast.

    Args:
        width: Width of a token, a multiple of num_heads.
        num_heads: Heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Attend.

        Args:
            tokens: Shape [lengths.sum(), width].
            lengths: Shape [num_segments], int64.

        Returns:
            Shape [lengths.sum(), width].
        """
        heads = self.project_in(tokens).view(len(tokens), 3, self.num_heads, tokens.shape[1] // self.num_heads)
        query, key, value = (each.contiguous() for each in heads.unbind(1))
        lengths = lengths[lengths > 0]
        starts = functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max()) if len(lengths) else 0
        attended: Tensor = self.project_out(jagged_attention(query, key, value, starts, longest).flatten(1))
        return attended


def _table(num_rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(num_rows, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def _mean_by_segment(values: Tensor, lengths: Tensor) -> Tensor:
    """Average each segment's rows; an empty segment gives zeros. Shape [num_segments, width]."""
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    total = values.new_zeros(len(lengths), values.shape[1]).index_add(0, segment, values)
    return total / lengths.clamp(min=1).unsqueeze(1)


def _squash(numbers: Tensor) -> Tensor:
    """Bring numbers of any size to a few units: the signed logarithm."""
    numbers = numbers.float()
    return numbers.sign() * numbers.abs().log1p() / 8
