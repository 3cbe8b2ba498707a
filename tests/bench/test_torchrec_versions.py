"""Modules that a newer TorchRec imports are found in an older FBGEMM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from freescale.bench import torchrec_versions


def test_modules_that_moved_get_their_new_names_and_packages_within_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_old_library"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.py").write_text("def look_up(): return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    moved = {"some_old_library.new": ["some_old_library.ops"], "some_old_library.new.inner": ["some_old_library.ops"]}
    monkeypatch.setattr(torchrec_versions, "_MOVED", {**moved, "some_old_library.ops": []})
    assert torchrec_versions.supply_moved_modules() == list(moved)  # what is there stays
    inner = sys.modules["some_old_library.new.inner"]
    assert vars(inner)["look_up"]() == 3
    assert vars(sys.modules["some_old_library.new"])["inner"] is inner
    for name in [name for name in sys.modules if name.startswith("some_old_library")]:
        del sys.modules[name]


def test_with_the_installed_versions_nothing_is_supplied() -> None:
    assert torchrec_versions.supply_moved_modules() == []
