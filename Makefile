# Everything from nothing: `make demo` and `make test`. See README.md and docs/building.md.

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
TRAINERS := .venv-trainers
DOCS := .venv-docs
BUILD := build/release
SINGLE := build/single
JOBS ?= $(shell nproc)
TORCH_VERSION := 2.13.0
APT_PACKAGES := libgtest-dev libgmock-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev ccache \
                ninja-build cmake g++ git python3-venv iproute2 libmetis-dev zlib1g-dev libzstd-dev \
                libboost-dev libxxhash-dev libabsl-dev libssl-dev
TOOLS := clang-format==23.1.3 clang-tidy==23.1.4 ruff==0.17.4 mypy==1.18.2 pytest==9.2.0 pytest-timeout==2.4.0 \
         hypothesis==6.170.15 safetensors==0.8.0 numpy scikit-build-core==1.1.1 pyarrow==21.0.0
# What reads our files in the tests, as its users do. No dependencies are followed.
READERS := tokenizers==0.23.3 tensorboard==2.21.0 protobuf==7.36.2 absl-py==2.5.1

# What the tests compare with. No dependencies are followed: torch and numpy are those of $(VENV).
PEER_PACKAGES := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 \
                 pyre-extensions==0.0.32 typing-inspect==0.9.0 mypy-extensions==1.2.0 cloudpickle==3.1.2 \
                 lightning-utilities==0.15.3 pyvers==0.2.3 pandas==3.1.1 python-dateutil==2.9.0.post0 six==1.17.0
# Whose functions of losses and graphs are compared with; files of theirs are read, without what they need.
PROJECT_PACKAGES := megatron-core==0.16.1 nemo-automodel==0.7.0 verl==0.9.1 trl==1.16.0 fairchem-core==2.24.0

# Trainers of others, for the recipes of docs/recipes.md. No dependencies are followed here either.
TRAINER_PACKAGES := lightning==2.6.6 accelerate==1.15.0 transformers==5.23.0 lightning-utilities==0.15.3 \
                    torchmetrics==1.9.0 tqdm==4.70.1 psutil==7.2.2 pyyaml==6.0.3 rich==15.0.0 \
                    huggingface-hub==2.4.0 tokenizers==0.23.3 regex==2026.11.9 httpx2==2.16.0 httpcore2==2.16.0 \
                    h11==0.16.0 anyio==4.16.0 idna==3.20 sniffio==1.3.1 truststore==0.10.5 packaging==26.3
# The documentation site.
DOCS_PACKAGES := mkdocs==1.6.1 mkdocs-material==9.8.1

export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR := $(CURDIR)

.PHONY: build everything demo test peers trainers browser docs wheel compat lint tidy clang single format bench clean sanitize packages headers cuda-check cuda-build cuda-test cuda-bench help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: $(BUILD)/build.ninja  ## Install what is missing and build library, programs and bindings
	ninja -C $(BUILD) -j $(JOBS) product
	ln -sf ../../$(BUILD)/bin/tessera $(VENV)/bin/tessera
	echo "$(CURDIR)/python" > $$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tessera.pth

everything: build  ## Build tests, benchmarks and examples too
	ninja -C $(BUILD) -j $(JOBS)

# Debian packages, only if one is missing, and only where this user may install them.
packages:
	@missing=""
	for package in $(APT_PACKAGES); do
	  dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q "install ok installed" || missing="$$missing $$package"
	done
	headers=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)
	[ -e "$$headers/Python.h" ] || missing="$$missing python3-dev"
	if [ -n "$$missing" ]; then
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    echo "installing$$missing"
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null
	  else
	    echo "missing packages:$$missing. Install them, or run make as root." >&2
	  fi
	fi

$(VENV)/.ready: Makefile | packages
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet torch==$(TORCH_VERSION)
	$(VENV)/bin/pip install --quiet $(TOOLS)
	$(VENV)/bin/pip install --quiet --no-deps $(READERS)
	touch $@

$(BUILD)/build.ninja: $(VENV)/.ready CMakeLists.txt CMakePresets.json
	cmake --preset release

# Builds the programs alone: bindings and benchmarks take no part in it.
demo: $(BUILD)/build.ninja  ## Run the main job from nothing
	ninja -C $(BUILD) -j $(JOBS) tessera_cli tessera_worker
	ln -sf ../../$(BUILD)/bin/tessera $(VENV)/bin/tessera
	bash examples/demo.sh

