# On a fresh machine with Python 3.11 or newer, `make demo` or `make test` does everything.
# What is installed where, and why there are several environments:
#   .venv          MPICH, every framework, the checkout itself (editable), and the tools
#   .venv-openmpi  the same with Open MPI, whose mpiexec would overwrite MPICH's
#   .venv-bare     the built wheel and what it depends on: no MPI library, no framework
#   .venv-libraries    MPICH, and libraries that take gigabytes, for tests that run at night
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
few := EXAMPLES=$(or $(EXAMPLES),5)
# The rest of them run on ranks: 5 over each control channel, of one MPI or the other, and 5 with the wheel. `make properties`
# and `make nightly` take both channels of each.
alone := EXAMPLES=$(or $(EXAMPLES),10)
# EVERY=1 runs each row of every crossed table; without it those among which every pair of values occurs.
EVERY ?=
PYTEST_ARGS ?=
# How many processes share the files of tests that no mpiexec runs in step. Two of four often only wait; of those
# whose tests do nothing but launch programs, most do.
WORKERS ?= 4
LAUNCHING_WORKERS ?= 5
BENCH_ARGS ?=
# What of the benchmark a commit is compared by, how often it is run, and how much longer something may take.
BENCH_MODES ?= latency bandwidth trees
ROUNDS ?= 3
AT_MOST ?= 1.1
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	command -v $$python; break; fi; done)

comma := ,
chosen := $(filter torch jax,$(subst $(comma), ,$(FRAMEWORKS)))
framework_stamps := $(patsubst %,.venv/.stamp-%,$(chosen))
# What tests need in an environment. FRAMEWORKS leaves frameworks out of it, and with them their tests.
tested = $(patsubst %,$(1)/.stamp-%,test $(chosen) $(patsubst jax,test-jax,$(filter jax,$(chosen))))
version := $(shell sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml)
native := setup.py $(shell find arraycomm/_native -name '*.[ch]')
sources := $(native) $(shell find arraycomm adapters -name '*.py' -o -name '*.cu' -o -name py.typed)
# Its name says for which platform it is, if there was a compiler.
wheel := $$(echo $$PWD/dist/arraycomm-$(version)-*.whl)
# By uv, or else by pip. Python compiles what is imported, when it first is: to compile all that there is takes longer
# than to install it.
install := .ci/install.py

export PYTHONUNBUFFERED := 1
# Whatever the environment says: the tests start hundreds of processes, and each would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=
export EXAMPLES EVERY

# In the order of their names: files with few tests, which take longest, would come last.
by_file = --numprocesses $(or $(1),$(WORKERS)) --dist loadfile --no-loadscope-reorder
# What every rank of an MPI job runs in step.
on_ranks := tests/collectives tests/transports tests/protocol properties $(patsubst %,tests/%.py,trees/test_plan trees/test_reduce \
	cuda/test_staged_link training/test_data_on_ranks training/test_divergence training/test_join training/test_metrics)
# Of these, what is decided before anything of the MPI comes in, and runs under one of them.
on_one_mpi := $(patsubst %,tests/%.py,collectives/test_layouts collectives/test_custom_ops training/test_divergence)
# What may differ where only the wheel and what it needs is installed: what it holds, imports that find nothing,
# a world of one process, and, on NumPy alone, `given`, and the laws, which are of collectives of each kind.
in_wheel := properties/test_laws.py $(patsubst %,tests/%.py,test_packaging cli/test_run cli/test_doctor native/test_door session/test_runtime arrays/test_exchange \
	training/test_data_on_ranks testing/test_run)
# The laws, and a file for each thing that is promised beside them.
quick := properties/test_laws.py properties/test_history_laws.py properties/test_refusal_laws.py properties/test_schedule_laws.py $(patsubst %,tests/%.py,test_packaging \
	arrays/test_dlpack arrays/test_results arrays/test_malformed \
	collectives/test_requests collectives/test_objects collectives/test_groups collectives/test_together collectives/test_reproducible \
	protocol/test_errors protocol/test_missing_ranks protocol/test_engine trees/test_reduce training/test_data_on_ranks training/test_metrics \
	cuda/test_nccl_link cuda/test_staged_link testing/test_run)
