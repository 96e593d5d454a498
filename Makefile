# Two commands do everything: `make run` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
KERNEL_PEERS := .venv-kernel-peers
PIP := $(VENV)/bin/python -m pip install --quiet -c constraints.txt
ARGS ?=
# Files of one worker: what a file prepares for its tests is prepared once.
PYTEST := $(VENV)/bin/python -m pytest -n auto --dist loadfile
NUMERICAL := $(addprefix tests/,linalg solve implicit nn kernel convex certify prove)
# The part of them in each environment, another one in each: all of them take about 10 minutes, by proportion. `make test-portable PORTION=1` runs all.
PORTION ?= 0.5

# Tests start many processes; without bytecode each of them would compile both packages again. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test test-portable test-all coverage format findings gallery docs docs-fast docs-serve bench tables bench-choices bench-own bench-tasks bench-kernels bench-peers bench-kernel-peers clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

run: $(VENV)/.installed-run  ## Train an equilibrium network on scikit-learn's digits, with a proof (ARGS=... as of `wellposed train`).
	$(VENV)/bin/wellposed train $(if $(ARGS),$(ARGS),--set run.certify_every=0 --prove 20)

test: $(VENV)/.installed-test  ## Format check, lint, types and the fast tests.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --num-workers auto
	$(PYTEST) --hypothesis-seed=0 $(ARGS)

# Other instructions, other orders of summation, other examples and another order of tests: a tolerance must hold in all of them.
test-portable: $(VENV)/.installed-test  ## The numerical tests as on other processors: no vector units, other sums, four threads.
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(NUMERICAL) --hypothesis-seed=1 --shuffle 1 --portion $(PORTION) $(ARGS)
	MKL_CBWR=COMPATIBLE $(PYTEST) $(NUMERICAL) --hypothesis-seed=2 --shuffle 2 --portion $(PORTION) $(ARGS)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive $(PYTEST) $(NUMERICAL) --hypothesis-seed=3 --shuffle 3 --portion $(PORTION) $(ARGS)

test-all: ARGS += -m "slow or not slow"
test-all: test  ## The same with the slow tests.

coverage: $(VENV)/.installed-test  ## The fast tests, and which lines of src they run (as a table, and in htmlcov/).
	$(PYTEST) --hypothesis-seed=0 --cov --cov-report=term:skip-covered --cov-report=html $(ARGS)

format: $(VENV)/.installed-test  ## Rewrite the code in the house format.
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

findings: $(VENV)/.installed-test  ## Write the tables of docs/findings.md anew, from the audits of the papers.
	$(VENV)/bin/python -m wellposed_lab.papers.audit docs/findings.md

gallery: $(VENV)/.installed-test  ## Write docs/gallery.md with its pictures and the table of docs/reproduce.md anew, from records/.
	$(VENV)/bin/python -m wellposed_lab.papers.gallery records docs

docs: $(VENV)/.installed-docs  ## Build the documentation into site/, without the network; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

docs-fast: $(VENV)/.installed-docs  ## The same without executing the tutorials: seconds, not minutes.
	WELLPOSED_DOCS_EXECUTE=false NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

docs-serve: $(VENV)/.installed-docs  ## Show the documentation on this machine, rebuilt as you edit.
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs serve $(ARGS)

# The peers' environment if it is there: the suite of own modules measures torchdeq in the same process.
bench: $(VENV)/.installed-run  ## Time us and the peers, and a user's own module; writes benchmarks/results/ (ARGS=... of run.py).
	$(VENV)/bin/python benchmarks/run.py $(ARGS)
	PYTHONPATH=src $(if $(wildcard $(PEERS)/.installed),$(PEERS),$(VENV))/bin/python benchmarks/own_cell.py

tables: $(VENV)/.installed-run  ## Copy the measured tables of benchmarks/results/ into README.md and docs/.
	$(VENV)/bin/python benchmarks/tables.py

bench-choices: $(VENV)/.installed-run  ## Time solvers, gradients and networks for docs/choosing.md.
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/choices.py $(ARGS)

bench-own: $(PEERS)/.installed  ## Time a user's own module: us, torchdeq, a loop; Auto and its parts (pass options as ARGS=...).
	PYTHONPATH=src $(PEERS)/bin/python benchmarks/own_cell.py $(ARGS)

bench-tasks: $(VENV)/.installed-run  ## Train and measure the tasks of graphs, reasoning and images (needs scikit-image), with their pictures: hours.
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/task_graphs.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/task_reasoning.py sudoku mazes
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/task_imaging.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/task_limits.py
	$(VENV)/bin/python benchmarks/task_pictures.py
	$(VENV)/bin/python benchmarks/tables.py

bench-kernels: $(VENV)/.installed-run  ## Time tangent kernels: us, neural-tangents, torch.func (pass options as ARGS=...).
	$(VENV)/bin/python benchmarks/kernels.py $(ARGS)

bench-peers: $(PEERS)/.installed  ## Install the peer libraries into their own environment.

bench-kernel-peers: $(KERNEL_PEERS)/.installed  ## Install neural-tangents into its own environment.

clean:  ## Remove environments, caches and build products.
	rm -rf $(VENV) $(PEERS) $(KERNEL_PEERS) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted step starts again; --clear removes what it left behind.
$(VENV)/.created $(PEERS)/.created $(KERNEL_PEERS)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer; \
	$(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(@D)
	@touch $@

$(VENV)/.installed-run: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) -e '.[cli,data,plot,report]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) -e '.[cli,data,report,export,tests,dev]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) -e '.[cli,data,report,docs]'
	@touch $@

$(PEERS)/.installed: benchmarks/peers-constraints.txt | $(PEERS)/.created
	$(PEERS)/bin/python -m pip install --quiet -c $< torch torchdeq jaxopt optimistix jax jaxlib scipy
	@touch $@

# Needs a Python that jaxlib 0.4.30 has wheels for: 3.10 to 3.12.
$(KERNEL_PEERS)/.installed: benchmarks/kernel-peers-constraints.txt | $(KERNEL_PEERS)/.created
	$(KERNEL_PEERS)/bin/python -m pip install --quiet -c $< neural-tangents jaxopt jax jaxlib numpy scipy
	@touch $@
