# Two commands do all the set-up: `make train` and `make test`. `make check` and `make test-all` are
# the developer's.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Overrides of `make train`, as in: make train ARGS="strategy=zero3"
ARGS ?=
# Files of tests that run at once, in as many processes; jobs they start have ranks of their own.
# The longest come first: tests/progress.py. PYTEST_ARGS with --write-seconds measures them anew.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST_ARGS ?= --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-gpu test-all test-docs check lint docs serve-docs check-links install constraints clean

train: install
	$(BIN)/whale-train strategy=hybrid_split_dp hardware=v100_p100_mix $(ARGS)

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What only GPUs show: on one of them, and on as many as there are.
test-gpu: install
	$(BIN)/python -m pytest tests/gpu

# Every case: all combinations, every real start, more examples of every property.
test-all: install
	WHALE_TRAIN_FULL=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# Every command of the documentation, as it stands; `make test` plans those that train.
test-docs: install
	WHALE_TRAIN_FULL=1 $(BIN)/python -m pytest tests/docs

check: lint test

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_words.py
	$(BIN)/codespell README.md docs src conf tests scripts benchmarks findings

# The site of docs/, in build/docs; a warning is an error: a broken link, a page that no list names.
docs: install docs/pages/.made
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs

# The pages of plans and runs that the site shows: a minute of planning and training.
docs/pages/.made: $(STAMP) scripts/example_pages.py $(wildcard src/whale_train/launcher/report/*)
	$(BIN)/python scripts/example_pages.py
	touch $@

serve-docs: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000

# Links to other sites. It needs a network, which CI has not: run it by hand.
check-links: install
	$(BIN)/sphinx-build -n -q -b linkcheck docs build/links

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whale-train needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,images,peft,ray,metrics,trackers,optuna,dev,docs]'
	touch $(STAMP)

# Pin what is installed: after changing the ranges, and running `make check`.
constraints: install
	echo '# What was tested, exactly; pyproject.toml has the ranges. Regenerate: make constraints' > constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools | sed 's/+cpu//' >> constraints.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
