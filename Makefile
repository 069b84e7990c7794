# Each target sets up what it needs in .venv first, so that a fresh machine needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs/demo

.PHONY: demo test lint bench clean

# torch goes first: everything else then takes the build that is there
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python >= 3.11 is needed (transformers 5.24 asks for it): make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/accelerate launch --config_file training/recipes/launch/cpu.yaml -m training.pretrain demo-vanilla training.run_dir=$(RUNS)/vanilla
	$(BIN)/accelerate launch --config_file training/recipes/launch/cpu.yaml -m training.pretrain demo training.run_dir=$(RUNS)/untied-grow
	$(BIN)/python -m training.compare $(RUNS)/vanilla $(RUNS)/untied-grow out=$(RUNS)/compare.png
	$(BIN)/python -m training.export $(RUNS)/untied-grow out=exports/demo overwrite=true
	$(BIN)/python -m eval.core exports/demo --task-set tiny --output $(RUNS)/core.json

test: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mlinter modeling_looped/configuration_looped.py modeling_looped/modeling_looped.py

bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks.bench_train

clean:
	rm -rf $(VENV) build *.egg-info
