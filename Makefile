# `make` alone shows what there is. Every target works from a fresh clone, and again at once.

.DEFAULT_GOAL := help
.PHONY: book reference help setup build-tools lint-tools bench-tools dist-tools sbcl build sbcl-internals demo test flaky fuzz miri soak kill checkpoint-model checkpoint-load checkpoint-figures lint bench bench-peers figures mutants dist clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

setup: ## Install what is missing for building and testing (Debian: with apt; elsewhere: says what)
	@scripts/setup.sh test

# Building and showing need less than testing.
build-tools:
	@scripts/setup.sh build

# SBCL itself is built once a machine and takes minutes: on its own, one sees how far it is.
sbcl: build-tools
	cargo run --quiet -p sbcl-core

build: sbcl ## Build the release binary, SBCL included: target/release/sbcl-mcp
	cargo build --release

sbcl-internals: build-tools ## Write the table of SBCL's internal names that the Lisp side uses (CONTRIBUTING.md, Moving the pin)
	cargo run --quiet -p sbcl-core -- internals

demo: build ## A session over MCP, as a client sees it
	cargo run --quiet --release --example demo -- "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"

test: setup sbcl ## Every test: unit, integration, end to end with the official MCP SDKs
	scripts/test.sh

flaky: setup sbcl ## The server's suite ten times beside a load on every processor (SBCL_MCP_ROUNDS: how often)
	scripts/flaky.sh

fuzz: sbcl ## Random protocol input, code and messages to Lisp, for long (SBCL_MCP_FUZZ_CASES: how many)
	SBCL_MCP_FUZZ_CASES=$${SBCL_MCP_FUZZ_CASES:-20000} cargo test --release --test mcp fuzz::
	SBCL_MCP_FUZZ_CASES=$${SBCL_MCP_FUZZ_CASES:-20000} cargo test --release --features guarded-messages --test library_soundness

# Those parts of the unsafe code that need no Lisp. SBCL must be built before: Miri runs build scripts as they are.
miri: sbcl ## Undefined behaviour in the messages between Rust and Lisp, by Miri (rustup +nightly component add miri)
	MIRIFLAGS=-Zmiri-permissive-provenance cargo +nightly miri test --lib --no-default-features -- image::message image::words

soak: sbcl ## 200,000 evaluations in one session (SBCL_MCP_SOAK_EVALUATIONS: how many)
	SBCL_MCP_SOAK_EVALUATIONS=$${SBCL_MCP_SOAK_EVALUATIONS:-200000} cargo test --release --test mcp soak:: -- --nocapture

kill: sbcl ## 1,000 workers killed under load, and ten minutes' worth of idleness (SBCL_MCP_KILLS: how many)
	SBCL_MCP_KILLS=$${SBCL_MCP_KILLS:-1000} cargo test --release --test mcp kills_under_load -- --nocapture
	cargo test --release --test mcp recovery:: -- --ignored
	SBCL_MCP_SESSION_KILLS=$${SBCL_MCP_SESSION_KILLS:-100} cargo test --release --test mcp sessions::kill_during -- --nocapture

checkpoint-model: sbcl ## 1,000 random sequences of definitions, checkpoints and kills (SBCL_MCP_CHECKPOINT_CASES: how many)
	SBCL_MCP_CHECKPOINT_CASES=$${SBCL_MCP_CHECKPOINT_CASES:-1000} cargo test --release --test mcp checkpoints::random_saves_restores_crashes_and_resets_agree_with_the_model
	cargo test --release --test mcp checkpoints:: -- --ignored --nocapture

checkpoint-load: sbcl ## 500 checkpoints while threads allocate in C and change weak tables (SBCL_MCP_LOADED_SAVES: how many)
	SBCL_MCP_LOADED_SAVES=$${SBCL_MCP_LOADED_SAVES:-500} cargo test --release --test mcp \
	  checkpoint_copies::threads_may_be_in_malloc_and_in_weak_tables -- --nocapture

checkpoint-figures: build ## What checkpoints cost, with ratios to a plain start: nothing else should run meanwhile
	python3 scripts/checkpoint_figures.py

book: ## Build the book of docs/ in target/book (fetches mdBook, once)
	scripts/book.sh

reference: sbcl ## Write docs/reference, and the answers of the examples in docs, as the program answers now
	SBCL_MCP_UPDATE_REFERENCE=1 cargo test --release --features num-bigint --test mcp -- book:: reference::

lint-tools:
	@scripts/setup.sh lint

lint: lint-tools sbcl ## Formatting, lints, documentation, generated code
	scripts/lint.sh

bench: bench-peers ## Measure; writes docs/benchmarks.md and its plot
	cargo bench --bench library -- --warm-up-time 1 --measurement-time 2
	"$(dir $(PEERS))draw" "$(PEERS).tsv" "$${CARGO_TARGET_DIR:-target}/criterion" .

bench-tools:
	@scripts/setup.sh bench

# Lua has two implementations, for one of which mlua is built. What was measured is in $(PEERS).tsv.
PEERS := $(or $(CARGO_TARGET_DIR),benches/peers/target)/release/peers
BUILD_PEERS := PYO3_PYTHON=$${PYO3_PYTHON:-/usr/bin/python3} cargo build --release --manifest-path benches/peers/Cargo.toml
bench-peers: bench-tools sbcl ## Measure Lua, Python, steel, rhai and Swank beside the library (SBCL_MCP_ROUNDS: how often)
	$(BUILD_PEERS) --features lua54 --bin lua
	cp "$(dir $(PEERS))lua" "$(PEERS)-lua54"
	$(BUILD_PEERS) --features luajit
	cp "$(dir $(PEERS))lua" "$(PEERS)-luajit"
	rm -f "$(PEERS).tsv"
	"$(PEERS)" measure $${SBCL_MCP_ROUNDS:-3} "$(PEERS)-lua54" "$(PEERS)-luajit" "$(PEERS).tsv"

figures: build ## The figures of the tools, each with what it is to be at most; and a working day's calls and characters
	scripts/figures.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"
	scripts/working_day.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp"

# Ten seconds a mutant, more where the machine has other work.
mutants: build ## How well the suspects of run-tests find 100 seeded faults (SBCL_MCP_MUTANTS: of each library)
	scripts/mutants.py "$${CARGO_TARGET_DIR:-target}/release/sbcl-mcp" $${SBCL_MCP_MUTANTS:-34} \
	  /usr/share/common-lisp/source/esrap:esrap /usr/share/common-lisp/source/alexandria:alexandria \
	  /usr/share/common-lisp/source/iterate:iterate

dist-tools:
	@scripts/setup.sh dist

dist: dist-tools sbcl ## Make the packages in target/dist and try each (fetches their tools, as root an old Debian, once)
	scripts/dist.sh

clean: ## Remove what was built here (SBCL stays in the cache)
	cargo clean
	rm -rf tests/clients/*/node_modules
