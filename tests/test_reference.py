"""The API reference is made without a warning, has every public name, and its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("balancer", "embedding", "kernels", "transport")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "build_reference.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path: path.read_text() for path in folder.rglob("*.html")}


def test_every_public_name_is_described(pages: dict[Path, str]) -> None:
    for package in PACKAGES:
        (page,) = (text for path, text in pages.items() if path.name == f"{package}.html")
        public = importlib.import_module(f"freescale.{package}").__all__
        assert public
        assert set(public) <= set(re.findall(r'id="([\w.]+)"', page)), package


def test_methods_from_internal_bases_are_described_with_the_public_class(pages: dict[Path, str]) -> None:
    (page,) = (text for path, text in pages.items() if path.name == "embedding.html")
    assert 'id="PrioritizedEmbeddingCollection.reset"' in page


def test_links_inside_the_reference_lead_somewhere(pages: dict[Path, str]) -> None:
    for path, text in pages.items():
        for link in re.findall(r'href="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / place).resolve() if place else path
            assert target in pages, f"{path.name} links to {link}"
            assert not anchor or f'id="{anchor}"' in pages[target], f"{path.name} links to {link}"


def test_every_public_name_says_what_it_is(pages: dict[Path, str]) -> None:
    for path, text in pages.items():
        for name, section in re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL):
            assert 'class="docstring"' in section, f"{path.name}: {name}"
