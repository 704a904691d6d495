# `make` alone lists the targets. Every target works in a fresh clone, and can be repeated.

.DEFAULT_GOAL := help
.PHONY: book reference help setup build-tools lint-tools bench-tools dist-tools sbcl sbcl-next build sbcl-internals demo test flaky fuzz miri soak kill checkpoint-model checkpoint-load checkpoint-figures lint bench bench-peers figures mutants recording dist release core-twice sanitize workflows clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

setup: ## Install missing tools for building and testing (Debian: with apt; elsewhere: list them)
	@scripts/setup.sh test

# TARGET, on the command line of make, is the Rust target to build for, such as aarch64-unknown-linux-gnu
# (docs/building.md). By default the target is this machine.
ifeq ($(origin TARGET),environment)
TARGET :=
endif
ifneq ($(TARGET),)
FOR_TARGET := scripts/cross.sh $(TARGET)
TARGET_OPTION := --target $(TARGET)
endif

# Building and the demo need fewer tools than testing. The first cross build also installs libraries of the target.
build-tools:
	@scripts/setup.sh build
	$(if $(TARGET),@scripts/setup.sh arm64 && $(FOR_TARGET) true)

# SBCL takes minutes to build, once per machine. Its own target shows the progress.
sbcl: build-tools
	$(FOR_TARGET) cargo run --quiet -p sbcl-core $(if $(TARGET),-- $(TARGET_OPTION))

# with_sbcl COMMAND: compiles the crates while SBCL is built. The build script of the program waits for SBCL, whose build takes
# longest although it uses one processor most of the time, so the crates have a lower priority. Cargo does not start the
# program that builds SBCL, because cargo would wait until COMMAND no longer compiles in the same directory.
define with_sbcl
@cargo build --quiet -p sbcl-core
@nice $(1) & crates=$$!; \
$(FOR_TARGET) "$${CARGO_TARGET_DIR:-target}/debug/sbcl-core" $(TARGET_OPTION) || { kill $$crates; exit 1; }; \
wait $$crates
endef

build: build-tools ## Build the optimized binary, SBCL included: target/release/sbcl-mcp (TARGET: for another machine)
	$(call with_sbcl,$(FOR_TARGET) cargo build --release $(TARGET_OPTION))

sbcl-internals: build-tools ## Write the table of SBCL's internal names that the Lisp side uses (docs/upgrading-sbcl.md)
	cargo run --quiet -p sbcl-core -- internals

# CARGO_TARGET_DIR keeps the results apart from those of the pinned SBCL; the recipe keeps its cache apart.
sbcl-next: ## Build with another SBCL, and run every test (SRC: directory of its source; docs/upgrading-sbcl.md)
	$(MAKE) test SBCL_MCP_NEXT="$(or $(abspath $(SRC)),$(error SRC must name a directory with SBCL's source))" \
	  CARGO_TARGET_DIR="$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/next"

demo: build ## Show a session over MCP, as a client sees it
	cargo run --quiet --release -p demo -- "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"

test: setup ## Run every test: unit, integration, end to end with the official MCP SDKs
	$(call with_sbcl,scripts/test.sh --no-run)
	scripts/test.sh

flaky: setup sbcl ## Run the server's tests ten times under load on every processor (SBCL_MCP_ROUNDS: number of rounds)
	scripts/flaky.sh

fuzz: sbcl ## Run long fuzz tests of protocol input, code and messages to Lisp (SBCL_MCP_FUZZ_CASES: number of cases)
	SBCL_MCP_FUZZ_CASES=$${SBCL_MCP_FUZZ_CASES:-20000} cargo test --release --test mcp fuzz::
	SBCL_MCP_FUZZ_CASES=$${SBCL_MCP_FUZZ_CASES:-20000} cargo test --release --features guarded-messages --test library_soundness

# Covers the unsafe code that needs no Lisp. SBCL must be built first, because Miri runs build scripts unchanged.
miri: sbcl ## Find undefined behaviour in the messages between Rust and Lisp with Miri (rustup +nightly component add miri)
	MIRIFLAGS=-Zmiri-permissive-provenance cargo +nightly miri test --lib --no-default-features -- image::message image::message_buffer

sanitize: sbcl ## Run Rust unit tests under a sanitizer (SANITIZER: address or thread; rustup +nightly component add rust-src)
	scripts/sanitize.sh $(or $(SANITIZER),address)

soak: sbcl ## Run 200,000 evaluations in one session (SBCL_MCP_SOAK_EVALUATIONS: their number)
	SBCL_MCP_SOAK_EVALUATIONS=$${SBCL_MCP_SOAK_EVALUATIONS:-200000} cargo test --release --test mcp soak:: -- --nocapture

kill: sbcl ## Kill 1,000 workers under load, and simulate ten minutes of idleness (SBCL_MCP_KILLS: number of workers)
	SBCL_MCP_KILLS=$${SBCL_MCP_KILLS:-1000} cargo test --release --test mcp kills_under_load -- --nocapture
	cargo test --release --test mcp recovery:: -- --ignored
	SBCL_MCP_SESSION_KILLS=$${SBCL_MCP_SESSION_KILLS:-100} cargo test --release --test mcp sessions::kill_during -- --nocapture

