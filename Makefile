# Two commands set everything up and run: `make demo` and `make test`. Nothing is installed outside .venv.

PYTHON ?= python3
# cpu or cuda: which list under requirements/ to install
DEVICE ?= cpu
TORCH ?= torch==2.13.0
# More flags for pip, for example: make test PIP_FLAGS="--extra-index-url <PyTorch's CPU index>"
PIP_FLAGS ?=
# A Parquet file, and more options, for the demo: make demo DATA=clicks.parquet ARGS="--label clicked --ranks 2"
DATA ?=
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# Errors only: pip warns of root, and of dependencies that the pinned lists leave out on purpose
QUIET := -qq
READY := $(VENV)/.ready

.PHONY: demo report docs test test-long test-cuda lint clean

demo: $(READY)
	$(VENV)/bin/python -m freescale.bench.demo $(if $(DATA),--data "$(DATA)") $(ARGS)

# The paper's evaluation as one page, out/report/index.html: make report DATA=clicks.parquet:history ARGS=--quick
report: $(READY)
	$(VENV)/bin/python -m freescale.bench.report $(if $(DATA),--data "$(DATA)") $(ARGS)

test: $(READY) lint
	$(VENV)/bin/pytest

# The whole fault campaign, under mpiexec too, a coverage-guided fuzzer, and other tests that take minutes; properties
# with examples that are new in each run
test-long: $(READY)
	@$(PIP) install $(QUIET) $(PIP_FLAGS) --no-deps -r requirements/fuzz.txt
	$(VENV)/bin/pytest --long -m "long or hypothesis"

# All tests that need GPUs, each with a deadline; stops when the time is over: make test-cuda DEVICE=cuda ARGS="--limit-s 600"
test-cuda: $(READY)
	$(VENV)/bin/python tests/cuda_run.py out/test-cuda-$$(date -u +%Y%m%d-%H%M%S) $(ARGS)

# The API reference from the docstrings, out/reference/freescale.html; any warning is an error
docs: $(READY)
	$(VENV)/bin/python docs/build_reference.py out/reference

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# torch goes first and with its own dependencies: on many machines it brings CUDA libraries that the pinned list leaves out
$(READY): requirements/$(DEVICE).txt setup.cfg pyproject.toml
	@echo "Setting up $(VENV), once: some 2 GB and one to ten minutes, by the network"
	@$(PYTHON) -m venv $(VENV)
	@echo "  1 of 3: $(TORCH), the largest"
	@$(PIP) install $(QUIET) $(PIP_FLAGS) "$(TORCH)"
	@echo "  2 of 3: what requirements/$(DEVICE).txt lists: MPI, Arrow, TorchRec, the tools of the tests"
	@$(PIP) install $(QUIET) $(PIP_FLAGS) --no-deps -r requirements/$(DEVICE).txt
	@echo "  3 of 3: freescale itself, so that changes here are seen at once"
	@$(PIP) install $(QUIET) --no-build-isolation --no-deps -e .
	@touch $@
	@echo "Done. To use it by hand: source $(VENV)/bin/activate"

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
