"""Triton's interpreter accepts more than its compiler: every kernel also compiles for a GPU, without one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run(
        [sys.executable, SCRIPT],
        env={**variables, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    counts = dict(ast.literal_eval(said.stdout.strip()))
    scans = {"group_kernel": 13, "place_kernel": 13, "scan_kernel": 10}
    copies = {"copy_kernel": 22, "narrow_kernel": 8, "sum_kernel": 3}
    assert counts == scans | copies | {"chunk_kernel": 2, "update_kernel": 12}
