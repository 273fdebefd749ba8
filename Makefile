# `make help` lists what there is. Everything sets itself up and is safe to repeat.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
OLD_VENV := .venv-2.19
PROBE_VENV := .cache/probe-venv
BIN := $(VENV)/bin
LAB := $(BIN)/python tools/lab.py
export SM120_DEMO_PORT ?= 22022
export SM120_DEMO_SERVER_PORT ?= 30000
export PATH := $(CURDIR)/$(BIN):$(PATH)
DEMO := ansible-playbook -i inventories/demo

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | column -t -s '|'

# --- set-up ----------------------------------------------------------------------------------------------------------
$(BIN)/.ready: requirements.txt
	@echo "setting up the controller in $(VENV) (under a minute)"
	@python=$$(tools/find_python.sh) && "$$python" -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt 2> >(grep -v 'is ignored: it is neither' >&2 || true)
	@touch $@

$(BIN)/.ready-dev: requirements-dev.txt $(BIN)/.ready
	@echo "setting up the linters and test tools in $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt 2> >(grep -v 'is ignored: it is neither' >&2 || true)
	@touch $@

# The oldest supported controller, where its Python is there.
$(OLD_VENV)/.ready: requirements-dev.txt requirements.txt
	@echo "setting up ansible-core 2.19 in $(OLD_VENV)"
	@python=$$(tools/find_python.sh 3.11) && "$$python" -m venv $(OLD_VENV)
	@$(OLD_VENV)/bin/pip install --quiet --disable-pip-version-check 'ansible-core>=2.19,<2.20' -r requirements-dev.txt \
	  2> >(grep -v 'is ignored: it is neither' >&2 || true)
	@touch $@

.PHONY: setup
setup: $(BIN)/.ready ## the controller's venv: then use .venv/bin/ansible-playbook

# --- the demo --------------------------------------------------------------------------------------------------------
.PHONY: demo demo-up demo-revert demo-shell demo-clean
demo-up: $(BIN)/.ready
	@$(LAB) bootstrap
	@$(LAB) up demo --port $(SM120_DEMO_PORT)

demo: demo-up ## the whole job on a container: real SGLang, real FlashInfer, no GPU
	@$(DEMO) site.yml
	@printf '\nThe page: %s\nNext: make demo-revert | make demo-shell | make demo-clean\n' "$$(ls -td artifacts/demo/*/report.html | head -1)"

demo-revert: demo-up ## put the demo's gates back, byte for byte
	@$(DEMO) site.yml --tags revert

demo-shell: ## a root shell in the demo's container
	@$(LAB) shell demo

demo-clean: $(BIN)/.ready ## remove the demo's container
	@$(LAB) down demo

# --- tests -----------------------------------------------------------------------------------------------------------
.PHONY: test lint bake bake-beside unit molecule-beside integration-after-unit unit-oldest test-matrix test-probe test-compile test-releases test-server molecule integration report
# Both cores are kept busy: the image that molecule and integration start from is made beside the linters, molecule runs
# beside the unit tests, and integration begins when these are done, whether molecule is or not.
test: $(BIN)/.ready-dev ## lint, unit tests, molecule, integration; CI adds unit-oldest, test-probe, test-matrix, test-releases
	$(LAB) bootstrap
	$(MAKE) --no-print-directory -j2 lint bake-beside unit molecule-beside integration-after-unit

integration-after-unit: unit bake-beside
	@$(MAKE) --no-print-directory integration

# Of two that run side by side one is to be read: the other's output is shown where it fails.
molecule-beside: bake-beside
bake-beside molecule-beside: %-beside:
	@mkdir -p .cache
	@echo "$* runs beside: tail -f .cache/$*.log"
	@$(MAKE) --no-print-directory $* > .cache/$*.log 2>&1 || { cat .cache/$*.log; exit 1; }
	@sed -n '/^SCENARIO RECAP/,$$p' .cache/$*.log

