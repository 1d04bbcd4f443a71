# `make demo` and `make test` need Python 3.11+, make and a package index; each sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2

# Test workers share the cores: one thread each, and none that spins while it waits.
test quick: export OMP_NUM_THREADS = 1
test quick: export OMP_WAIT_POLICY = PASSIVE

.PHONY: help demo test quick lint image-check golden clean

help:
	@echo "make demo    set up, then train, fine-tune, merge and evaluate a small model on this machine"
	@echo "make test    set up, then run every check"
	@echo "make quick   the checks without the slow tests"
	@echo "make image-check  build and run the CPU images with buildah (Debian, root)"
	@echo "make golden  renew the committed compiled pipelines, component files and READMEs"
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

test: $(VENV)/ready lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope

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

clean:
	rm -rf $(VENV) .cache runs build *.egg-info
