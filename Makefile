# Two commands are enough: `make train` and `make test`. Both make the environment first, if it is not there.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 3
INSTALLED := $(VENV)/.installed

.PHONY: train test test-slow test-zoo test-long test-fuzz test-faults test-kill test-gpu test-slurm test-docs docs lint dist install clean
.DEFAULT_GOAL := help

help:
	@echo "make train [ARGS='key=value ...']   train; by default digits as 2 processes: below a minute, once installed"
	@echo "make test  [ARGS='-k name']         run the tests but those of the tiers below, JOBS=3 at a time"
	@echo "make test-slow                      other launchers, kills and signals, all sizes of each property; some minutes"
	@echo "make test-zoo                       cut every classification network of torchvision: half an hour, 12 GB"
	@echo "make test-long                      20,000 micro-batches: does memory stay flat? some minutes"
	@echo "make test-fuzz                      strangers knock at every port of a run for a minute; some minutes"
	@echo "make test-faults [ARGS='--seeds N'] 10,000 runs with faults drawn by a seed: 15 to 40 minutes on two cores"
	@echo "make test-kill [ARGS='--kills N']   kill 100 runs and start them again: an hour; Linux only"
	@echo "make test-gpu                       run the tests that need a CUDA device, as it is installed"
	@echo "make test-slurm                     a SLURM cluster of four nodes on this machine; needs root, Linux, apt"
	@echo "make test-docs                      run every command of README and docs; a quarter of an hour"
	@echo "make docs                           build the site of the documentation into build/site"
	@echo "make lint                           ruff, mypy, and that imports point down"
	@echo "make dist                           build the wheel and the source archive into dist/"
	@echo "make install                        make $(VENV), which train and test do by themselves"
	@echo "make clean                          remove $(VENV)"

train: install
	@$(VENV)/bin/adl-dist train $(ARGS)

test: install
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install
	@$(VENV)/bin/python -m pytest -m slow $(ARGS)

test-zoo: install
	@$(VENV)/bin/python -m pytest -m zoo $(ARGS)

test-long: install
	@$(VENV)/bin/python -m pytest -m long $(ARGS)

test-fuzz: install
	@$(VENV)/bin/python -m pytest -m fuzz $(ARGS)

test-faults: install
	@$(VENV)/bin/python -m tools.faults $(ARGS)

test-kill: install
	@$(VENV)/bin/python -m tools.kill $(ARGS)

# Without an install: a machine with GPUs may have no network. What is there must be torch and pytest; no Hydra.
test-gpu:
	@PYTHONPATH=. $(or $(wildcard $(VENV)/bin/python),$(PYTHON)) -m pytest --noconftest -o addopts=-q -W default -m gpu tests/gpu $(ARGS)

test-slurm: install
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf,slurm]'
	@$(VENV)/bin/python -m pytest -m slurm $(ARGS)

test-docs: install
	@$(VENV)/bin/python -m pytest -n $(JOBS) -m docs tests/docs $(ARGS)

# ADL_DOCS_REPO_URL=https://... makes links to source files lead there.
docs: install
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf,docs]'
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "$(VENV)/bin/python -m http.server --directory build/site"

lint: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

dist: install
	@rm -rf dist
	@$(VENV)/bin/python -m hatchling build -d dist

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf]'
	@touch $@

clean:
	rm -rf $(VENV)