# Programs that are launched, of which MPI libraries may end some otherwise; the files that take longest come first.
# By their names: pytest collects a file with its directory if it is given both.
longest := tests/adapters/test_processes.py tests/session/test_failing.py
# Who gets the first, which is one test, gets the sixth as well.
launching := -m each_mpi $(longest) tests/testing/test_given.py tests/faults tests/testing/test_plugin.py tests/docs/test_jobs.py \
	tests/hosts $(filter-out $(longest),$(wildcard tests/session/test_*.py)) tests/adapters/test_jax_collectives.py tests/trace/test_environment.py tests/cli/test_run.py tests/cli/test_doctor.py
even := $(or $(RANKS),4)
odd := $(or $(RANKS),3)
# Settings of the launchers. Open MPI refuses root and more ranks than cores unless told otherwise.
mpich := OMP_NUM_THREADS=1 .venv/bin/mpiexec -n
# Under Open MPI everything runs in Python: each law holds with the native part and without it.
in_python := ARRAYCOMM_NATIVE=0
openmpi := $(in_python) OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	.venv-openmpi/bin/mpiexec --oversubscribe -n

.PHONY: help
help:
	@echo 'make demo    train on $(FRAMEWORKS) with 3 ranks, and compare with one process (FRAMEWORKS=numpy,jax leaves torch out)'
	@echo 'make test    every test: alone, under MPICH, under Open MPI, and with the built wheel'
	@echo 'make test-quick    the laws, and a test of each promise, on threads: about a minute'
	@echo 'make properties EXAMPLES=1000    the laws alone, on as many examples: threads, MPICH, Open MPI'
	@echo 'make test-processes    the laws over processes that no MPI connects; make nightly    this, more examples, and faults'
	@echo 'make test-libraries    tests of Keras, MLX, Lightning, accelerate and others, in an environment of their own'
	@echo 'make planted    put faults into a copy of the library, and see that a law catches each'
	@echo 'make mutants    put small random changes into a copy for ten minutes, and see which no law catches'
	@echo 'make lint    ruff: rules and format; import-linter: the layers; the structure, and the route of a call, in numbers'
	@echo 'make types   mypy, strict, on the built wheel; what mypy and pyright see of public calls'
	@echo 'make sanitize    the native part and its tests, built with sanitizers'
	@echo 'make docs    build the documentation into site/'
	@echo 'make dist    build and check what goes to a package index, into dist/'
	@echo 'make release   what a release uploads, as far as this machine makes it, into dist/release/'
	@echo 'make test-device    the tests that need a GPU, in the environment of PYTHON'
	@echo 'make bench   time collectives beside mpi4py's (BENCH_ARGS="latency --ranks 4")'
	@echo 'make bench-check BASE=commit    the benchmark of this checkout beside that of a commit, in turns'
	@echo 'make clean   remove what was built; make distclean the environments too'

.PHONY: demo
demo: .venv/.stamp-demo $(framework_stamps)
	.venv/bin/python docs/examples/demo.py --frameworks '$(FRAMEWORKS)'

.PHONY: bench
bench: .venv/.stamp-base $(framework_stamps)
	.venv/bin/python -m arraycomm bench $(BENCH_ARGS)

