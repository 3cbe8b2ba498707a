"""The transport contract for CUDA tensors: on GPUs, and with threads in place of streams where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

import device_contract
from rank_processes import launch, support_path

pytestmark = pytest.mark.multirank
CONTRACT = Path(device_contract.__file__)
CHECKS = CONTRACT.with_name("device_checks.py")
SHARING = pytest.mark.gpus(shared=True)
APART = pytest.mark.gpus
ENGINES = [pytest.param("nccl", marks=APART), "peer", "segment", "staged"]  # NCCL wants a GPU for each rank
# Checks have more channels open than trainers do.
PATHS = {"PYTHONPATH": support_path(), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def keep_the_contract(host: str, engine: str, world_size: int) -> None:
    done = launch(host, world_size, CONTRACT, [host, engine], environment=PATHS)
    assert done.returncode == 0, done.explain()
    for output in done.outputs:
        assert output.count("passed check_") == len(device_contract.checks_for(engine)), done.explain()
        assert f"all passed {world_size}" in output


@pytest.mark.parametrize(
    ("host", "engine", "world_size"),
    [
        ("process_group", "threads-peer", 3),
        ("process_group", "threads-segment", 3),
        ("process_group", "threads-staged", 3),
        ("mpi", "threads-hosts", 3),
    ],
)
def test_engines_keep_the_contract_with_threads_as_streams(host: str, engine: str, world_size: int) -> None:
    keep_the_contract(host, engine, world_size)


@pytest.mark.parametrize("engine", ["threads-peer", "threads-segment", "threads-staged"])
def test_a_new_channel_waits_for_no_stream_where_registering_memory_would(engine: str) -> None:
    check = "new_channels_wait_for_no_stream"
    done = launch("mpi", 2, CHECKS, ["mpi", engine, check], environment=PATHS)
    assert all(f"passed check_{check}" in output for output in done.outputs), done.explain()


def test_ranks_that_come_together_copy_a_piece_each_and_a_late_one_copies_both() -> None:
    check = "ranks_that_come_together_copy_a_piece_each"
    done = launch("mpi", 2, CHECKS, ["mpi", "threads-peer", check], environment=PATHS)
    assert all(f"passed check_{check}" in output for output in done.outputs), done.explain()


@SHARING
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_keep_the_contract_on_gpus(engine: str) -> None:
    keep_the_contract("process_group", engine, 2)


@SHARING
def test_more_ranks_than_two_copy_pairwise() -> None:
    keep_the_contract("process_group", "peer", 4)


@SHARING
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "check",
    [
        "streams_order_what_hosts_do_not_wait_for",
        "many_uneven_messages_arrive",
        "channels_do_not_wait_for_each_other",
        "new_channels_wait_for_no_stream",
        "more_than_2_gib_arrive",
        "a_rank_that_never_comes_is_raised_at_the_next_call",
    ],
)
def test_engines_on_gpus(engine: str, check: str) -> None:
    if engine == "nccl" and "channels" in check:
        pytest.skip("NCCL asks for one order of all channels")
    done = launch("process_group", 2, CHECKS, ["process_group", engine, check], environment=PATHS)
    assert done.returncode == 0, done.explain()
    assert all(f"passed check_{check}" in output for output in done.outputs), done.explain()


@SHARING
@pytest.mark.parametrize("engine", ["peer", "segment", "staged"])
@pytest.mark.parametrize(
    "check", ["a_profile_shows_copies_alone", pytest.param("a_transfer_needs_no_multiprocessor", marks=APART)]
)
def test_engines_of_ours_launch_no_kernel(engine: str, check: str) -> None:
    done = launch("process_group", 2, CHECKS, ["process_group", engine, check], environment=PATHS)
    assert done.returncode == 0, done.explain()


@SHARING
@pytest.mark.parametrize("engine", ["peer", "segment"])
def test_a_killed_peer_is_an_error_within_seconds(engine: str) -> None:
    check = "a_killed_peer_is_raised_at_the_next_call"
    done = launch("plain", 2, CHECKS, ["process_group", engine, check], environment=PATHS)
    assert f"passed check_{check}" in done.outputs[0], done.explain()
    assert "its process has ended" in done.outputs[0], done.explain()
