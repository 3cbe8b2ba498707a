# Two commands set everything up and run: `make demo` and `make test`. Nothing is installed outside .venv.

PYTHON ?= python3
# cpu or cuda: which list under requirements/ to install
DEVICE ?= cpu
TORCH ?= torch==2.13.0
# More flags for pip, for example: make test PIP_FLAGS="--extra-index-url <PyTorch's CPU index>"
PIP_FLAGS ?=
DATA ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(VENV)/bin/python -m freescale.bench.demo $(if $(DATA),--data $(DATA))

test: $(READY) lint
	$(VENV)/bin/pytest

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# torch goes first and with its own dependencies: on many machines it brings CUDA libraries that the pinned list leaves out
$(READY): requirements/$(DEVICE).txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_FLAGS) "$(TORCH)"
	$(PIP) install --quiet $(PIP_FLAGS) --no-deps -r requirements/$(DEVICE).txt
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