lint: $(BIN)/.ready-dev ## ruff, mypy, yamllint, ansible-lint, shellcheck
	ruff check .
	ruff format --check .
	tools/gates_doc.py --check
	mypy
	yamllint --strict .
	ansible-lint
	$(LAB) bootstrap
	shellcheck tools/*.sh .ci/run

bake: $(BIN)/.ready-dev
	@$(LAB) bootstrap
	@$(LAB) bake

unit: $(BIN)/.ready-dev ## unit tests on the newest ansible-core here
	pytest -n 2 --dist worksteal -m 'not nvcc'

unit-oldest: $(OLD_VENV)/.ready ## those that have to do with Ansible on the oldest ansible-core supported, 2.19 (Python 3.11)
	$(OLD_VENV)/bin/pytest -n 2 --dist worksteal -m 'not nvcc and not once'

test-matrix: $(BIN)/.ready-dev ## every released SGLang and FlashInfer: gates opened by the role and put back, against RECORD
	pytest -n 2 --dist loadfile tests/matrix

# The ranks need torch's CPU build. Some indexes have it for Python 3.11 alone, so that one is taken where it is there; where
# pip has its defaults, torch's own index is asked. nvcc comes from the same wheels as on hosts.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
$(PROBE_VENV)/.ready: tests/probe/requirements.txt
	@echo "setting up torch and nvcc in $(PROBE_VENV)"
	@python=$$(tools/find_python.sh 3.11 2> /dev/null || tools/find_python.sh) && "$$python" -m venv --clear $(PROBE_VENV)
	@[[ $$($(PROBE_VENV)/bin/pip config list) =~ index|find-links ]] || more='--extra-index-url $(TORCH_CPU_INDEX)'; \
	  $(PROBE_VENV)/bin/pip install --quiet --disable-pip-version-check $${more:-} -r $< \
	    2> >(grep -v 'is ignored: it is neither' >&2 || true) || \
	  { echo "wanted: what $< lists, for $$($(PROBE_VENV)/bin/python --version). Found: not all of it." \
	    "Install Python 3.11 with venv (apt-get install python3.11-venv), or name an index that has torch's CPU builds" \
	    "for this one: PIP_EXTRA_INDEX_URL=$(TORCH_CPU_INDEX)" >&2; exit 1; }
	@touch $@

PROBE_TESTS ?= -m 'not long'
test-probe: $(BIN)/.ready-dev $(PROBE_VENV)/.ready ## the probe's ranks on the CPU, and what nvcc makes of the gates; all of it: PROBE_TESTS=
	home=$$(ls -d $$PWD/$(PROBE_VENV)/lib/python3.*/site-packages/nvidia/cu13) && \
	  PATH="$$home/bin:$$PATH" SM120_TORCH_PYTHON=$$PWD/$(PROBE_VENV)/bin/python SM120_CUDA_HOME=$$home \
	  pytest -n 2 tests/probe tests/unit/test_gate_compile.py $(PROBE_TESTS)

test-compile: bake ## FlashInfer's whole communication module for SM120 on a container, gates closed and open (minutes)
	pytest tests/integration/compile

# Molecule's own place for its notes is named after the checkout's folder alone: another checkout of that name, cut off
# half way, would have it believe that this one's host is there.
molecule: bake ## the playbooks users run, in a systemd container
	rm -rf .cache/molecule
	MOLECULE_EPHEMERAL_DIRECTORY=$$PWD/.cache/molecule MOLECULE_GLOB='tests/molecule/*/molecule.yml' \
	  molecule -c tests/molecule/config.yml test --all

# Three on two cores: installs, starts and stops of servers leave gaps.
integration: bake ## interruption, refusal, drift, sudo over ssh: through ansible-runner
	pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 12 $(wildcard tests/integration/test_*.py)

test-releases: bake ## release sets installed by pip and uv, up and down with gates open; every profile parsed by SGLang 0.5.9 and 0.5.23
	pytest -n 2 --dist loadfile tests/integration/releases

SERVER_RELEASES ?= 0.5.9 0.5.23
test-server: bake ## faults put into real servers on a lab host, one release after the other (ten minutes)
	$(BIN)/python tests/integration/real_server/on_lab.py $(SERVER_RELEASES)

report: $(BIN)/.ready ## compare runs on one page: make report RUNS="artifacts/HOST/A/run.json artifacts/HOST/B/run.json"
	tools/report.py $(or $(RUNS),$(error wanted: RUNS="RUN.json RUN.json", files of artifacts/)) --html artifacts/compared.html --png artifacts/compared.png
	@echo artifacts/compared.html
