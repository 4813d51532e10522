# Two commands on a fresh machine: `make demo` and `make test`. Each does all of its own set-up in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Many tests wait for a process or a socket: one more than the cores keeps them busy.
JOBS   ?= 3
# Of `make experiments`: cpu or cuda.
DEVICE ?= cpu

PROGRAMS := $(VENV)/.programs

# Tests start hundreds of processes: none of them should compile the package again where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test docs check bench experiments clean package wheels images test-slow test-load test-many-gateways test-day test-lowest test-postgres test-partitions test-hostile test-fuzz conformance test-harness test-vllm test-frameworks test-gpu

# One run of pip each: of two, the second resolves and builds again what the first has installed.
$(VENV)/.base: EXTRAS := engine,train
$(VENV)/.dev: EXTRAS := engine,train,dev
$(VENV)/.base $(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $(VENV)/.base $@

# Programs that tests run: a browser, bubblewrap, PostgreSQL.
$(PROGRAMS): $(VENV)/.dev
	sh scripts/install_programs.sh $(BIN)/python
	touch $@

demo: $(VENV)/.base
	$(BIN)/tokentrue demo

test: $(VENV)/.dev $(PROGRAMS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu and not vllm and not harness and not load and not fuzz and not frameworks"

# What takes minutes, or needs a real engine, a GPU or npm, has a target of its own.
test-slow: $(VENV)/.dev
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or thorough or hypothesis"

test-load: $(VENV)/.dev
	$(BIN)/python -m pytest -m load

# 2,000 concurrent sessions: one gateway on SQLite, then two on PostgreSQL.
test-many-gateways: $(VENV)/.dev
	$(BIN)/python -m tests.load.many_gateways

# Twenty-four hours of sessions, compressed.
test-day: $(VENV)/.dev
	$(BIN)/python -m tests.load.day

# The lowest versions that pyproject.toml allows, in an environment of their own, without torch.
LOWEST := .venv-lowest
LOWEST_TESTS := tests/sessions tests/samples tests/turn tests/renderers \
	$(addprefix tests/gateway/,test_dialects.py test_http.py test_limits.py test_service.py test_tracing.py test_workers.py)
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt -e ".[gateway,postgres,otel,parquet,images]" \
		hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	$(LOWEST)/bin/python -m pytest -n $(JOBS) -m "not slow and not load" $(LOWEST_TESTS) --ignore tests/renderers/parsing/test_harmony_oracle.py

# Needs PostgreSQL's server programs; without them these tests are skipped in `make test`.
test-postgres: $(VENV)/.dev
	$(BIN)/python -m pytest -m postgres

# Three gateways, 200 sessions, ten minutes of kills, pauses, cuts and restarts. As root, PARTITIONS=--namespaces cuts real links.
PARTITIONS ?=
test-partitions: $(VENV)/.dev
	$(BIN)/python -m tests.partitions.run $(PARTITIONS)

# HOSTILE_MINUTES=3 is the short form.
HOSTILE_MINUTES ?= 20
test-hostile: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not load" tests/gateway/test_hostile.py tests/gateway/test_limits.py tests/renderers/test_template_limits.py
	$(BIN)/python -m tests.hostile.run --minutes $(HOSTILE_MINUTES)

# Every level of docs/specification.md against our own gateway, over four dialects.
conformance: $(VENV)/.dev
	$(BIN)/tokentrue conformance tokentrue

# FUZZ_TURNS and FUZZ_SEED choose the run; `python -m tests.fuzz --help` plays single cases.
test-fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest -m fuzz -s tests/fuzz

test-harness: $(VENV)/.dev
	$(BIN)/python -m pytest -m harness

VLLM_PYTHON ?= $(error set VLLM_PYTHON to the Python of an environment with vllm, see docs/engines.md)
test-vllm: $(VENV)/.dev
	TOKENTRUE_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest -m vllm

# Other trainers' and harnesses' own code, in environments that the first run makes beside .venv. Frameworks that cannot be
# installed are named at the end; slime, Miles and prime-rl are not on PyPI: TOKENTRUE_FRAMEWORKS_SOURCES names their source trees.
FRAMEWORKS_PYTHON ?= .venv-frameworks/bin/python
VERIFIERS_PYTHON  ?= .venv-verifiers/bin/python
HARBOR_PYTHON     ?= .venv-harbor/bin/python
OPENENV_PYTHON    ?= .venv-openenv/bin/python
test-frameworks: $(VENV)/.dev
	$(BIN)/python -m tests.integrations.environments $(FRAMEWORKS_PYTHON) $(VERIFIERS_PYTHON) $(HARBOR_PYTHON) $(OPENENV_PYTHON)
	TOKENTRUE_FRAMEWORKS_PYTHON=$(abspath $(FRAMEWORKS_PYTHON)) TOKENTRUE_VERIFIERS_PYTHON=$(abspath $(VERIFIERS_PYTHON)) \
		TOKENTRUE_HARBOR_PYTHON=$(abspath $(HARBOR_PYTHON)) TOKENTRUE_OPENENV_PYTHON=$(abspath $(OPENENV_PYTHON)) \
		$(BIN)/python -m pytest tests/integrations

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu tests/gpu

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell
	$(BIN)/python scripts/check_prose.py
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml

# The site, in site/; a warning is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Sdist and wheel in dist/; `make test-slow` installs both extras of them into empty environments.
package: $(VENV)/.dev
	rm -rf build dist/tokentrue-*
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/tokentrue-*

# What the images are installed from. IMAGE_PYTHON is the Python of PYTHON_IMAGE; on a machine like those that run the images.
PYTHON_IMAGE ?= python:3.12.11-slim-bookworm
IMAGE_PYTHON ?= 3.12
DOCKER       ?= docker
wheels: package
	rm -rf dist/wheels
	for extras in gateway,postgres train; do \
		$(BIN)/python -m pip download --quiet --only-binary=:all: --python-version $(IMAGE_PYTHON) -c constraints.txt \
			--dest dist/wheels "$$(echo dist/tokentrue-*.whl)[$$extras]" || exit 1; \
	done

images: wheels
	for target in gateway engine; do \
		$(DOCKER) build --network none --build-arg PYTHON_IMAGE=$(PYTHON_IMAGE) --target $$target \
			--tag tokentrue:$$($(BIN)/python -c "import tokentrue; print(tokentrue.__version__)")-$$target . || exit 1; \
	done

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.render
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.mismatch
	$(BIN)/python -m benchmarks.engine

experiments: $(VENV)/.dev
	$(BIN)/python -m experiments.run_all --device $(DEVICE) --out out/lab --jobs $(JOBS)

clean:
	rm -rf $(VENV) $(LOWEST) .venv-frameworks .venv-verifiers .venv-harbor .venv-openenv .cache build dist
