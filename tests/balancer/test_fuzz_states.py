"""States with anything in them are loaded or refused by ValueError or TypeError, and need no unpickling of objects."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.balancer import BalancerError, CostModel, VariableBatchSize, balance, read_parquet, reshard
from freescale.transport import connect

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
JUNK: list[Any] = [
    None,
    True,
    -1,
    3,
    2**70,
    1.5,
    float("nan"),
    "x",
    b"y",
    [],
    [1],
    {},
    {"a": 1},
    torch.zeros(3),
    object(),
]


def changed(value: Any, data: st.DataObject) -> Any:
    """A nest with one place, anywhere, replaced by something else, or left out."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value, key=str)))
        rest = {name: item for name, item in value.items() if name != key}
        return {**rest, key: changed(value[key], data)} if data.draw(st.integers(0, 4)) else rest
    if isinstance(value, list) and value and data.draw(st.booleans()):
        return [*value[:-1], changed(value[-1], data)]
    return data.draw(st.sampled_from(JUNK))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.parquet"
    pq.write_table(pa.table({"id": range(30), "uih": [[1] * (k % 5) for k in range(30)]}), file, row_group_size=7)
    return file


@settings(PATIENT, max_examples=200)
@given(data=st.data())
def test_states_of_parquet_are_loaded_or_refused(path: Path, data: st.DataObject) -> None:
    source = read_parquet(path, 4)
    next(iter(source))
    state = changed(source.state_dict(), data)
    with contextlib.suppress(ValueError, TypeError):
        source.load_state_dict(state)
        assert sum(batch.batch_size for batch in source) <= 30


@settings(PATIENT, max_examples=150)
@given(data=st.data())
def test_states_for_another_number_of_ranks_are_made_or_refused(path: Path, data: st.DataObject) -> None:
    loader = balance(read_parquet(path, 4), connect("local"), "uih", VariableBatchSize(autotune=True))
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    sources = [{**state["source"], "rank": rank, "world_size": 2, "dealt": [[[0, 3]]]} for rank in range(2)]
    states = [{**state, "rank": rank, "world_size": 2, "source": source} for rank, source in enumerate(sources)]
    assert len(reshard(states, 3)) == 3
    with contextlib.suppress(ValueError, TypeError):
        for state in reshard(changed(states, data), 3):
            source = read_parquet(path, 4, rank=state["rank"], world_size=3)
            source.load_state_dict(state["source"])
            assert sum(batch.batch_size for batch in source) <= 30


@settings(PATIENT, max_examples=80)
@given(data=st.data())
def test_states_of_a_loader_are_loaded_or_refused_when_it_goes_on(path: Path, data: st.DataObject) -> None:
    def make() -> Any:
        return balance(read_parquet(path, 4), connect("local", timeout_s=5), "uih", VariableBatchSize(autotune=True))

    loader = make()
    next(iter(loader))
    state = changed(loader.state_dict(), data)
    loader.close()
    again = make()
    with contextlib.suppress(ValueError, TypeError, BalancerError):
        again.load_state_dict(state)
        for _ in again:
            pass
    again.close()


@pytest.mark.parametrize("make", [lambda: VariableBatchSize(alpha=1.0, autotune=True), CostModel])
@settings(PATIENT, max_examples=150)
@given(data=st.data())
def test_states_of_what_learns_are_loaded_or_refused(make: Callable[[], Any], data: st.DataObject) -> None:
    learner = make()
    with contextlib.suppress(ValueError, TypeError):
        learner.load_state_dict(changed(learner.state_dict(), data))


@pytest.mark.parametrize("partitioner", [VariableBatchSize(alpha=1.0, autotune=True)])
def test_a_state_is_saved_and_loaded_without_unpickling_objects(path: Path, partitioner: Any) -> None:
    loader = balance(read_parquet(path, 4), connect("local"), "uih", partitioner)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    loader.close()
    file.seek(0)
    loader.load_state_dict(torch.load(file, weights_only=True))
    assert sum(batch.batch_size for batch in loader) == 26
