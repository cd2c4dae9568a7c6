# Everything runs in .venv, which the first target that needs it makes. Only Python is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERL := .verl
ARGS ?=

.PHONY: train test verl-test lint wheel docs pages release lock bench chaos environments wild frameworks clean

train: $(VENV)/.train
	$(BIN)/python -m train.run --backend langgraph --domain spider $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

# The tests of the trainer verl with verl, Ray and TransferQueue, on processors: `make test` skips those that need them.
verl-test: $(VERL)/.verl
	$(VERL)/bin/python -m pytest -n 2 --dist worksteal tests/train/verl tests/train/sft/test_several_gpus.py \
		tests/train/cli/test_doctor.py::test_a_plan_with_verl_refuses_settings_that_it_does_not_have $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Builds the wheel, installs its base into an empty environment, checks it there, outside of the clone, and runs an agent in
# it for the trainer of $(VENV). Then the same with the MCP server.
wheel: $(VENV)/.dev
	rm -rf build/wheel && $(BIN)/python -m hatchling build -t wheel -d build/wheel
	$(PYTHON) -m venv build/wheel/base
	build/wheel/base/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && base/bin/python ../../tests/helpers/installed_base.py
	cd build/wheel && ../../$(BIN)/python ../../tests/helpers/own_environment.py base/bin/python
	build/wheel/base/bin/python -m pip install --quiet "$$(echo build/wheel/*.whl)[mcp]"
	cd build/wheel && base/bin/python ../../tests/helpers/installed_base.py mcp

# Tag, checked wheel, archive and notes of the version in pyproject.toml, in dist/. Uploads nothing.
release: wheel
	$(BIN)/python -m dev.release

# The documentation site, in build/site; a warning is an error. The code is read, not imported.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# Contrast and width of the site's pages, light and dark, on a desktop and a phone. Needs Chromium.
pages: docs $(VENV)/.dev
	$(BIN)/python -m dev.pages build/site/*.html

# The versions of everything that [train] installs, for Python 3.10 to 3.13 and any system.
lock: $(VENV)/.dev
	$(BIN)/uv pip compile pyproject.toml --extra train --universal --python-version 3.10 --upgrade --no-header \
		--no-annotate --quiet --output-file requirements/train.txt

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

# Nothing changes in an application's environment: makes those of dev/environments.toml, and installs the base in each.
environments: $(VENV)/.dev
	$(BIN)/python -m dev.environments $(ARGS)

# ARGS="FOLDER": runs the public agents whose projects are in FOLDER, in the environments of `make environments`.
wild: $(VENV)/.dev
	$(BIN)/python -m dev.wild $(ARGS)

frameworks: $(VENV)/.dev
	$(BIN)/python -m benchmarks.frameworks $(ARGS)

chaos: $(VENV)/.dev
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m chaos $(ARGS)

# uv takes seconds for what takes pip minutes, if it can resolve the set at all.
$(VENV)/.uv $(VERL)/.uv: %/.uv:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet uv
	@touch $@

# Installed first and by pip, so that a build from the machine's own index (for example a CPU wheel) is used.
$(VENV)/.torch $(VERL)/.torch: %/.torch: %/.uv
	$*/bin/python -m pip install --quiet "torch>=2.8,<2.14"
	@touch $@

$(VENV)/.train $(VENV)/.dev: $(VENV)/.torch
$(VENV)/.train $(VENV)/.dev $(VENV)/.docs: $(VENV)/.uv pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[$(subst .,,$(@F))]"
	@touch $@

$(VERL)/.verl: $(VERL)/.torch pyproject.toml docs/verl-overrides.txt requirements/verl-cpu.txt
	$(VERL)/bin/uv pip install --quiet --python $(VERL)/bin/python -e ".[verl,dev]" --override docs/verl-overrides.txt \
		--override requirements/verl-cpu.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VERL) .environments .frameworks examples/frameworks/*/node_modules build dist .mypy_cache .pytest_cache .ruff_cache
