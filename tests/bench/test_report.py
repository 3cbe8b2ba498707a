"""The report: parts run alone, one that fails leaves the others, and the page holds everything it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from freescale.bench import report
from freescale.bench.report_claims import NOT_HERE, claims
from freescale.bench.report_parts import EARLIER, Machine, Part, newest, parts_for, run_part
from freescale.bench.virtual_study import AS_LOADED, COST_MODEL, FLOOR

from measured_steps import embedding_records, step_records

PARTITION = Part(
    "partition", "How even?", "Figure 8", ("--world-size", "4", "--batch-size", "8", "--repeats", "1", "--no-reference")
)


class Balanced(HTMLParser):
    """Checks that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def results(folder: Path) -> Path:
    """A folder of one earlier result with a picture."""
    folder.mkdir()
    (folder / "picture.png").write_bytes(b"\x89PNG not really")
    (folder / "2026-01-02-something.md").write_text(
        "# Old\n\n![seen](picture.png)\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n"
    )
    return folder


def test_a_part_runs_and_the_page_shows_it_without_anything_beside_it(tmp_path: Path) -> None:
    ran = run_part(PARTITION, tmp_path)
    assert not ran.fault
    assert ran.seconds > 0
    assert "greedy_batch_size" in ran.markdown
    assert ran.picture is not None
    assert ran.json is not None
    failed = replace(ran, part=replace(PARTITION, title="<script>"), fault="exit status 1: <b>oh</b>")
    page = report.render([ran, failed], results(tmp_path / "results"))
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)[^"]*"', page) == []
    assert page.count("data:image/png;base64,") == 3
    assert '<td style="text-align:right">2</td>' in page, "tables of earlier results are tables"
    assert "<script>" not in page
    assert "<b>oh</b>" not in page
    assert "python -m freescale.bench.partition" in page


def test_a_part_that_cannot_run_shows_its_newest_earlier_result_and_links_stay_within_the_page(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    for day, text in (("01", "# Old"), ("02", "# New\n\nsee [the old](2026-02-01-embedding-cuda.md), [not](gone.md)")):
        (folder / f"2026-02-{day}-embedding-cuda.md").write_text(text)
        (folder / f"2026-02-{day}-embedding-cuda.png").write_bytes(b"\x89PNG not really")
    (folder / "2026-02-01-simulate.md").write_text("# Many")
    parts = {part.name: part for part in parts_for(Machine(0), tmp_path)}
    done = [run_part(parts["embedding"], tmp_path), run_part(replace(parts["simulate"], lacks="time"), tmp_path)]
    page = report.render(done, folder)
    assert '<a href="#2026-02-02-embedding-cuda">' in page
    assert page.count("data:image/png;base64,") == 2, "the new one's, and that of the result which shows a picture"
    assert '<a href="#2026-02-01-embedding-cuda">the old</a>' in page
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))
    assert re.findall(r"<summary>(\S+)\s+<span", page) == ["2026-02-01-simulate"], "marked as simulated"
    assert page.count("<h1>") == 1