# This checkout beside a commit, in turns: machines are faster at some times than at others.
.PHONY: bench-check
bench-check: .venv/.stamp-base $(framework_stamps)
	@test -n '$(BASE)' || { echo 'bench-check: say which commit, as in: make bench-check BASE=HEAD~1' >&2; exit 2; }
	rm -rf build/bench; git worktree prune; git worktree add --quiet --detach build/bench/before '$(BASE)'
	@here="$$PWD"; before="$$here/build/bench/before"; python="$$here/.venv/bin/python"; \
	trap 'git worktree remove --force "$$before"' EXIT; \
	ln -s ../adapters "$$before/arraycomm/adapters"; \
	(cd "$$before" && "$$python" setup.py --quiet build_ext --inplace); \
	for mode in $(BENCH_MODES); do \
	for round in $$(seq $(ROUNDS)); do \
	for tree in "$$before" "$$here"; do \
	name=after; [[ "$$tree" == "$$here" ]] || name=before; \
	echo "== $$mode, round $$round of $(ROUNDS), $$name"; \
	(cd "$$tree" && PYTHONPATH="$$tree" "$$python" -m arraycomm bench "$$mode" $(BENCH_ARGS) \
	--json "$$here/build/bench/$$mode-$$name-$$round.json" > /dev/null); \
	done; done; done; \
	files() { ls build/bench/*-"$$1"-*.json | paste -sd, -; }; \
	"$$python" -m arraycomm bench --compare "$$(files before)" "$$(files after)" --at-most $(AT_MOST)

# What a check of everything needs: first the environment that the others share downloads and a wheel with.
.PHONY: environment other-environments .venv/compiled .venv-openmpi/compiled
environment: $(call tested,.venv) .venv/.stamp-lint .venv/.stamp-docs build/wheel/.stamp
other-environments: $(call tested,.venv-openmpi) .venv-bare/.stamp-wheel
	@$(MAKE) --no-print-directory .venv-openmpi/compiled

# Has Python compile, once, what all workers and ranks would each compile as they start: the tests, and what they import.
.venv/compiled .venv-openmpi/compiled:
	@$(@D)/bin/python -m pytest -p no:cacheprovider --collect-only -q $(wildcard properties) tests >/dev/null

.PHONY: test test-quick test-alone test-software-device test-mpich test-openmpi test-openmpi-on-ranks test-launched test-wheel
# Programs that are launched, and ranks, wait for one another, and leave a core idle now and then.
test: $(call tested,.venv) $(call tested,.venv-openmpi) .venv-bare/.stamp-wheel
	@echo '== tests in one process, and meanwhile programs under Open MPI; then those on ranks, and meanwhile of the wheel'
	@said="$$(mktemp -d)"; failed=0 launched= wheel=; trap 'rm -r "$$said"; kill "$$launched" "$$wheel" 2> /dev/null || true' EXIT; \
	$(MAKE) --no-print-directory test-launched LAUNCHING_WORKERS=2 > "$$said/launched" 2>&1 & launched=$$!; \
	$(MAKE) --no-print-directory test-alone WORKERS=3 || failed=1; \
	wait "$$launched" || failed=1; \
	nice -n 19 $(MAKE) --no-print-directory test-wheel WORKERS=1 > "$$said/wheel" 2>&1 & wheel=$$!; \
	$(MAKE) --no-print-directory --keep-going test-software-device test-mpich test-openmpi-on-ranks || failed=1; \
	wait "$$wheel" || failed=1; \
	echo '== what was run meanwhile'; cat "$$said"/*; exit "$$failed"

test-quick: $(call tested,.venv)
	$(few) .venv/bin/python -m pytest $(PYTEST_ARGS) $(quick)

test-alone: $(call tested,.venv)
	@echo '== tests, one process'
	$(alone) .venv/bin/python -m pytest $(by_file) $(PYTEST_ARGS) $(wildcard properties) tests

# What needs a device, over one in software: with CuPy's arrays, on one rank and on two.
software := $(few) PYTHONPATH=tests/support/device NCCL_MULTI_RANK_GPU_ENABLE=1
test-software-device: $(call tested,.venv)
	@echo '== tests of devices, over devices in software: on two ranks, and meanwhile those of one, printed at the end'
	@said="$$(mktemp)"; $(software) .venv/bin/python -m pytest -p no:cacheprovider --numprocesses $(WORKERS) $(PYTEST_ARGS) \
	tests/cuda/on_device > "$$said" 2>&1 & one=$$!; trap 'rm "$$said"; kill "$$one" 2> /dev/null || true' EXIT; failed=0; \
	$(software) $(mpich) 2 .venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) tests/cuda/on_device || failed=1; \
	wait "$$one" || failed=1; cat "$$said"; exit "$$failed"

test-mpich: $(call tested,.venv)
	@echo '== tests of communication, $(even) ranks under MPICH'
	$(few) $(mpich) $(even) .venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) $(on_ranks)

test-openmpi: test-openmpi-on-ranks test-launched

test-openmpi-on-ranks: $(call tested,.venv-openmpi)
	@echo '== tests of communication, $(odd) ranks under Open MPI'
	$(few) $(openmpi) $(odd) .venv-openmpi/bin/python -m pytest -p no:cacheprovider $(on_one_mpi:%=--ignore=%) $(PYTEST_ARGS) $(filter-out $(on_one_mpi),$(on_ranks))

test-launched: $(call tested,.venv-openmpi)
	@echo '== tests of programs that are launched, under Open MPI'
	.venv-openmpi/bin/python -m pytest -p no:cacheprovider $(call by_file,$(LAUNCHING_WORKERS)) $(PYTEST_ARGS) $(launching)

# The tests are those of the source distribution, in a directory without the sources: only the wheel can be imported.
test-wheel: .venv-bare/.stamp-wheel
	@echo '== tests, the built wheel, no MPI library and no framework'
	@elsewhere="$$(mktemp -d)"; trap 'rm -rf "$$elsewhere"' EXIT; \
	tar --extract --strip-components 1 --directory "$$elsewhere" --file dist/arraycomm-$(version).tar.gz; \
	rm -r "$$elsewhere"/{arraycomm,adapters}; \
	bare="$$PWD/.venv-bare/bin/python"; cd "$$elsewhere"; \
	"$$bare" -c 'import arraycomm; print("arraycomm from", arraycomm.__path__[0])'; \
	$(few) "$$bare" -m pytest -p no:cacheprovider -rfE $(by_file) $(PYTEST_ARGS) $(in_wheel)

# The oldest versions of what arraycomm needs that pyproject.toml allows; `given` and pytest are of today.
.PHONY: test-oldest
test-oldest: .venv-oldest/.stamp-wheel
	@echo '== tests, the built wheel with the oldest versions of what it needs'
	OMP_NUM_THREADS=1 .venv-oldest/bin/mpiexec -n $(even) .venv-oldest/bin/python -m pytest -p no:cacheprovider properties

# On a machine with a GPU, with CuPy and what else is to be tested in the environment of $(PYTHON). It goes on behind
# what fails or hangs; DEVICE_ARGS="--limit 600 --jobs 3 alone programs" says for how long, and which parts.
DEVICE_ARGS ?=
.PHONY: test-device
test-device:
	$(PYTHON) -m tests.cuda.on_device $(DEVICE_ARGS)

.PHONY: properties
properties: $(call tested,.venv) $(call tested,.venv-openmpi)
	.venv/bin/python -m pytest $(PYTEST_ARGS) properties
	$(mpich) $(even) .venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) properties
	$(openmpi) $(odd) .venv-openmpi/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) properties

# The laws over processes of one node that no MPI connects, as torchrun starts them: rank 0's report is shown.
.PHONY: test-processes
test-processes: $(call tested,.venv)
	@echo '== laws, $(odd) processes without MPI'
	@export ARRAYCOMM_NUM_PROCESSES=$(odd) OMP_NUM_THREADS=1 ARRAYCOMM_COORDINATOR_ADDRESS="127.0.0.1:$$(.venv/bin/python -c \
	'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')"; started=(); failed=0; \
	for rank in $$(seq $$(($(odd) - 1)) -1 0); do out=/dev/stdout; ((rank)) && out=/dev/null; ARRAYCOMM_PROCESS_ID=$$rank \
	.venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) properties/test_laws.py properties/test_history_laws.py > $$out & started+=($$!); done; \
	for each in "$${started[@]}"; do wait "$$each" || failed=1; done; exit "$$failed"

# Tests of libraries over arraycomm and of their arrays, which no other environment has. The laws draw MLX's as well.
.PHONY: test-libraries
test-libraries: .venv-libraries/.stamp-torch .venv-libraries/.stamp-libraries
	@echo '== tests of other libraries'
	EVERY=1 .venv-libraries/bin/python -m pytest -p no:cacheprovider $(by_file) $(PYTEST_ARGS) $(patsubst %,tests/adapters/test_%.py, \
	keras_adapter mlx_adapter torch_distributed_libraries)
	.venv-libraries/bin/python -m pytest -p no:cacheprovider $(by_file) $(PYTEST_ARGS) --ignore=tests/arrays/test_autodiff.py \
	tests/arrays tests/training/test_tables.py properties/test_laws.py properties/test_check_laws.py
	@# In one process some of them crash one another.
	for library in drjit paddle tensorflow warp; do \
	.venv-libraries/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) tests/arrays/test_autodiff.py -k $$library; done

# What a check of each change has no time for. On ranks 25 examples of all laws take 13 minutes under each MPI.
.PHONY: nightly
nightly:
	EXAMPLES=1000 .venv/bin/python -m pytest -p no:cacheprovider properties
	$(MAKE) --no-print-directory properties EXAMPLES=100
	$(MAKE) --no-print-directory test-processes EXAMPLES=100
	$(MAKE) --no-print-directory test-libraries
	NIGHT=1 .venv/bin/python -m pytest -p no:cacheprovider -m at_night $(by_file) tests
	NIGHT=1 .venv-openmpi/bin/python -m pytest -p no:cacheprovider -m 'at_night and each_mpi' tests
	$(mpich) $(even) .venv/bin/python -m pytest -p no:cacheprovider tests/cuda/test_devices.py
	LARGE=1 .venv/bin/python -m pytest -p no:cacheprovider tests/collectives/test_large.py
	$(MAKE) --no-print-directory planted mutants

# Faults put into a copy of the library, one by one: prints how many a law has caught, and writes docs/evidence/planted.md.
.PHONY: planted
planted: $(call tested,.venv)
	.venv/bin/python -m tests.planted --jobs $(WORKERS)

# Small random changes of a copy of the library: prints those that no law catches, for ten minutes.
.PHONY: mutants
mutants: $(call tested,.venv)
	.venv/bin/python -m tests.planted.mutants --jobs 2

# A copy is built with the sanitizers for addresses and undefined behaviour; that for threads has a program of
# its own among the tests. Python takes much memory that it never gives back.
sanitized := build/sanitized
.PHONY: sanitize
sanitize: .venv/.stamp-test
	@echo '== tests of the native part, with sanitizers'
	@rm -rf $(sanitized) && mkdir -p $(sanitized)
	@cp -R arraycomm adapters tests setup.py pyproject.toml README.md LICENSE $(sanitized)
	@cd $(sanitized) && rm -rf arraycomm/adapters arraycomm/_native/*.so && ln -s ../adapters arraycomm/adapters && \
	CFLAGS='-g -fsanitize=address,undefined -fno-sanitize-recover=all' \
	../../.venv/bin/python setup.py --quiet build_ext --inplace && \
	ARRAYCOMM_NATIVE=1 ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
	../../.venv/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS) tests/native

.PHONY: lint format
lint: .venv/.stamp-lint build/wheel/.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	cd build/wheel && ../../.venv/bin/lint-imports --config ../../pyproject.toml
	.venv/bin/python -m tests.support.structure
	$(mpich) 2 .venv/bin/python -m tests.support.route

format: .venv/.stamp-lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# adapters/ is arraycomm.adapters only where the package is installed: the wheel is unpacked beside the
# environment whose frameworks have the types that the adapters are written against.
.PHONY: types
types: build/wheel/.stamp .venv/.stamp-lint $(call tested,.venv)
	cp tests/typed.py docs/examples/optional_dependency.py build/wheel/
	cd build/wheel && ../../.venv/bin/mypy --strict --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache --package arraycomm --module arraycomm_pytest --module typed --module optional_dependency
	cd build/wheel && ../../.venv/bin/basedpyright --pythonpath ../../.venv/bin/python --level error typed.py optional_dependency.py

.PHONY: docs
docs: build/wheel/.stamp .venv/.stamp-docs
	.venv/bin/zensical build --clean --strict
	@echo 'The documentation is in site/index.html'

.PHONY: clean distclean
clean:
	rm -rf build dist site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-openmpi .venv-bare .venv-oldest .venv-libraries

# Environments. A stamp is written last, so that what was interrupted is taken up again. The base install is the
# editable one; `arraycomm[extra]` then adds what that extra asks for.

.venv/.stamp-python .venv-openmpi/.stamp-python .venv-bare/.stamp-python .venv-oldest/.stamp-python .venv-libraries/.stamp-python:
	@test -n "$(PYTHON)" || { echo 'arraycomm needs Python 3.11 or newer, and none is on the PATH:' \
		'install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "arraycomm needs Python 3.11 or newer; $(PYTHON) is not." >&2; exit 1; }
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo 'Creating $(@D)'; "$(PYTHON)" -m venv $(@D); }
	@touch $@

.venv/.stamp-base .venv-libraries/.stamp-base: %/.stamp-base: pyproject.toml $(native) | %/.stamp-python
	@echo 'Installing arraycomm and MPICH into $(@D)'
	@$(@D)/bin/python $(install) --editable '.[mpich]'
	@touch $@

.venv-openmpi/.stamp-base: pyproject.toml $(native) | .venv-openmpi/.stamp-python
	@echo 'Installing arraycomm and Open MPI into $(@D)'
	@$(@D)/bin/python $(install) --editable '.[openmpi]'
	@touch $@

%/.stamp-torch: %/.stamp-base
	@echo 'Installing $(TORCH) into $(@D)'
	@$(@D)/bin/python $(install) '$(TORCH)'
	@touch $@

%/.stamp-jax: %/.stamp-base
	@echo 'Installing JAX and optax into $(@D)'
	@$(@D)/bin/python $(install) 'arraycomm[jax]'
	@touch $@

%/.stamp-demo: %/.stamp-base
	@echo "Installing the examples' data and progress bar into $(@D)"
	@$(@D)/bin/python $(install) 'arraycomm[demo]'
	@touch $@

%/.stamp-test: %/.stamp-base
	@echo "Installing the tests' tools into $(@D)"
	@$(@D)/bin/python $(install) 'arraycomm[test]'
	@touch $@

%/.stamp-test-jax: %/.stamp-base
	@echo "Installing libraries over JAX, for their tests, into $(@D)"
	@$(@D)/bin/python $(install) 'arraycomm[test-jax]'
	@touch $@

# torch first: any of them would bring another one.
%/.stamp-libraries: %/.stamp-torch
	@echo 'Installing Keras, MLX, Lightning, accelerate and others into $(@D)'
	@$(@D)/bin/python $(install) 'arraycomm[test-libraries]'
	@touch $@

%/.stamp-lint: %/.stamp-base
	@echo 'Installing ruff, mypy and import-linter into $(@D)'
	@$(@D)/bin/python $(install) 'arraycomm[lint]'
	@touch $@

%/.stamp-dist: %/.stamp-base
	@echo 'Installing build and twine into $(@D)'
	@$(@D)/bin/python $(install) 'arraycomm[dist]'
	@touch $@

# The wheel is built from the source distribution, so that nothing is missing there. What an earlier build left
# behind would enter it.
dist/.stamp: pyproject.toml MANIFEST.in README.md LICENSE $(sources) | .venv/.stamp-dist
	@echo 'Building the source distribution, and the wheel from it'
	@rm -rf build/lib build/bdist.* dist
	@.venv/bin/python -m build --no-isolation --outdir dist . >build.log 2>&1 || { cat build.log >&2; exit 1; }
	@rm build.log
	@touch $@

.PHONY: dist
dist: dist/.stamp
	.venv/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz

# What a release uploads, as far as one machine makes it: the source distribution, the wheel for any platform, and this
# machine's own, named after the oldest glibc that it runs with. The workflow builds the latter in an older system.
.PHONY: release
release: dist/.stamp
	@rm -rf dist/release && mkdir dist/release && cp dist/*.tar.gz dist/release
	ARRAYCOMM_NATIVE=0 .venv/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist/release dist/*.tar.gz
	PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/auditwheel repair --wheel-dir dist/release "$(wheel)"
	.venv/bin/python -m twine check --strict dist/release/*

build/wheel/.stamp: dist/.stamp
	@rm -rf $(@D)
	@.venv/bin/python $(install) --no-deps --target $(@D) "$(wheel)"
	@touch $@

%/.stamp-docs: %/.stamp-base
	@echo "Installing the documentation's tools into $(@D)"
	@$(@D)/bin/python $(install) 'arraycomm[docs]'
	@touch $@

# The wheel's version stays while its contents change, so it is taken anew each time.
.venv-bare/.stamp-wheel: dist/.stamp | .venv-bare/.stamp-python
	@echo 'Installing the wheel into $(@D)'
	@$(@D)/bin/python $(install) "$(wheel)[testing]" pytest pytest-xdist
	@$(@D)/bin/python $(install) --no-deps --force-reinstall "$(wheel)"
	@touch $@

.venv-oldest/.stamp-wheel: dist/.stamp | .venv-oldest/.stamp-python
	@echo 'Installing the wheel, and the oldest versions of what it needs, into $(@D)'
	@$(@D)/bin/python tests/support/oldest.py mpich >$(@D)/constraints.txt
	@$(@D)/bin/python $(install) --constraint $(@D)/constraints.txt "$(wheel)[mpich,testing]" pytest
	@touch $@
