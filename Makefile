# make demo | test | lint set up .venv with the machine's python3 first, each with the extra of pyproject.toml that it needs, in the versions of constraints.txt.
# Without an NVIDIA or AMD GPU, PyTorch is its build for CPUs, if that build's own index can be reached. Variables:
#   PYTHON=python3.12     the interpreter that .venv is made of
#   PY=python3            use this interpreter as it is: no .venv, nothing is installed
#   VENV_ARGS=--system-site-packages   let .venv see the machine's packages (with CONSTRAINTS= it keeps their versions)
#   UV=1                  packages by uv, in a third of the time; of pip's settings it reads none (.ci/run hands them over)
#   TORCH_INDEX=URL       a package index that has PyTorch for your hardware, of those that pytorch.org names under "Get started"
#   ARGS="-k rope -x"     further arguments of pytest or of the demo;  JOBS=1  pytest processes

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH_INDEX ?=
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
ARGS ?=
UV ?=
unexport PYTHONDONTWRITEBYTECODE # tests, the demo and the bench start many processes: each would compile PyTorch's and transformers' sources anew

ifndef PY
PY := $(VENV)/bin/python
ready = $(VENV)/.ready-$1
endif
# of all indexes the newest version, as pip takes it: a PyTorch for CPUs is newer (+cpu) than the one that it stands for
uv = $(VENV)/bin/uv pip install -q --python $(VENV)/bin/python --index-strategy unsafe-best-match
pip = $(VENV)/bin/python -m pip install -q --no-compile
# extras, each with those that it includes
EXTRAS_train := train
EXTRAS_test := test $(EXTRAS_train)
EXTRAS_docs := docs $(EXTRAS_train)
EXTRAS_dev := dev $(EXTRAS_test) $(EXTRAS_docs)

.PHONY: help setup demo kind docs linkcheck test test-integrations lint format hooks clean
help:
	@echo "make demo    train a small Llama twice, stock and with our kernels, and compare (runs/demo)"
	@echo "make kind    a drill of Kubernetes without a GPU: a job of two workers in a cluster in containers (docker, kind, kubectl), one of which is killed; without these, by processes"
	@echo "make test    the test suite; without a GPU, ARGS='-m slow' runs the other cases of every operator and every kernel variant, an hour"
	@echo "make test-integrations   TRL, axolotl, Lightning, other PyTorch and transformers, Kubernetes, Flyte ..., each in an environment of its own (.venv-integrations); ARGS='trl frameworks -k dpo'"
	@echo "make lint    ruff, mypy and pyright;  make format  lets ruff repair what it can;  make hooks  installs the pre-commit hooks"
	@echo "make docs    the site, into build/docs/index.html, with warnings as errors; no network is needed once .venv has the tools;  make linkcheck  asks every address that pages name"
	@echo "make setup   only .venv, with all that the others need;  make clean  removes .venv and caches"
	@sed -n 's/^#   /  /p' Makefile

setup: $(call ready,dev)

demo: $(call ready,train)
	PYTHONPATH=src $(PY) -m liger_kernel.cli demo $(ARGS)

kind: $(call ready,test)
	PYTHONPATH=src $(PY) deploy/kind/drill.py $(ARGS)

docs linkcheck: $(call ready,docs)
	PYTHONPATH=src $(PY) -m sphinx -q -E -W --keep-going -b $(if $(filter linkcheck,$@),linkcheck,html) docs build/$(if $(filter linkcheck,$@),linkcheck,docs) $(ARGS)

# One thread per process: the processes share the cores already, and small tensors gain nothing from more.
test: $(call ready,test)
	@workers=; if [ $(JOBS) -gt 1 ] && $(PY) -c 'import xdist' 2>/dev/null; then workers='-n $(JOBS)'; fi; \
	set -x; OMP_NUM_THREADS=1 PYTHONPATH=src $(PY) -m pytest $$workers $(ARGS)

test-integrations: $(call ready,test)
	OMP_NUM_THREADS=1 PYTHONPATH=src $(PY) tests/integrations/environments.py $(ARGS)

lint: $(call ready,dev)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m basedpyright --project pyproject.toml --pythonpath $(PY)

format: $(call ready,dev)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

hooks: $(call ready,dev)
	$(PY) -m pre_commit install

$(VENV)/.ready-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed, $(PYTHON) is not: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV_ARGS) $(VENV) || { echo "$(PYTHON) cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv); or use an interpreter that has the packages: make PY=python3" >&2; exit 1; }
	$(VENV)/bin/python -m pip install -q $(addprefix -c ,$(CONSTRAINTS)) setuptools $(if $(UV),uv)
	@index='$(TORCH_INDEX)'; if [ -z "$$index" ] && [ "$$(uname)" = Linux ] && [ ! -e /dev/kfd ] && ! nvidia-smi >/dev/null 2>&1; then \
		if $(VENV)/bin/python -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=10)' 2>/dev/null; then index='$(CPU_INDEX)'; else \
			echo "No GPU here, and $(CPU_INDEX) cannot be reached. If pip now fetches nvidia-* packages (several GB, needless), stop it and give TORCH_INDEX (see the Makefile)."; fi; fi; \
	set -x; $(if $(UV),$(uv),$(pip)) $(addprefix -c ,$(CONSTRAINTS)) $${index:+--extra-index-url "$$index"} --no-build-isolation -e '.[$*]'
	@touch $(addprefix $(VENV)/.ready-,$(EXTRAS_$*))

clean:
	rm -rf build $(VENV) .venv-integrations .pytest_cache .ruff_cache .mypy_cache
