"""Which implementations the kernel tests run: host, Triton's interpreter (no GPU), the real kernels (GPU)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
left_out: dict[str, int] = {}


@dataclass(frozen=True)
class Path:
    """One implementation of the operators: "host", "fbgemm" (host, with FBGEMM loaded), "interpreted" or "cuda"."""

    name: str

    @property
    def device(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    def run(self, operation: str, *args: Any) -> Any:
        """Run an operator on lists of tensors; arguments move to the device, results come back."""
        from freescale.kernels import device_jagged, ops

        implementation = getattr(device_jagged if self.name == "interpreted" else ops, operation)
        return self._each(implementation(*(self._each(arg, self.device) for arg in args)), "cpu")

    def _each(self, thing: Any, device: str) -> Any:
        if isinstance(thing, Tensor):
            return thing.to(device)
        if isinstance(thing, list | tuple):
            return type(thing)(self._each(item, device) for item in thing)
        return thing


@pytest.fixture(
    params=[
        "host",
        "fbgemm",
        pytest.param("interpreted", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    scope="session",
)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    from freescale.kernels import host_fbgemm, host_jagged

    loaded = request.param == "fbgemm"
    if loaded:
        pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_fbgemm, "is_loaded", lambda: loaded)  # other tests of the process may load it
        if loaded:
            patch.setattr(host_jagged, "_UNWOVEN", 0)  # the tests' dispatches have few rows
        yield Path(request.param)


@pytest.fixture(
    params=[
        pytest.param("interpreted", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    scope="session",
)
def launched(request: pytest.FixtureRequest) -> Path:
    """Only the Triton implementations."""
    return Path(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marker = "interpreter" if HAS_GPU else "gpu"
    dropped = [item for item in items if item.get_closest_marker(marker)]
    if dropped:
        left_out[marker] = len(dropped)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=dropped)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = {
        "gpu": "need a CUDA GPU: the same bodies ran in Triton's interpreter instead",
        "interpreter": "interpret Triton kernels: the same bodies ran on the GPU instead",
    }
    for marker, count in left_out.items():
        terminalreporter.write_line(f"{count} tests deselected, they {reasons[marker]}")
