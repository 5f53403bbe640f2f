# Short cuts. Each target says what it does in `make help`; CI calls the same ones.

MODULE := target/wasm32-wasip1/release/meshquota.wasm
TARGET := wasm32-wasip1
PYTHON ?= python3
DEMO_PARTS := envoy-1.40.0 $(if $(shell command -v redis-server),,valkey-9.1.2.post2)

.DEFAULT_GOAL := help
.PHONY: help build demo test bench lint tools target redis clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: target ## the filter, at target/wasm32-wasip1/release/meshquota.wasm
	cargo build --release --target $(TARGET)

demo: build ## show it: requests admitted, limited, refilled; Redis stopped and back (KEEP=1 keeps it running)
	@$(PYTHON) tools/fetch.py $(DEMO_PARTS)
	@$(PYTHON) demo/demo.py $(if $(KEEP),--keep)

test: build redis tools ## every test: units, the bucket against its model, real Envoys and servers
	cargo test

bench: build ## what the filter costs here, as ratios within one run
	@$(PYTHON) tools/fetch.py $(DEMO_PARTS)
	@$(PYTHON) bench/bench.py

lint: target ## formatting, and the lints for both targets
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --release --target $(TARGET) -- -D warnings

tools: ## fetch the pinned Envoys and Valkey into .tools/
	@$(PYTHON) tools/fetch.py --all

clean: ## remove what was built and fetched
	cargo clean
	rm -rf .tools

target:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (rustup)"; exit 1; }
	@if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx $(TARGET); then \
		rustup target add $(TARGET); fi

redis:
	@command -v redis-server >/dev/null || \
		{ echo "redis-server is missing: install it, for example with apt-get install redis-server"; exit 1; }
