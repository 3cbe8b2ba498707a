"""What packaging, folders and documents say of each other is true."""

import ast
import configparser
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_setup_cfg_lists_every_package_on_disk() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*__init__.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    found = [ROOT / "__init__.py", *ROOT.glob("[a-z]*/**/__init__.py")]
    folders = tracked or [str(path.relative_to(ROOT)) for path in found]
    packages = {
        ".".join(["freescale", *Path(path).parent.parts])
        for path in folders
        if not path.startswith(("typings", "tests", "build", ".venv"))
    }
    config = setup_cfg()
    assert set(config["options"]["packages"].split()) == packages
    places = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    assert places == {
        package: package.removeprefix("freescale").lstrip(".").replace(".", "/") or "." for package in packages
    }


def test_checkers_see_every_top_level_package() -> None:
    for path in set((ROOT / "typings" / "freescale").iterdir()) - {ROOT / "typings" / "freescale" / "__pycache__"}:
        assert path.is_symlink(), path
        assert path.resolve() == ROOT / path.name, path
    top = {name.split(".")[1] for name in setup_cfg()["options"]["packages"].split() if "." in name}
    assert top <= {path.name for path in (ROOT / "typings" / "freescale").iterdir()}


def test_importing_the_balancer_needs_no_optional_package() -> None:
    optional = ["torchrec", "fbgemm_gpu", "mpi4py", "pyverbs", "ibverbs", "matplotlib", "rich", "triton"]
    code = f"import sys, freescale.balancer, freescale.transport; print([m for m in {optional} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_every_folder_says_in_a_few_lines_what_lives_there() -> None:
    for package, folder in (line.split(" = ") for line in setup_cfg()["options"]["package_dir"].strip().splitlines()):
        said = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
        assert 3 <= len(said.splitlines()) <= 7, package
        named = set(re.findall(r"[\w/]+\.py\b|\w+/", said)) - {"docs/", "docs/paper.md"}
        assert package == "freescale" or named or "_rank" in said, package
        assert all((ROOT / folder / name).exists() for name in named), (package, named)


def test_no_file_of_the_library_is_too_long_to_read() -> None:
    places = setup_cfg()["options"]["package_dir"].strip().splitlines()
    files = [path for line in places for path in (ROOT / line.split(" = ")[1]).glob("*.py")]
    assert len(files) > 100
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_is_too_long_to_read() -> None:
    """Most have 10 to 30 lines; what is over that is one thing after the other."""
    folders = [line.split(" = ")[1] for line in setup_cfg()["options"]["package_dir"].strip().splitlines()]
    files = [*(path for folder in folders for path in (ROOT / folder).glob("*.py")), *(ROOT / "tests").rglob("*.py")]
    lengths = [
        (lines_of(node), f"{path.relative_to(ROOT)} {node.name}")
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(lengths) > 3000
    assert [each for each in lengths if each[0] > 50] == []


def lines_of(function: ast.FunctionDef) -> int:
    """Without its head and its docstring."""
    first, *others = function.body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        if not others:
            return 0
        first = others[0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


CALLED_BY_OTHERS = {
    "get_state": "torchdata's nodes",
    "extra_repr": "torch.nn.Module, when it is printed",
    "_opt_called": "torch's schedulers of learning rates",
}


def test_what_is_defined_is_used() -> None:
    """By the library, examples or tests; what begins with an underscore by the library."""
    folders = [line.split(" = ")[1] for line in setup_cfg()["options"]["package_dir"].strip().splitlines()]
    library = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    others = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    others.remove(Path(__file__))
    inside = Counter(name for path in library for name in re.findall(r"\w+", path.read_text()))
    around = Counter(name for path in others for name in re.findall(r"\w+", path.read_text()))
    defined = {name for path in library for name in names_of(ast.parse(path.read_text()))}
    assert len(defined) > 2000
    unused = {n for n in defined if inside[n] + (0 if n.startswith("_") else around[n]) < 2}
    assert unused == CALLED_BY_OTHERS.keys()


def names_of(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, and what is assigned to a name by itself or to an attribute of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not node.name.startswith("__"):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr
