# `make demo` and `make test` need nothing but Python 3.12 or 3.13 and this checkout.
.PHONY: setup demo demo-smollm2 study test test-full lint lock
.DEFAULT_GOAL := setup
# Dozens of processes import torch and SGLang; where the environment forbids bytecode caches, each would compile them anew.
export PYTHONDONTWRITEBYTECODE =

setup:
	@sh tools/setup.sh

demo: setup
	.venv/bin/python tools/make_tiny_model.py
	.venv/bin/megatron-sao run model_configs/tiny_glm4_moe.yaml

demo-smollm2: setup
	.venv/bin/python tools/fetch_smollm2.py
	OMP_NUM_THREADS=2 .venv/bin/megatron-sao run model_configs/smollm2_135m.yaml

study: setup
	.venv/bin/python tools/make_tiny_model.py
	.venv/bin/python tools/study/make_orchard.py
	.venv/bin/python tools/study/run.py
	.venv/bin/python tools/study/report.py

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

test: setup
	.venv/bin/ruff check .
	.venv/bin/pytest tests -m "not slow"

test-full: setup lint
	.venv/bin/pytest tests --hypothesis-profile=search

lock: setup
	tools/setup/lock.sh
