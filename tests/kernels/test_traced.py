"""Names in traces cost nothing where there is no trace; see kernels/traced.py."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from freescale.kernels.traced import traced


def test_a_name_is_in_the_trace_of_a_profiler_that_runs() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, traced("a part"), traced("a part of it"):
        pass
    assert {"a part", "a part of it"} <= {event.name for event in profiler.events()}


def test_no_object_is_made_for_a_name_that_nobody_hears() -> None:
    assert traced("a part") is traced("another")
    with profile(activities=[ProfilerActivity.CPU]):
        assert traced("a part") is not traced("another")
    assert traced("a part") is traced("another")
