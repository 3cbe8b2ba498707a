"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import freescale

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(freescale.__path__, "freescale.") if ".__main__" not in module.name
)


LIBRARIES = {"freescale.transport.verbs.pyverbs_card": "pyverbs", "freescale.transport.verbs.ibverbs_card": "ibverbs"}


def test_there_are_modules_to_walk() -> None:
    assert {"freescale.balancer.loader", "freescale.transport.mpi", "freescale.kernels.ops"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], exc_type=ImportError)
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch}
    failed, _ = doctest.testmod(module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
