"""The dense part that embeddings feed in bench.embedding: causal attention over histories (paper, section 2.1)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class SequenceTower(nn.Module):
    """Causal transformer over the histories, one logit an id.

    Args:
        features: Names of what is looked up for every id.
        dim: Width of a looked-up row.
        width: Width of the transformer.
        num_layers: Layers; without any the result does not depend on the order of floating-point sums in attention.
        num_heads: Heads of each.
        dtype: Of weights and activations.
    """

    def __init__(
        self,
        features: list[str],
        dim: int,
        width: int = 256,
        num_layers: int = 3,
        num_heads: int = 4,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self._features = features
        self.project = nn.Linear(dim * len(features), width, dtype=dtype)
        self.layers = nn.ModuleList(Layer(width, num_heads, dtype) for _ in range(num_layers))
        self.head = nn.Linear(width, 1, dtype=dtype)

    def forward(self, embedded: Any, starts: Tensor, labels: Tensor, longest: int) -> Tensor:
        """Mean loss over the ids.

        Args:
            embedded: For each feature what gives rows by `values()`, [num_ids, dim]; or what gives that by `wait()`.
            starts: First id of every history, and their number. Shape [batch_size + 1], int32.
            labels: Shape [num_ids], float32.
            longest: Length of the longest history.
        """
        if hasattr(embedded, "wait"):
            embedded = embedded.wait()
        rows = [embedded[name].values().to(self.project.weight.dtype) for name in self._features]
        tokens = self.project(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1))
        for layer in self.layers:
            tokens = layer(tokens, starts, longest)
        return functional.binary_cross_entropy_with_logits(self.head(tokens).squeeze(1).float(), labels)


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a shortcut.

    Args:
        width: Width of a token, a multiple of num_heads.
        num_heads: Heads.
        dtype: Of weights and activations.
    """

    def __init__(self, width: int, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for _ in range(2))
        self.project_in = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.project_out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width, dtype=dtype), nn.GELU(), nn.Linear(4 * width, width, dtype=dtype)
        )

    def forward(self, tokens: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Shape [num_ids, width] to the same."""
        num_ids, width = tokens.shape
        heads = self.project_in(self.norms[0](tokens)).view(num_ids, 3, self._num_heads, -1)
        query, key, value = (each.contiguous() for each in heads.unbind(1))
        attended = jagged_attention(query, key, value, starts, longest).reshape(num_ids, width)
        tokens = tokens + self.project_out(attended)
        mixed: Tensor = tokens + self.perceptron(self.norms[1](tokens))
        return mixed


def jagged_attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention inside each history: PyTorch's flash kernel on a GPU, one history after the other elsewhere.

    Args:
        query: Shape [num_ids, num_heads, head_width]; key and value alike.
        key: See `query`.
        value: See `query`.
        starts: Shape [batch_size + 1], int32.
        longest: Length of the longest history.
    """
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(query, key, value, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(attended, Tensor)
        return attended
    histories = [value[:0]]  # there may be none
    for low, high in pairwise(starts.tolist()):
        q, k, v = (each[low:high].transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        histories.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1))
    return torch.cat(histories)