def test_a_part_that_fails_says_so_and_shows_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    for name in ("partition.json", "partition.png", "partition.results/2026-01-02-partition.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    failed = run_part(replace(PARTITION, arguments=("--lengths", "nowhere.parquet:x")), tmp_path)
    assert failed.fault.startswith("exit status 2: error: cannot read nowhere.parquet")
    assert (failed.json, failed.picture, failed.markdown) == (None, None, "")
    assert "ended after 0.01 s" in run_part(replace(PARTITION, limit_s=0.01), tmp_path).fault
    assert run_part(replace(PARTITION, lacks="2 GPUs"), tmp_path).fault == "not run: it needs 2 GPUs"


def test_parts_fit_the_machine(tmp_path: Path) -> None:
    none = {part.name: part for part in parts_for(Machine(0), tmp_path)}
    assert none["embedding"].lacks == none["end_to_end"].lacks == "2 GPUs"
    assert "data" in none["inspect"].lacks
    assert str(newest(EARLIER["end_to_end"])) in none["simulate"].arguments, "beside what two GPUs measured earlier"
    one = {part.name: part for part in parts_for(Machine(1), tmp_path)}
    assert not one["end_to_end"].lacks
    assert one["end_to_end"].arguments[2:4] == ("--ranks", "1")
    assert one["embedding"].lacks == "2 GPUs"
    assert one["simulate"].arguments[1] == str(tmp_path / "virtual_ranks.json")
    some = {part.name: part for part in parts_for(Machine(2), tmp_path, ["simulate", "end_to_end"])}
    assert str(tmp_path) not in " ".join(some["simulate"].arguments), "of what does not run no file is read"
    two = {part.name: part for part in parts_for(Machine(2, "data.parquet:uih"), tmp_path)}
    assert not any(part.lacks for part in two.values())
    assert two["inspect"].arguments == ("data.parquet:uih",)
    assert str(tmp_path / "end_to_end.json") in two["simulate"].arguments
    assert "--ranks" not in two["end_to_end"].arguments
    assert [part.name for part in two.values() if part.simulated] == ["simulate"]


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
@pytest.mark.parametrize("quick", [False, True])
def test_every_command_takes_the_options_it_is_given(num_gpus: int, quick: bool, tmp_path: Path) -> None:
    for part in parts_for(Machine(num_gpus, "data.parquet:uih", quick), tmp_path):
        text = (Path(report.__file__).parent / f"{part.name}.py").read_text()
        options = [option for option in part.arguments if option.startswith("--")]
        options += ["--plot"] * part.plots + ["--json"] * part.has_json + ["--results"] * part.has_results
        assert [option for option in options if f'"{option}"' not in text] == [], part.name


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    parts = parts_for(Machine(0), tmp_path)
    chosen = report.chosen(parts, ["partition"])
    assert [part.name for part in chosen if not part.lacks] == ["partition"]
    with pytest.raises(ValueError, match="--only must name some of"):
        report.chosen(parts, ["nonsense"])


def test_claims_are_read_from_the_files_of_the_parts(tmp_path: Path) -> None:
    def outcome(partitioner: str, value: float, world_size: int = 64) -> dict[str, object]:
        point = {"max_length": 21000, "batch_size": 128, "world_size": world_size}
        return {**point, "partitioner": partitioner, "straggler_percentage": value}

    found = [outcome(AS_LOADED, 20.0), outcome("FBS", 2.0), outcome(COST_MODEL, 0.75), outcome(FLOOR, 0.5)]
    virtual, broken = tmp_path / "virtual.json", tmp_path / "broken.json"
    virtual.write_text(json.dumps({"device": "a GPU", "outcomes": [*found, outcome("FBS", 9.0, 128)]}))
    broken.write_text("{}")
    said = claims({"virtual_ranks": virtual, "collisions": None, "simulate": broken})
    assert [claim.ours for claim in said if "on a GPU" in claim.ours] == [
        "20.0 % at 21,000 / 128 / 64 on a GPU",
        "20.0 % to 2.00 %, 10.0 times less, at 21,000 / 128 / 64 on a GPU (timing noise alone: 0.50 %)",
        "0.75 %, +0.25 points from the floor of timing noise, at 21,000 / 128 / 64 on a GPU",
    ]
    by_figure = {claim.figure: claim.ours for claim in said if claim.figure in ("Figure 3", "Figures 2 and 8")}
    assert by_figure == {"Figure 3": NOT_HERE, "Figures 2 and 8": NOT_HERE}
    assert said[-1].ours.startswith("not to be read from broken.json")


@pytest.mark.parametrize(
    ("part", "of"), [("kernels", "outcomes"), ("virtual_ranks", "outcomes"), ("transport", "contention")]
)
def test_a_part_whose_time_was_over_too_early_says_so(part: str, of: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"environment": {"processor": "a CPU"}, of: []}))
    told = {claim.ours for claim in claims({part: path})}
    assert told == {NOT_HERE, "too little was measured in the time there was (empty.json)"}


