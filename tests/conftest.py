"""What holds for all tests."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernel tests then need no GPU

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs in the background ignore it

# An example takes as long as the machine takes, which may stand still for a moment.
SLOW_IS_FINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same examples", SLOW_IS_FINE, derandomize=True)
settings.register_profile("new examples", SLOW_IS_FINE)

_left_out: list[pytest.Item] = []


@pytest.fixture
def three_cores() -> Iterator[None]:
    """Torch divides operations between three cores, so that threads which keep to one are seen to do so."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run campaigns of minutes too, as `make test-long` does")


def pytest_configure(config: pytest.Config) -> None:
    """What new examples find is no news of a change that happens to be tested then; campaigns look for it."""
    settings.load_profile("new examples" if config.getoption("--long") else "the same examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    _left_out.extend(item for item in items if _gpus_needed(item) > torch.cuda.device_count())
    left_out = set(_left_out)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=_left_out)


def _gpus_needed(item: pytest.Item) -> int:
    """Of a test with ranks on GPUs: two, or one where the ranks may share it."""
    marks = list(item.iter_markers("gpus"))
    return 0 if not marks else 1 if all(mark.kwargs.get("shared") for mark in marks) else 2


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _left_out:
        what = "a CUDA GPU, or two" if not torch.cuda.is_available() else "two CUDA GPUs"
        terminalreporter.write_line(f"{len(_left_out)} tests deselected, they need {what}")
