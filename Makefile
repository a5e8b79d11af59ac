# make          the demonstration: stock torch and the patched one, side by side
# make build    build/lib/torch, the patched torch: PYTHONPATH=build/lib .venv/bin/python
# make test     all tests, in the patched torch
# make wheel    dist/torch-*.whl, which installs over stock torch
# make bench    eager wait_tensor, stock against patched
# make clean    remove what the above built; make distclean: .venv too
#
# PYTHON=…      the Python 3.11 that .venv is made with
# TESTS=…       what `make test` runs: files, or pytest's options

PYTHON ?= python3.11
TESTS ?= test

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := demo
.PHONY: demo build test wheel bench clean distclean help
# Each of these uses both cores by itself, and they share build/.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

demo: build
	@$(PY) -m tools.demo

build: $(INSTALLED)
	@$(PY) setup.py -q build

test: build
	@PYTHONPATH="$(CURDIR)/build/lib" $(PY) -m pytest -n 2 --dist loadfile $(TESTS)

wheel: $(INSTALLED)
	@$(PY) setup.py -q bdist_wheel --dist-dir dist

bench: build
	@$(PY) benchmarks/eager_wait.py

# On a terminal pip shows its progress; in a log it is quiet.
$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is not a working Python 3.11; install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt-get install python3.11-venv)" >&2; exit 1; }
	@echo "install stock torch and the tools in $(VENV) (about a minute, and the download) ..."
	@$(PYTHON) -m venv $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=-qq; fi; \
	  $(PY) -m pip install $$quiet --disable-pip-version-check -r requirements.txt || { \
	  echo "make: pip could not install requirements.txt in $(VENV); its own message is above. Its comments say how to name another index" >&2; exit 1; }
	@touch $@

clean:
	rm -rf build dist

distclean: clean
	rm -rf $(VENV)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