checkpoint-model: sbcl ## Test 1,000 random sequences of definitions, checkpoints and kills (SBCL_MCP_CHECKPOINT_CASES: their number)
	SBCL_MCP_CHECKPOINT_CASES=$${SBCL_MCP_CHECKPOINT_CASES:-1000} cargo test --release --test mcp checkpoints::random_saves_restores_crashes_and_resets_agree_with_the_model
	cargo test --release --test mcp checkpoints:: -- --ignored --nocapture

checkpoint-load: sbcl ## Save 500 checkpoints while threads allocate in C and change weak tables (SBCL_MCP_LOADED_SAVES: their number)
	SBCL_MCP_LOADED_SAVES=$${SBCL_MCP_LOADED_SAVES:-500} cargo test --release --test mcp \
	  checkpoint_fork::save_works_with_threads_in_malloc_and_in_weak_tables -- --nocapture

checkpoint-figures: build ## Measure the cost of checkpoints, with ratios to a plain start (needs a quiet machine)
	python3 scripts/checkpoint_figures.py

book: ## Build the book of docs/ in target/book (fetches mdBook, once)
	scripts/book.sh

reference: build ## Regenerate docs/reference and the answers of the examples in docs
	SBCL_MCP_UPDATE_REFERENCE=1 SBCL_MCP_BIN="$(abspath $(or $(CARGO_TARGET_DIR),target))/release/sbcl-mcp" \
	  cargo test --workspace --features sbcl-mcp/num-bigint --test mcp -- book:: reference::

lint-tools:
	@scripts/setup.sh lint

lint: lint-tools sbcl ## Check formatting, lints, documentation and generated code
	scripts/lint.sh

bench: bench-peers ## Run the benchmarks, and write docs/benchmarks.md and its plot
	cargo bench --bench library -- --warm-up-time 1 --measurement-time 2
	"$(dir $(PEERS))draw" "$(PEERS).tsv" "$${CARGO_TARGET_DIR:-target}/criterion" .

bench-tools:
	@scripts/setup.sh bench

# mlua is built for one Lua implementation at a time, so the Lua peer is built twice. The results are in $(PEERS).tsv.
PEERS := $(or $(CARGO_TARGET_DIR),benches/peers/target)/release/peers
BUILD_PEERS := PYO3_PYTHON=$${PYO3_PYTHON:-/usr/bin/python3} cargo build --release --manifest-path benches/peers/Cargo.toml
bench-peers: bench-tools sbcl ## Compare the library with Lua, Python, steel, rhai and Swank (SBCL_MCP_ROUNDS: number of rounds)
	$(BUILD_PEERS) --features lua54 --bin lua
	cp "$(dir $(PEERS))lua" "$(PEERS)-lua54"
	$(BUILD_PEERS) --features luajit
	cp "$(dir $(PEERS))lua" "$(PEERS)-luajit"
	rm -f "$(PEERS).tsv"
	"$(PEERS)" measure $${SBCL_MCP_ROUNDS:-3} "$(PEERS)-lua54" "$(PEERS)-luajit" "$(PEERS).tsv"

figures: build ## Measure the tools against their limits, and count the calls and characters of a working day
	scripts/figures.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"
	scripts/working_day.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"

# A mutant takes ten seconds, more on a busy machine.
mutants: build ## Measure how well run-tests' suspects locate about 100 seeded faults (SBCL_MCP_MUTANTS: number per library)
	scripts/mutants.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp" $${SBCL_MCP_MUTANTS:-34} \
	  /usr/share/common-lisp/source/esrap:esrap /usr/share/common-lisp/source/alexandria:alexandria \
	  /usr/share/common-lisp/source/iterate:iterate

recording: build ## Record a session in which a failed call is repaired, and write docs/recording.svg
	scripts/recording.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"

dist-tools:
	@scripts/setup.sh dist

dist: dist-tools sbcl ## Build the packages in target/dist and test each (downloads their tools, as root also an old Debian, once)
	scripts/dist.sh $(TARGET)

# TAG=yes commits and tags, ONCE=yes builds once, TARGETS lists other machines' Rust targets.
release: ## Build, compare and test the packages of VERSION, such as 1.2.3: a dry run (packaging/README.md)
	scripts/release.py prepare $(or $(VERSION),$(error VERSION must be the version to release, such as 1.2.3)) \
	  $(if $(TAG),--tag) $(if $(ONCE),--once) $(TARGETS:%=--target %)

workflows: dist-tools ## Check GitHub's workflows, and run their steps on this machine (JOBS: names such as test/miri; default: all)
	scripts/workflows.sh $(JOBS)

core-twice: build-tools ## Build the core twice, and compare the bytes (SBCL=yes: SBCL, too, which takes minutes)
	scripts/core_twice.sh $(if $(SBCL),--sbcl)

clean: ## Remove build results (SBCL stays in the cache)
	cargo clean
	rm -rf tests/clients/*/node_modules
