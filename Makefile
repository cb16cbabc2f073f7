# make ppo: set up this machine, then a Stack Exchange dump to an aligned answer model. make demo, test, lint, docs.
PYTHON ?= python3
# Without a GPU, from PyPI's big CUDA build to the small one: make ppo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
BIN := .venv/bin
READY := .venv/ready
EXTRAS := .venv/extras

.PHONY: ppo install demo extras test lint docs

ppo: install
	$(BIN)/snakemake --cores all ppo

install: $(READY)

# torch first, by its exact version: any other order or range may bring gigabytes of CUDA to a machine without a GPU.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --requirement constraints.txt
	touch $@

# A page to talk to the models that make ppo has made.
demo: extras
	$(BIN)/python -m stages.demo

# The page to talk to, TensorBoard and W&B, what drives a browser in the tests, and MkDocs.
extras: $(EXTRAS)

$(EXTRAS): constraints-extras.txt $(READY)
	$(BIN)/python -m pip install --quiet --requirement constraints-extras.txt --constraint constraints.txt
	touch $@

test: extras
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/snakemake --lint

# The documentation as a site in site/, with docs/recipe.md written anew. A broken link fails.
docs: extras
	$(BIN)/python -m docs.recipe_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
