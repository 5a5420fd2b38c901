# Two commands lead through the project: `make demo` and `make test`. All that they need is put
# into a virtual environment first, with the Python that scripts/find_python.sh finds.

VENV ?= .venv
PYTHON ?=

python := $(VENV)/bin/python
installed := $(VENV)/.installed
extension := $(VENV)/.extension
csrc := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
venv_fits := $(shell scripts/venv_fits.sh '$(VENV)' '$(PYTHON)' && echo yes)

define build_extension
$(python) setup.py build_ext --inplace $(1) >$(VENV)/extension.log 2>&1 && touch $(extension) || \
	{ cat $(VENV)/extension.log; exit 1; }
endef

# Two at a time, since many wait for ranks to start; a file's tests share what they have computed.
in_parallel := --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: demo test test-programs test-fast check recipes-check bench ext check-cuda help

demo: $(extension) ## train a CoLA model with BTP and its two baselines on CPU, write a report
	@$(python) tools/demo.py

test: $(extension) ## all tests that this machine can run, but for those of test-programs
	@$(python) -m pytest tests $(in_parallel) -m "not program"

test-programs: $(extension) ## the demo, the documentation's commands, the examples and the benchmarks, run whole
	@$(python) -m pytest tests $(in_parallel) -m program

test-fast: $(extension) ## the quick tier: no test marked slow
	@$(python) -m pytest tests $(in_parallel) -m "not slow and not program"

check: $(installed) ## format, lint and types
	@$(python) -m ruff format --check --quiet .
	@$(python) -m ruff check --quiet .
	@$(python) -m mypy
	@$(if $(csrc),$(VENV)/bin/clang-format --dry-run --Werror $(csrc))

recipes-check: $(installed) ## every recipe of examples/, its ranks built without memory, against the accounting
	@$(python) -m megatron.boost.recipes

bench: $(extension) ## the benchmarks that a CPU can run
	@$(python) benchmarks/iteration.py
	@$(python) benchmarks/planner.py
	@$(python) benchmarks/memory.py
	@$(python) benchmarks/kernels.py
	@$(python) benchmarks/attention.py
	@$(python) benchmarks/latents.py
	@$(python) benchmarks/preprocess.py
	@$(python) benchmarks/convert.py

ext: $(installed) ## build the extension (csrc) anew, with CUDA where nvcc and a CUDA torch are found
	@$(call build_extension,--force)
	@$(python) -m boost_layers.ops

check-cuda: $(installed) ## compile csrc with CUDA, and see that no kernel spills registers
	@if command -v nvcc >/dev/null && $(python) -c 'import sys, torch; sys.exit(not torch.version.cuda)'; \
	then \
		echo "Compiling csrc with CUDA (minutes)" && mkdir -p build && rm -rf build/cuda && \
		{ BOOST_BUILD=cuda $(python) setup.py build_ext --force --build-temp build/cuda \
			--build-lib build/cuda >build/cuda.log 2>&1 || { tail -n 60 build/cuda.log; exit 1; }; } && \
		$(python) scripts/check_ptxas.py build/cuda.log; \
	else echo "check-cuda: no nvcc, or a torch without CUDA: left out"; fi

help: ## this list
	@echo "usage: make TARGET [PYTHON=/path/to/python] [VENV=folder]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# An environment that does not run, is too old or not of the PYTHON asked for is made anew.
ifneq ($(venv_fits),yes)
.PHONY: $(installed)
endif
$(installed): pyproject.toml setup.py
ifneq ($(venv_fits),yes)
	@base=$$(scripts/find_python.sh '$(PYTHON)') && echo "Making $(VENV) with $$base" && \
		"$$base" -m venv --clear '$(VENV)'
endif
	@echo "Installing into $(VENV) (a first time fetches some 3 GB, most of it torch for CUDA)"
	@$(python) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# For the CPU alone, which takes a minute or two; `make ext` builds the CUDA kernels too.
$(extension): $(installed) $(csrc) setup.py
	@if command -v "$${CXX:-c++}" >/dev/null; then \
		echo "Building the extension for this CPU (csrc)"; \
		export BOOST_BUILD=cpu; $(call build_extension); \
	else \
		echo "No C++ compiler: everything runs on PyTorch alone, slower"; touch $(extension); \
	fi
