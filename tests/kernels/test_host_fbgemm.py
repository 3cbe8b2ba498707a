"""FBGEMM serves only programs that have loaded it, and is never loaded from here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from freescale.kernels import host_fbgemm, permute_jagged

_PROGRAM = """
import sys, torch
from freescale.kernels import host_fbgemm, permute_jagged
moved, _ = permute_jagged(torch.arange(6), torch.tensor([1, 3, 2]), torch.tensor([2, 0]))
print(moved.tolist(), "fbgemm_gpu" in sys.modules, host_fbgemm.is_loaded())
"""


def test_a_permute_does_not_load_fbgemm() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=250, check=True)
    assert said.stdout.strip() == "[4, 5, 0] False False"


def test_fbgemm_is_not_used_while_it_is_being_imported() -> None:
    importing = "import sys, types\nsys.modules['fbgemm_gpu'] = types.ModuleType('fbgemm_gpu')\n"  # as import begins
    said = subprocess.run(
        [sys.executable, "-c", importing + _PROGRAM], capture_output=True, text=True, timeout=250, check=True
    )
    assert said.stdout.strip() == "[4, 5, 0] True False"


def test_fbgemm_is_used_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
    monkeypatch.setattr(host_fbgemm, "is_loaded", lambda: True)  # whatever other tests say of the whole session
    used: list[int] = []
    genuine = host_fbgemm.permute_rows

    def counted(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        used.append(len(arguments))
        return genuine(*arguments)  # type: ignore[arg-type]  # the last is an int

    monkeypatch.setattr(host_fbgemm, "permute_rows", counted)
    moved, _ = permute_jagged([torch.arange(6), torch.ones(6, 0)], torch.tensor([1, 3, 2]), torch.tensor([2, 0]))
    assert used == []  # rows of no bytes are not FBGEMM's
    moved, _ = permute_jagged([torch.arange(6), torch.ones(6, 3)], torch.tensor([1, 3, 2]), torch.tensor([2, 0]))
    assert len(used) == 2
    assert moved[0].tolist() == [4, 5, 0]
    big = torch.zeros(2**20, 17, dtype=torch.uint8)
    permute_jagged(big, torch.tensor([2**20]), torch.tensor([0]))
    assert len(used) == 2
