"""Plain torch.nn.Embedding can be prioritized where torchrec and FBGEMM are not installed."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
for name in ("torchrec", "fbgemm_gpu"):
    sys.modules[name] = None  # as if it were not installed: to import it raises
import torch
from torch import nn
from freescale.embedding import Adam, prioritize
from freescale.transport import connect

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pages, self.head = nn.Embedding(50, 4), nn.Linear(4, 1)

    def forward(self, batch):
        return self.head(self.pages(batch["page"])).square().mean()

model = prioritize(Model(), connect("local"), optimizer=Adam(lr=0.1), ids={"pages": "page"})
batches = [{"page": torch.arange(step, step + 6)} for step in range(4)]
before = model.state_dict()["pages.weight"].clone()
for batch, upcoming in zip(batches, batches[1:]):
    model.prioritized_embeddings.prefetch(upcoming)
    model(batch).backward()
changed = (model.state_dict()["pages.weight"] != before).any(1).nonzero().flatten().tolist()
model.prioritized_embeddings.close()
assert changed == list(range(8)), changed
assert sys.modules["torchrec"] is None
"""


def test_modules_of_torch_are_swapped_and_trained() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