# A test that fails is run once more, and both runs are shown: the fault tests race real signals against
# real time limits, and a busy machine can lose such a race; most run alone. One that fails twice is red,
# and one that needed its second try is named at the end and in $(BUILD)/second_tries.txt; in three runs in a
# row of one folder it is red.
test: everything lint  ## Build and run all tests, C++ and Python
	$(MAKE) --no-print-directory peers || echo "peers: not installed; the comparisons with them are skipped" >&2
	$(MAKE) --no-print-directory trainers || echo "trainers: not installed; the recipes for them are skipped" >&2
	$(MAKE) --no-print-directory browser || echo "browser: not installed; pages are judged by their text alone" >&2
	$(MAKE) --no-print-directory $(DOCS)/.ready || echo "mkdocs: not installed; the site is not built" >&2
	command -v clang++ clang++-19 >/dev/null || echo "clang: not installed; the bytes of its plans are not compared with those of GCC" >&2
	ctest --preset full -j $(JOBS) --repeat until-pass:2 | $(VENV)/bin/python tests/support/second_tries.py $(BUILD)/second_tries.txt

peers: $(PEERS)/.ready  ## Install the projects that tests and benchmarks compare with

$(PEERS)/.ready: $(VENV)/.ready
	rm -rf $(PEERS)
	$(PYTHON) -m venv $(PEERS)
	site=$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/tessera.pth
	echo "$(CURDIR)/python" >> $$site/tessera.pth
	$(PEERS)/bin/pip install --quiet --no-deps $(PEER_PACKAGES)
	$(PEERS)/bin/python -W ignore -c 'import torchrec'
	$(PEERS)/bin/pip install --quiet --no-deps $(PROJECT_PACKAGES) || echo "peers: not all projects are there; what asks for the others is skipped" >&2
	touch $@

trainers: $(TRAINERS)/.ready  ## Install Lightning, accelerate and transformers, for the recipes

$(TRAINERS)/.ready: $(VENV)/.ready
	rm -rf $(TRAINERS)
	$(PYTHON) -m venv $(TRAINERS)
	site=$$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/tessera.pth
	echo "$(CURDIR)/python" >> $$site/tessera.pth
	$(TRAINERS)/bin/pip install --quiet --no-deps $(TRAINER_PACKAGES)
	touch $@

# Only tests of pages want it.
browser:  ## Install Chromium, for the tests of report and site
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

$(DOCS)/.ready: Makefile
	rm -rf $(DOCS)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet $(DOCS_PACKAGES)
	touch $@

docs: $(DOCS)/.ready  ## Build the documentation site into build/site
	$(DOCS)/bin/python docs/site/build.py build/site

# Against the torch of $(VENV), which the wheel then asks for. What is built is packed; nothing is compiled.
wheel: build  ## Build a wheel into build/wheels
	$(VENV)/bin/python cmake/make_wheel.py $(BUILD) build/wheels

compat: everything peers  ## Run the peers' own tests and programs, and write docs/compatibility.md
	$(VENV)/bin/python tests/peers/compatibility.py

# clang-tidy wants the command of every file, and $(BUILD) compiles several at a time. Nothing is built here.
single: $(BUILD)/build.ninja
	cmake --preset release -B $(SINGLE) -D TESSERA_UNITY=OFF > /dev/null

# clang-tidy reads what does without LibTorch in every run; the rest costs half a minute a file and is
# read by `make tidy`.
TIDY_CHECKPOINT := $(addprefix src/checkpoint/,checksum.cpp convert.cpp disk.cpp folder.cpp json.cpp manifest.cpp manifest_check.cpp open_file.cpp plain_reader.cpp reader.cpp safetensors.cpp stored_region.cpp writer.cpp)
TIDY_QUICK := 'cli/*.cpp' ':!cli/worker' 'src/launch/*.cpp' 'src/kernels/*.cpp' 'src/comm/shm/*.cpp' src/comm/call_agreement.cpp \
              src/core/crc32c.cpp src/core/error_file.cpp $(TIDY_CHECKPOINT)
# Not what needs CUDA's headers, which is *_cuda.cpp and not *_no_cuda.cpp; see cuda-check.
TIDY_ALL := 'cli/**/*.cpp' 'src/**/*.cpp' 'python/src/*.cpp' ':!src/**/*[!o]_cuda.cpp' ':!src/comm/nccl/nccl_backend.cpp'
run_tidy = git ls-files $(1) | grep -v 'gloo/gloo_backend.cpp' | \
	xargs -P $(JOBS) -n 2 $(VENV)/bin/clang-tidy -p $(SINGLE) --quiet \
	  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-gch \
	  --extra-arg=-Wno-deprecated-declarations --extra-arg=-fno-openmp 2>&1 | \
	{ ! grep -E '(warning|error):'; }

lint: single  ## Check formatting and style
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(VENV)/bin/ruff format --quiet --check python tests bench examples docs
	$(VENV)/bin/ruff check --quiet python tests bench examples docs
	$(VENV)/bin/mypy --no-error-summary
	$(call run_tidy,$(TIDY_QUICK))

tidy: single  ## Run clang-tidy over everything
	$(call run_tidy,$(TIDY_ALL))

