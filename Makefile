# Every target does its own set-up; `make` alone lists them. CI calls the same ones.

VENV := .venv
READY := $(VENV)/ready
BIN := $(VENV)/bin
PYTHON_IN_VENV := $(BIN)/python
# More arguments for pytest (make test), the benchmarks (make bench) and the like.
ARGS :=

# A checkout that was moved, or whose Python is gone, is set up anew.
ifneq ($(shell test -x $(PYTHON_IN_VENV) && cat $(READY) 2>/dev/null),$(CURDIR))
$(READY): FORCE
endif

.DEFAULT_GOAL := help
.PHONY: help FORCE
help: ## list the targets (this)
	@echo "fusestep: make TARGET [ARGS=…]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt tools/setup.sh
	@tools/setup.sh $(VENV)

.PHONY: setup demo test bench figures drop-in-tables
setup: $(READY) ## make the virtual environment .venv; every other target does it by itself
	@echo "$(VENV) is ready."

demo: $(READY) ## the whole story on this machine, in minutes: doctor, train, generate, ladder
	@$(PYTHON_IN_VENV) tools/demo.py

test: $(READY) ## run the tests, then the kernels through Triton's interpreter; ARGS go to pytest
	@$(PYTHON_IN_VENV) tools/run_tests.py $(ARGS)

bench: $(READY) ## time kernels and whole steps, and say what got slower (needs a GPU); ARGS name parts
	@$(PYTHON_IN_VENV) -m benchmarks $(ARGS)

drop-in-tables: $(READY) ## write the tables of Apex's and Transformer Engine's names in docs/ from the shims
	@$(PYTHON_IN_VENV) tools/drop_in_tables.py $(ARGS)

figures: $(READY) ## write what docs and plans say of speed from benchmarks/results/
	@$(PYTHON_IN_VENV) tools/figures.py

.PHONY: check lint format types check-wheel check-kernels check-triton36
check: lint types test check-wheel check-kernels check-triton36 ## all that CI checks

lint: $(READY) ## ruff, codespell, calls that kernels may not make, large files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@git ls-files -z | xargs -0 $(PYTHON_IN_VENV) tools/large_files.py
	@$(PYTHON_IN_VENV) tools/forbidden_calls.py src/fusestep

format: $(READY) ## let ruff mend and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(READY) ## mypy, strict
	@$(BIN)/mypy

check-wheel: $(READY) ## build the wheel, install it into an empty environment elsewhere, and use it there
	@$(PYTHON_IN_VENV) tools/check_wheel.py

check-kernels: $(READY) ## compile the launches of every kernel for six GPU generations, without a GPU
	@$(PYTHON_IN_VENV) tools/check_kernels.py $(ARGS)

check-triton36: $(READY) ## the kernels compiled, and the interpreter's tests, under the oldest Triton that we serve
	@$(PYTHON_IN_VENV) tools/check_triton36.py $(ARGS)

.PHONY: clean
clean: ## remove what the targets made: the virtual environment, build folders, caches, the demo's runs
	rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
