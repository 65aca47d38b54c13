PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
unexport PYTHONDONTWRITEBYTECODE # with it each process of the tests compiles all Python again

.PHONY: demo test test-all coverage wheels lint docs format clean

demo: $(READY)
	$(BIN)/outpace race --methods autoregressive,auto --transformers --page out/race.html
	$(BIN)/outpace race --methods autoregressive,jacobi,prompt-lookup,lookahead,amphista,adadecode \
		--set adadecode.control=fixed --set adadecode.exits=24 --page out/methods.html

# A file's tests in one process, which has its servers and models once. (xdist's groups do not work with pytest 9.2.)
test: $(READY)
	$(BIN)/pytest -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(READY)
	$(BIN)/pytest -n 2

coverage: $(READY)
	$(BIN)/pytest -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder --cov=outpace --cov-report=term:skip-covered

wheels: $(READY)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./packages/outpace-smollm2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt packages/outpace-smollm2/pyproject.toml
	@echo "installing in .venv: some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt \
		--editable '.[dev,demo]' packages/outpace-smollm2
	touch $@

.venv/.docs: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
