# Short cuts. Each target says what it does in `make help`; CI calls the same ones.

TARGET := wasm32-wasip1
PYTHON ?= python3
DENY_VERSION := 0.20.2
DENY := .tools/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
HELM ?= .tools/helm-4.3.1/helm
# What the tests run of the system's, each with the package of Debian's that has it.
NEEDED := redis-server=redis-server redis-cli=redis-tools openssl=openssl python3=python3 gzip=gzip tar=tar diff=diffutils \
	sha256sum=coreutils bash=bash
DEMO_PARTS := envoy-1.40.0 $(if $(shell command -v redis-server),,valkey-9.1.2.post2)

# What is built is where the documents and the tools look for it, wherever the user has others put theirs.
export CARGO_TARGET_DIR := $(CURDIR)/target
unexport CARGO_BUILD_TARGET

.DEFAULT_GOAL := help
.PHONY: help build cli image dist version demo test bench chaos fuzz simulate lint docs chart tools target needed clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: target ## the filter, at target/wasm32-wasip1/release/meshquota.wasm
	tools/build.sh --release --lib --target $(TARGET)

cli: ## the command line, at target/release/meshquota
	tools/build.sh --release --package meshquota-cli

image: build ## the filter as an OCI image, at target/image and target/meshquota-image.tar
	@$(PYTHON) tools/image.py

dist: build cli ## what a release hands out, at target/dist: filter, image, command line, manifests, SHA256SUMS
	@$(PYTHON) tools/dist.py

version: ## the version of the sources
	@cd tools && $(PYTHON) -c 'import source; print(source.field("version"))'

demo: build ## show it: requests admitted, limited, refilled; Redis stopped and back (KEEP=1 keeps it running)
	@$(PYTHON) tools/fetch.py $(DEMO_PARTS)
	@$(PYTHON) demo/demo.py $(if $(KEEP),--keep)

test: needed build tools ## every test: units, the bucket against its model, real Envoys and servers
	cargo test --workspace

bench: build ## what the filter costs here, as ratios within one run
	cargo build --release --target $(TARGET) --manifest-path bench/floor/Cargo.toml --target-dir target/goes_on
	cargo build --release --target $(TARGET) --manifest-path bench/floor/Cargo.toml --target-dir target/answers --features answers
	cargo build --release --target $(TARGET) --manifest-path bench/floor/Cargo.toml --target-dir target/tells --features tells
	cargo build --release --target $(TARGET) --manifest-path bench/floor/Cargo.toml --target-dir target/asks --features asks
	@$(PYTHON) tools/fetch.py $(DEMO_PARTS)
	@$(PYTHON) bench/bench.py
	@$(PYTHON) bench/script.py
	@$(PYTHON) bench/outage.py
	@$(PYTHON) bench/scale.py
	@$(PYTHON) bench/start.py

chaos: needed tools ## three Envoys under load while Redis and the network fail in every way, for minutes (CHAOS_SECONDS, CHAOS_SEED)
	CHAOS_SECONDS=$${CHAOS_SECONDS:-300} cargo test --test chaos -- --nocapture

fuzz: ## mutated configurations, headers and replies, for longer than the tests do (FUZZ_CASES, FUZZ_SEED)
	FUZZ_CASES=$${FUZZ_CASES:-100000000} cargo test --release --test fuzz

simulate: ## worlds of workers, network and server, for longer than the tests do (SIMULATION_SEEDS, SIMULATION_SEED)
	SIMULATION_SEEDS=$${SIMULATION_SEEDS:-1000000000} cargo test --release --test simulation nothing_that_happens

lint: target $(DENY) ## formatting, the lints for both targets, and what the dependencies may be
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --release --target $(TARGET) -- -D warnings
	$(DENY) --locked --workspace check licenses bans sources
	$(DENY) --locked --config deny.toml --manifest-path bench/floor/Cargo.toml check \
		-A unmatched-skip -A license-not-encountered licenses bans sources
	@if $(DENY) fetch db 2>/dev/null; then $(DENY) --locked --workspace check advisories; \
	else echo "advisories not checked: their database cannot be reached"; fi

docs: ## write the generated parts of docs/ and the JSON Schema anew
	UPDATE=1 cargo test --test documents

chart: $(filter .tools/%,$(HELM)) ## the Helm chart as a package, under target/chart/ (HELM=helm takes your own, 4 or later)
	rm -rf target/chart && mkdir -p target/chart && cp -R envoy/chart target/chart/meshquota
	@# The package has the times of its files: with one time for all, the same sources make the same package.
	find target/chart/meshquota -exec env TZ=UTC touch -t 200001010000 {} +
	$(HELM) package --destination target/chart target/chart/meshquota
	rm -rf target/chart/meshquota

tools: ## fetch the pinned Envoys, Valkey, Helm and kubectl into .tools/
	@$(PYTHON) tools/fetch.py --all

clean: ## remove what was built and fetched
	cargo clean
	rm -rf .tools

.tools/helm-%/helm:
	@$(PYTHON) tools/fetch.py helm-$*

# Without the variable, what it is built of goes to a folder that is removed.
$(DENY):
	env -u CARGO_TARGET_DIR cargo install cargo-deny --version $(DENY_VERSION) --locked --root .tools/cargo-deny-$(DENY_VERSION)

target:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (rustup)"; exit 1; }
	@if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx $(TARGET); then \
		rustup target add $(TARGET); fi

needed:
	@programs=; packages=; for one in $(NEEDED); do command -v "$${one%=*}" >/dev/null || \
		{ programs="$$programs $${one%=*}"; packages="$$packages $${one#*=}"; }; done; \
	[ -z "$$programs" ] || { echo "missing:$$programs; install, for example with apt-get install$$packages"; exit 1; }
