PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
NBVAL := --nbval --nbval-sanitize-with .ci/nbval_sanitize.cfg --nbval-cell-timeout 180 -p no:cacheprovider
# two workers; what shares pools of ranks, or a file, is one's; tests/conftest.py has the groups and their order
TWO := -n 2 --dist loadgroup --no-loadscope-reorder
COMPAT_VENV := .venv-torch$(TORCH)

export JUPYTER_PLATFORM_DIRS := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

.DEFAULT_GOAL := help
.PHONY: help venv tour lab lint unit notebooks small other-cpu graph-trainer test test-all test-fast execute schemas clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

venv: ## the virtual environment, made again only when pyproject.toml or constraints.txt changes
	@$(PYTHON) .ci/make_venv $(VENV)

tour: venv ## train a small llama3 on 2 ranks through four passes, and see what each proved
	@$(BIN)/workbench tour

lab: venv ## JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir=. notebooks/00_tour.ipynb

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/mypy

unit: venv ## the unit tests alone: about a minute
	@$(BIN)/pytest tests -m "not integration and not ranks and not nightly" $(TWO)

notebooks: venv
	@$(BIN)/pytest $(NBVAL) -n 2 --dist loadscope notebooks

small: venv
	@$(BIN)/workbench course --profile small --jobs 2 --out out/small

test: lint ## linter, types, tests and notebooks: what to run before a commit
	@$(BIN)/pytest tests notebooks -m "not nightly" $(NBVAL) $(TWO)  # one run: no worker waits for the other in between

other-cpu: ## the notebooks as CPUs without AVX-512, and without AVX, execute them: other last bits, the same outputs
	@ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) --no-print-directory notebooks
	@ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 $(MAKE) --no-print-directory notebooks

graph-trainer: venv ## torchtitan's graph_trainer: our passes in its list, and its list under our verdicts; nightly
	@CI=1 $(BIN)/pytest tests/lab/test_graph_trainer.py

test-all: test small other-cpu ## and all that is nightly
	@$(BIN)/pytest tests -m nightly $(TWO)

test-fast: ## capture, passes and pool on another torch: make test-fast TORCH=2.11.0
	@$(PYTHON) .ci/make_venv $(COMPAT_VENV) --torch $(TORCH)
	@mkdir -p benchmarks/results
	@$(COMPAT_VENV)/bin/pytest tests -m compat $(TWO) --results-json benchmarks/results/compat_torch_$(TORCH).json

execute: venv ## execute the notebooks in place, after a change of the code they show
	@WORKBENCH_PROGRESS=0 $(BIN)/jupyter nbconvert --config .ci/execute_notebooks.py --execute --inplace notebooks/*.ipynb

schemas: venv ## write lessons/*.schema.json again
	@$(BIN)/python -c "from pathlib import Path; from workbench_lessons.course.schemas import write_schemas; write_schemas(Path('lessons'))"

clean: ## remove the environments and what runs leave behind
	rm -rf .venv .venv-torch* out build *.egg-info
