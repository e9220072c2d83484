# make run    set up and run the main job on embedded data
# make test   set up and run everything CI runs
# make test-all   the same, and what takes long: trainers in several processes, every extra in a clean environment
# make docs   set up and build the documentation: build/site/index.html
# make figures   draw the figures of the documentation again; FIGURE="--run DIR --results DIR" for those that need them
PYTHON ?= python3
BIN = .venv/bin
READY = .venv/.ready
# Two processes, as many as CI has cores, each with one thread: processes that share cores wait for each other's threads.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: run test test-all docs figures setup clean

run: $(READY)
	$(BIN)/rankgrad train digits

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/test_kernels_interpreted.py

test-all: test
	$(BIN)/python -m pytest -m "slow and not gpu"

docs: $(READY)
	$(BIN)/python docs/machinery/build.py build

figures: $(READY)
	$(BIN)/rankgrad figure all --out build/figures $(FIGURE)
	$(BIN)/python docs/machinery/lighter.py build/figures docs/figures

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
