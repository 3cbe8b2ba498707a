"""Makes a checkout as a reader of the documents has it after `make`, where commands of the documents can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "balancer", "bench", "docs", "embedding", "examples", "kernels", "requirements", "tests", "transport", "typings"
)  # fmt: skip
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")


def make_checkout(folder: Path) -> None:
    """Copy what is in the repository, and give it a `.venv` that finds all that is installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=_LEFT_OUT, symlinks=True)
    _make_environment(folder / ".venv")
    (folder / ".venv" / ".ready").touch()  # make installs nothing more


def _make_environment(venv: Path) -> None:
    """Make an environment that pip can install into, while what is installed here is found and stays as it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    (site,) = venv.glob("lib/python*/site-packages")
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "installed.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in installed))
    for path in Path(sys.prefix).glob("lib/*"):  # MPI's libraries
        if not (venv / "lib" / path.name).exists():
            (venv / "lib" / path.name).symlink_to(path)
    for name in ("etc", "share"):
        if (Path(sys.prefix) / name).is_dir():
            (venv / name).symlink_to(Path(sys.prefix) / name)
    for path in Path(sys.executable).parent.iterdir():
        if path.is_file() and not (venv / "bin" / path.name).exists():
            _take_program(path, venv / "bin")


def _take_program(path: Path, folder: Path) -> None:
    """Link a program; one that is Python's becomes this environment's, so that its pip installs here."""
    with path.open("rb") as file:
        first, rest = file.readline(), file.read()
    if not (first.startswith(b"#!") and b"python" in first):
        (folder / path.name).symlink_to(path)
        return
    (folder / path.name).write_bytes(f"#!{folder / 'python'}\n".encode() + rest)
    (folder / path.name).chmod(0o755)


def run_in_checkout(code: str, folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run shell commands as a reader would who has activated the environment; all they start ends at the limit.

    They are run as they stand. Around them: Open MPI may start ranks as root and more of them than there are cores,
    torchrun takes any port, and pip takes what is installed already rather than what a network has.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
    around = {
        "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder / ".venv"),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PET_STANDALONE": "1",  # torchrun takes a port that is free, whatever else runs on this machine
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # means: without isolation, with the setuptools that is there
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    command = ["timeout", "--kill-after=10", str(limit_s), "bash", "-e", "-o", "pipefail", "-c", code]
    return subprocess.run(
        command, cwd=folder, env=inherited | around, capture_output=True, text=True, timeout=limit_s + 30, check=False
    )