# The second compiler. Files are read and judged, nothing is built; CLANG_FILES is a pattern.
CLANG_FILES ?= .
clang: $(VENV)/.ready  ## Read everything with clang 19; its warnings are errors
	command -v clang++-19 >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-19 >/dev/null; }
	cmake --preset clang > /dev/null
	$(VENV)/bin/python tests/support/read_by_clang.py -j $(JOBS) build/clang '$(CLANG_FILES)'

# Programs that do without LibTorch are built in minutes and watched whole; SANITIZE=all builds every test,
# for an hour or two, and watches our own code in it. What each lane found goes to build/sanitize.txt; one
# that found something does not keep the next from running.
SANITIZE ?= quick
SANITIZE_LANES ?= asan tsan
SANITIZE_PROGRAMS ?= checkpoint_format_test dlrm_data_test id_table_test launch_test secret_test simulator \
                     $(addprefix shm_,$(addsuffix _test,arena collectives failure fork lent_memory mismatch point_to_point trust))
sanitize: $(VENV)/.ready  ## Run tests under the address, undefined and thread sanitizers; SANITIZE=all: every test
	mkdir -p build
	echo "sanitizers, $(SANITIZE), $$(git describe --always --dirty), $$(date -u +%Y-%m-%dT%H:%M:%SZ)" > build/sanitize.txt
	failed=0
	for lane in $(SANITIZE_LANES); do
	  cmake --preset $$lane > /dev/null
	  if [ "$(SANITIZE)" = all ]; then
	    ninja -C build/$$lane -j $(JOBS)
	    names=.
	  else
	    ninja -C build/$$lane -j $(JOBS) $(SANITIZE_PROGRAMS)
	    names='^($(subst $() ,|,$(filter-out shm_%,$(SANITIZE_PROGRAMS)))$(if $(filter shm_%,$(SANITIZE_PROGRAMS)),|shm\..*))$$'
	  fi
	  ctest --preset $$lane -j 1 -R "$$names" > build/$$lane/sanitize.log 2>&1 || failed=1
	  $(VENV)/bin/python tests/support/sanitize_result.py $$lane build/$$lane/sanitize.log >> build/sanitize.txt
	done
	cat build/sanitize.txt
	exit $$failed

format: $(VENV)/.ready  ## Rewrite sources to the house format
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format -i
	$(VENV)/bin/ruff format --quiet python tests bench examples docs

bench: everything peers  ## Measure beside the peers; writes bench/results and docs/performance.md
	$(VENV)/bin/python bench/run.py

# A machine with a GPU may have no way to install packages: unpack here those of headers alone, take the
# folder along, and cuda-build finds them.
headers:  ## Unpack the header-only packages into .deps, for a machine without them
	mkdir -p .deps/archives
	(cd .deps/archives && apt-get download -q libcli11-dev nlohmann-json3-dev libtomlplusplus-dev 2>/dev/null)
	for archive in .deps/archives/*.deb; do dpkg -x $$archive .deps; done

# Without a GPU and without LibTorch's CUDA: kernels are compiled, and the sources that only a build with CUDA
# has are read with CUDA's headers; nothing is linked. nccl_backend.cpp wants nccl.h, which comes with torch's
# CUDA build, and is left to it. LibTorch's CPU build lacks a header of settings that those of CUDA ask for.
cuda-check: $(VENV)/.ready  ## Compile the CUDA kernels and read what only a CUDA build has
	command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || \
	  { echo "cuda-check: there is no nvcc, on PATH or in /usr/local/cuda/bin. Install CUDA's toolkit." >&2; exit 1; }
	cmake --preset release -B build/cuda-check -D TESSERA_BUILD_CUDA=ON -D TESSERA_BUILD_PYTHON=OFF -D TESSERA_UNITY=OFF \
	  -D CMAKE_DISABLE_PRECOMPILE_HEADERS=ON -D CMAKE_CXX_FLAGS=-DC10_USING_CUSTOM_GENERATED_MACROS > /dev/null
	ninja -C build/cuda-check -j $(JOBS) tessera_cuda_kernels table_cuda_bench_gather
	$(VENV)/bin/python tests/support/read_by_clang.py -j $(JOBS) build/cuda-check '(cuda[^/]*|nccl_backend)[.]cpp$$'

cuda-build:  ## Build on a machine with a GPU and its own torch
	cmake -S . -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_PYTHON=$(PYTHON) \
	  -DTESSERA_PYTHON_IN_PLACE=ON -DTESSERA_BUILD_BENCH=OFF $(if $(wildcard .deps/usr),-DTESSERA_DEPS_PREFIX=$(CURDIR)/.deps)
	ninja -C build/cuda -j $(JOBS)

cuda-test: cuda-build  ## Run the tests that need a GPU, and all of Python's there
	ctest --test-dir build/cuda --output-on-failure -L cuda -j $$(( ($(JOBS) + 1) / 2 ))

cuda-bench: cuda-build  ## Measure on the GPU
	bash bench/cuda.sh

clean:  ## Remove what was built
	rm -rf build python/tessera/_C*.so python/tessera/_built_for.py
