# Everything runs in an environment that make creates: only GNU make and Python 3.11+ have to be there.
# (The package itself runs on Python 3.10; the exact versions in constraints.txt need 3.11.)

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
MINIMUM := .venv-minimum
BIN := $(VENV)/bin
WORKERS ?= 2
# Where Debian's package dataset-fashion-mnist has its files.
FASHION ?= /usr/share/datasets/fashion-mnist
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# A stamp says that an environment is up to date, so that a second run installs nothing.
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
DEMOS := $(VENV)/.demos
BENCH := $(VENV)/.bench
PEERS := $(VENV)/.peers
ZOO := $(VENV)/.zoo
OLDEST_DEV := $(OLDEST)/.dev
MINIMUM_DEV := $(MINIMUM)/.dev

.PHONY: help demo test test-fast test-oldest test-minimum lint types bench radius twins diagonal orbit architectures \
	missed zoo-image zoo-text zoo-finetune zoo-finetune-image cards demos clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN) ## score the shipped demo model on its shipped data
	$(BIN)/hf-geosharp score

test: $(DEV) ## the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test-fast: $(DEV) ## one case of each test that does not take long
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" --cases 1

test-oldest: $(OLDEST_DEV) ## the whole test suite with the oldest supported transformers
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadgroup

# torch 2.4 is a download of several GB on Linux; PYTHON=python3.10 is the oldest Python.
test-minimum: $(MINIMUM_DEV) ## the test suite without what takes long, with the least version of everything
	$(MINIMUM)/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow"

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy finds a package by its folder, but hf_geosharp.cli and its like are mapped there by pyproject.toml from the top
# of the repository. So it is shown a tree of links in which every package is where its name says.
types: $(DEV) ## mypy in strict mode
	rm -rf build/types
	$(BIN)/python -c "$$LINK_PACKAGES" build/types
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

define LINK_PACKAGES
import pathlib, sys, tomllib
root, tree = pathlib.Path.cwd(), pathlib.Path(sys.argv[1])
folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
for name in sorted(folders):
    package = tree.joinpath(*name.split("."))
    package.mkdir(parents=True)
    for entry in (root / folders[name]).iterdir():
        (package / entry.name).symlink_to(entry)
endef
export LINK_PACKAGES

bench: $(PEERS) ## what a score costs, beside other measures (about 12 minutes)
	$(BIN)/python -m benchmarks.bench

radius: $(BENCH) ## the score of the demos by radius: what the default radii were chosen from
	$(BIN)/python benchmarks/radius.py --json benchmarks/data/radius.json

twins: $(BENCH) ## the same function at other weights: every measure on the demos and their twins, with the picture
	$(BIN)/python benchmarks/twins.py --json benchmarks/data/twins.json --plot benchmarks/twins.svg

diagonal: $(BENCH) ## does sharpness predict on diagonal networks: tau by metric, order and radius
	$(BIN)/python benchmarks/diagonal.py --json benchmarks/data/diagonal.json --plot benchmarks/diagonal.svg --page benchmarks/DIAGONAL.md

orbit: $(BENCH) ## every measure on the demos along their orbits
	$(BIN)/python benchmarks/orbit.py --json benchmarks/data/orbit.json --plot benchmarks/orbit.svg --page benchmarks/ORBIT.md

architectures: $(DEV) ## every model type of transformers: what is found, and the proof
	$(BIN)/python -m benchmarks.architectures

missed: $(DEV) ## very small models of every type: directions not felt, by brute force, and those found
	$(BIN)/python -m benchmarks.missed

zoo-image: $(ZOO) ## a zoo of small vision transformers: trained, measured, what goes with what
	$(BIN)/python -m benchmarks.zoo image

zoo-text: $(ZOO) ## a zoo of small BERTs
	$(BIN)/python -m benchmarks.zoo text

zoo-finetune: $(ZOO) ## a zoo of fine-tunes of one small BERT
	$(BIN)/python -m benchmarks.zoo finetune

zoo-finetune-image: $(ZOO) ## a zoo of fine-tunes of one ViT; needs Fashion-MNIST: FASHION=folder, or Debian's package
	$(BIN)/python -m benchmarks.zoo finetune-image --fashion $(FASHION)

cards: $(BENCH) ## the demo models' cards, from scores taken now
	for name in digits-vit vader-bert; do \
	  $(BIN)/hf-geosharp score demo:$$name --rho 0.1 --rho 0.03 --rho 0.01 -q --json model_cards/$$name/result.json && \
	  $(BIN)/hf-geosharp card demo:$$name --result model_cards/$$name/result.json --plot --to model_cards/$$name/README.md || exit 1; done

demos: $(DEMOS) ## train the shipped demo models again, from their sources
	$(BIN)/python benchmarks/make_demos.py all

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(OLDEST) $(MINIMUM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created $(OLDEST)/.created $(MINIMUM)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(@D)
	touch $@

$(RUN): $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e .
	touch $@

$(DEV): $(RUN)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[test,lint]"
	touch $@

$(BENCH): $(RUN)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[bench]"
	touch $@

# What the costs are compared with, without what it asks for: that would change what is measured. What cannot be
# installed is left out, and the page says so.
$(PEERS): $(BENCH)
	for name in scipy PyHessian hessian-eigenthings curvlinops-for-pytorch backpack-for-pytorch einconv einops \
	  linear_operator jaxtyping wadler_lindig opt_einsum unfoldNd; do \
	  $(BIN)/python $(PIP_INSTALL) --no-deps -c constraints.txt $$name || echo "$$name is left out"; done
	touch $@

# What measures other things on the zoos, beside what the peers need; pinned by old versions of what is here.
$(ZOO): $(PEERS)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt scikit-learn scipy
	$(BIN)/python $(PIP_INSTALL) --no-deps curvlinops-for-pytorch==3.0.1 weightwatcher==0.7.7 powerlaw==2.0.0
	touch $@

$(DEMOS): $(RUN)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt scikit-learn
	touch $@

$(OLDEST_DEV): $(OLDEST)/.created pyproject.toml constraints-oldest.txt
	$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints-oldest.txt -e ".[test]"
	touch $@

$(MINIMUM_DEV): $(MINIMUM)/.created pyproject.toml constraints-minimum.txt
	$(MINIMUM)/bin/python $(PIP_INSTALL) -c constraints-minimum.txt -e ".[test]"
	touch $@
