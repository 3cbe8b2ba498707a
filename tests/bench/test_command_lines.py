"""All commands of bench behave alike: help with an example, figures in a file, statuses, one line for a mistake."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from freescale.bench.arguments import status_of
from freescale.bench.launch import LaunchError
from freescale.bench.progress import progress

BENCH = Path(__file__).parents[2] / "bench"
STARTED_BY_OTHERS = {
    "demo_rank",
    "embedding_fork",
    "id_plane_rank",
    "loader_overhead_rank",
    "ne_parity_rank",
    "transport_host_rank",
    "transport_rank",
    "soak_rank",
}
NO_COMMAND = {"environment"}  # it looks for the module `__main__`, and is none
COMMANDS = sorted(
    {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()} - STARTED_BY_OTHERS - NO_COMMAND
)
WITHOUT_JSON = {
    "report",  # it writes a folder, with the figures of its parts
    "synthetic",  # it measures nothing
}
WITHOUT_PLOT = {
    "id_plane",  # a handful of figures
    "loader_overhead",  # a handful of figures
    "report",  # it has the pictures of its parts
    "soak",  # what it shows is that nothing changes
    "straggler_trace",  # for a trace there is Perfetto
    "synthetic",
    "trace_report",
    "transport_host",  # two tables
}
WITHOUT_FIGURES = {"report", "straggler_trace", "synthetic", "trace_report"}  # no --json FILE

MISTAKES = [
    ("autotune", ["--steps", "3"], "--steps must be at least 101"),
    ("collisions", ["--ids", "{missing}.parquet:page"], "missing.parquet"),
    ("demo", ["{missing}.parquet"], "missing.parquet"),
    ("embedding", ["--device", "cpu", "--read", "{missing}.json"], "missing.json"),
    ("end_to_end", ["--device", "cpu", "--ratio", "101"], "--ratio must be from 0 to 100, got 101"),
    ("id_plane", ["--blocks", "1"], "must be at least 2, got 1"),
    ("id_plane", ["--ratio", "101"], "--ratio must be from 0 to 100, got 101"),
    ("inspect", ["{missing}.parquet:page"], "missing.parquet"),
    ("inspect", ["{data}:nothing"], "it has"),
    ("inspect", ["{data}:page", "--batch-size", "1000000"], "must be at most 4,000,000 samples"),
    ("kernels", ["--operation", "sort"], "invalid choice: 'sort'"),
    ("kernels", ["--world-size", "0"], "must be an integer of at least 1, got '0'"),
    ("kernels", ["--limit-s", "-1"], "--limit-s: must be a number of seconds, got '-1'"),
    ("loader_overhead", ["--step-ms", "0"], "--step-ms: must be a number over 0, got '0'"),
    ("loader_overhead", ["--blocks", "0"], "must be an integer of at least 1, got '0'"),
    ("ne_parity", ["--data", "{missing}.parquet"], "missing.parquet"),
    ("ne_parity", ["--data", "{list}"], "cannot read {list}: Parquet"),
    ("packing", ["--mean", "-1"], "must be an integer of at least 1, got '-1'"),
    ("partition", ["--lengths", "{missing}"], "missing"),
    ("partition", ["--partitioner", "nothing_here:at_all"], "nothing_here"),
    ("partition", ["--partitioner", "here:boom:s"], "here:boom:s"),
    ("report", ["--only", "nonsense"], "--only must name some of"),
    ("simulate", ["--compute", "{missing}.json"], "missing.json"),
    ("soak", ["--ranks", "0"], "'0'"),
    ("straggler_trace", ["{missing}.json"], "missing.json"),
    ("straggler_trace", ["{list}"], "list.json is no trace of torch.profiler: TypeError"),
    ("synthetic", ["{missing}.parquet", "--rows", "3"], "--row-groups must be at most --rows, got 16 and 3"),
    ("synthetic", ["{data}/users.parquet"], "cannot write to"),
    ("trace_report", ["{data}"], "data.parquet is no trace of torch.profiler: UnicodeDecodeError"),
    ("trace_report", ["{object}"], "object.json is no trace of torch.profiler: KeyError: 'traceEvents'"),
    ("trace_report", ["{missing}.json"], "missing.json"),
    ("transport", ["--sizes", "many"], "invalid int value: 'many'"),
    ("transport_host", ["--ranks", "1"], "--ranks must be at least 2, got 1"),
    ("virtual_ranks", ["--device", "cpu", "--length-scale", "0"], "--length-scale must be over 0"),
]


def run(command: str, arguments: list[str]) -> Any:
    """The exit status of a command, whichever way it ends."""
    try:
        return importlib.import_module(f"freescale.bench.{command}").main(arguments)
    except SystemExit as stop:
        return stop.code


def test_every_command_has_a_mistake_in_the_table() -> None:
    assert {command for command, _, _ in MISTAKES} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_says_how_to_keep_the_figures(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, ["--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: python -m freescale.bench.{command} " in said
    assert f"python -m freescale.bench.{command}" in said.partition("example")[2]
    assert command in WITHOUT_JSON or "--json" in said
    assert (command in WITHOUT_PLOT) != ("--plot" in said)


@pytest.mark.parametrize(("command", "arguments", "message"), MISTAKES)
def test_a_mistake_ends_with_status_2_and_one_line_that_says_what(
    command: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"page": [[1], [2, 3]]}), tmp_path / "data.parquet")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "object.json").write_text("{}")
    places = {"missing": tmp_path / "missing", "data": tmp_path / "data.parquet"}
    places |= {"list": tmp_path / "list.json", "object": tmp_path / "object.json"}
    assert run(command, [each.format(**places) for each in arguments]) == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert "error: " in last
    assert message.format(**places) in last


@pytest.mark.parametrize(
    "command",
    [name for name in COMMANDS if "refuse_inside_a_launch()" in (BENCH / f"{name}.py").read_text()],
)
def test_to_start_ranks_from_inside_a_rank_is_a_mistake(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert run(command, []) == 2
    assert "this command starts its own ranks; run it without mpiexec or torchrun" in capsys.readouterr().err


def test_a_rank_that_fails_is_no_mistake_of_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise LaunchError("rank 1 failed")

    assert status_of(broken) == 1
    assert capsys.readouterr().err == "error: rank 1 failed\n"


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - WITHOUT_PLOT))
def test_an_ending_that_is_no_picture_is_a_mistake_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, ["--plot", str(tmp_path / "seen.xyz")]) == 2
    assert "--plot: must end with one of .png, .svg, .pdf, .jpg, .webp, got" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - WITHOUT_FIGURES))
def test_a_place_that_cannot_be_written_is_a_mistake_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_file").write_text("")
    assert run(command, ["--json", str(tmp_path / "a_file" / "found.json")]) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert run(command, ["--json", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_folder_for_results_is_made(tmp_path: Path) -> None:
    few = ["--world-size", "2", "--batch-size", "4", "--no-reference", "--repeats", "1"]
    assert run("partition", [*few, "--json", str(tmp_path / "new" / "found.json")]) == 0
    assert (tmp_path / "new" / "found.json").stat().st_size > 100


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("autotune", ["--delays", "0", "2", "--steps", "101"]),
        ("packing", ["--mean", "50", "--samples", "8", "--destinations", "2", "4", "--repeats", "1"]),
        ("partition", ["--world-size", "2", "4", "--batch-size", "4", "--no-reference", "--repeats", "1"]),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_a_picture_is_drawn_and_shown_in_the_result_beside_it(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--plot", str(tmp_path / "seen.png"), "--json", str(tmp_path / "seen.json")]
    assert run(command, [*arguments, *files, "--results", str(tmp_path)]) == 0
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "seen.json").read_text())["environment"]
    (result,) = tmp_path.glob("*.md")
    assert "](seen.png)" in result.read_text()


QUICK = {"straggler_trace", "trace_report"}  # done at once


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - QUICK))
def test_every_command_that_takes_time_shows_progress(command: str) -> None:
    code = (BENCH / f"{command}.py").read_text()
    assert re.search(r"progress\(console, |(Progress|track)\(.*disable=not console\.is_terminal", code)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_between_colons_becomes_an_emoji(command: str) -> None:
    """`my_module:boom: AttributeError` was told as `my_module💥 AttributeError`."""
    code = (BENCH / f"{command}.py").read_text() + (BENCH / "arguments.py").read_text()
    assert len(re.findall(r"[ (:]Console\(", code)) == code.count("Console(emoji=False")


@pytest.mark.parametrize("total", [None, 3])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_alone_and_is_gone_afterwards(terminal: bool, total: int | None) -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=80)
    with progress(console, "counting", total) as advance:
        console.print("a line")
        advance()
    assert "a line" in said.getvalue()
    assert ("counting" in said.getvalue()) == terminal
    assert ("\x1b[2K" in said.getvalue()) == terminal, "the bar is wiped away"


@pytest.mark.parametrize("terminal", [False, True])
def test_there_is_a_progress_bar_on_a_terminal_and_none_in_a_log(terminal: bool) -> None:
    command = [sys.executable, "-m", "freescale.bench.partition", "--world-size", "2", "--no-reference"]
    environment = os.environ | ({"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"} if terminal else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    assert ("\x1b[" in done.stdout) == terminal
