"""Channels over gloo leave nothing in the store, and a rank that is gone while one is made is known soon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
SCRIPT = Path(__file__).with_name("gloo_channel_rank.py")
SUPPORT = {"PYTHONPATH": support_path()}


@pytest.mark.parametrize("lazily", [False, True])
def test_channels_leave_no_keys_in_the_store(lazily: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those by which gloo connects later, if it is told to."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", str(int(lazily)))
    done = launch("process_group", 3, SCRIPT, ["keys", "60"], timeout_s=120, environment=SUPPORT)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        found = re.search(r"keys \[(.*)\]", output)
        assert found, done.explain()
        assert lazily or len(set(found[1].split(", "))) == 1, output


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [("kill", 300, r"gone: ranks \[2\]"), ("stop", 6, "waited 6 s|[Tt]imed out")],  # by us, or by gloo's first try
)
def test_a_rank_that_is_gone_while_gloo_connects_is_known_long_before_gloo_gives_up(
    how: str, timeout_s: float, said: str
) -> None:
    """Gloo tries five times, each for the deadline."""
    done = launch("plain", 3, SCRIPT, [how, str(timeout_s)], timeout_s=150, environment=SUPPORT)
    for rank in (0, 1):
        found = re.search(r"reported (.*)", done.outputs[rank])
        assert found, done.explain()
        assert re.search(said, found[1]), done.explain()


@pytest.mark.parametrize("how", ["idle", "under way", "closed", "forks"])
def test_a_rank_ends_well_whatever_gloo_still_does(how: str) -> None:
    """Its threads need the interpreter to let go of tensors, and end the process with an abort when that is ending."""
    done = launch("plain", 2, SCRIPT.with_name("gloo_leaving_rank.py"), [how], timeout_s=120, fresh=True)
    assert done.returncode == 0, done.explain()
    for rank, output in enumerate(done.outputs):
        is_idle = rank == 1 or how in ("idle", "forks")
        assert "left: 0 threads" in output or not is_idle, done.explain()