def test_measurements_of_two_gpus_are_put_in_words(tmp_path: Path) -> None:
    embedding, steps = tmp_path / "embedding.json", tmp_path / "steps.json"
    embedding.write_text(json.dumps({"found": embedding_records("shared memory", {"sdd": 12.0, "prioritized": 1.25})}))
    steps.write_text(json.dumps({"found": step_records({"base": 20.0, "sdd": 17.0, "freescale": 1.5})}))
    files = {"embedding": embedding, "end_to_end": steps}
    said = {claim.figure: claim.ours for claim in claims(files) if claim.ours != NOT_HERE}
    assert said["Figure 9"] == (
        "shared memory, cut 8,000, 5 % of rows collide, 1 table: exposed ms (bubble): "
        "TorchRec SDD 0.00 (12.0), ours, prioritized 0.00 (1.2)"
    )
    assert said["Figure 11"] == (
        "2 GPUs; nvlink, cut 8,000, 128 samples a rank: step (bubble) ms: 125.0 (20.0) TorchRec, "
        "122.0 (17.0) SDD, 106.5 (1.5) ours"
    )


def test_kernels_contention_and_a_rank_alone_are_put_in_words(tmp_path: Path) -> None:
    kernels, transport, alone = (tmp_path / f"{name}.json" for name in ("kernels", "transport", "alone"))
    case = {"operation": "permute", "rows": "int64", "lengths": "uniform", "correct": True, "device_ms": None}
    ways = (("ours", 2.0), ("loop, cat", 40.0), ("loop, copies", 100.0), ("FBGEMM", 3.0))
    outcomes = [{**case, "world_size": 32, "way": way, "call_ms": ms} for way, ms in ways]
    outcomes += [{**each, "world_size": 64, "call_ms": 7.0} for each in outcomes]
    kernels.write_text(json.dumps({"environment": {"processor": "a CPU"}, "outcomes": outcomes}))
    slowdowns = [("NCCL", 0.1, "endless"), ("NCCL", 0.3, "endless"), ("copy_engine", 0.01, "endless")]
    slowdowns += [("copy_engine", 0.02, "endless"), ("NCCL 1", 0.5, "endless"), ("NCCL", 0.9, "256 MB a step")]
    keys = ("way", "slowdown", "traffic")
    transport.write_text(json.dumps({"contention": [dict(zip(keys, each, strict=True)) for each in slowdowns]}))
    records = [each for each in step_records({"sdd": 5.0, "freescale": 6.1}) if each["rank"] == 0]
    alone.write_text(json.dumps({"found": records}))
    said = {c.figure: c.ours for c in claims({"kernels": kernels, "transport": transport, "end_to_end": alone})[:-1]
            if c.ours != NOT_HERE}  # fmt: skip
    assert said == {
        "Figure 7": "20 to 50 times at 32 ranks, over all operations and two kinds of loops, on a CPU",
        "Figure 10": "computing slower beside endless traffic by 20.0 % (NCCL), 1.5 % (copy_engine), the middle one "
        "of 2 workloads",
        "Figure 11": "1 GPU, nobody to wait for; cut 8,000, 128 samples a rank: step 110.00 ms (SDD), 111.10 ms "
        "(ours, +1.0 %)",
    }


def test_the_simulated_claim_is_marked(tmp_path: Path) -> None:
    same = {"cluster": "paper", "world_size": 256, "collisions": 0.05}
    rows = [
        {"technique": name, **same, "simulated": {"bubble_ms": value}}
        for name, value in (("TorchRec", 100.0), ("FreeScale", 5.0))
    ]
    (tmp_path / "simulate.json").write_text(json.dumps({"rows": rows}))
    claim = claims({"simulate": tmp_path / "simulate.json"})[-1]
    assert claim.simulated
    assert "95.0 % less, on 256 ranks of cluster 'paper' where 5 % of the rows" in claim.ours


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--output", str(tmp_path / "out"), "--only", "inspect"]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "it needs data (--data path.parquet:column)" in page
    assert "Earlier results" in page
    assert "exposed ms (bubble)" in page, "two GPUs have been measured before"
    late = ["--only", "partition", "--limit-s", "0"]
    assert report.main(["--output", str(tmp_path / "late"), *late]) == 0
    assert "not run: it needs more than the 0 s of --limit-s" in (tmp_path / "late" / "index.html").read_text()
    assert report.main(["--output", str(tmp_path / "out"), "--only", "nonsense"]) == 2
    assert "error: --only must name" in capsys.readouterr().err
