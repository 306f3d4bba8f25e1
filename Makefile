# seq.c: `make` lists what can be made. CPU: gcc or clang, and make. GPU: the CUDA Toolkit as well.
ifeq ($(origin CC),default)
CC := gcc
endif
NVCC ?= nvcc
OUT := build
GIT_HASH := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
VERSION := -DGIT_HASH='"$(GIT_HASH)"'
# clang says of every loop marked simd that it could not vectorise (erf in gelu) that it could not
WARN := -Wall -Wextra -Werror -Wno-pass-failed
MODELS := $(patsubst train_%.c,%,$(wildcard train_*.c))
CUDA_MODELS := $(patsubst train_%.cu,%,$(wildcard train_*.cu))
HEADERS := $(wildcard util/*.h util/*.cuh data/*.h dev/*.h dev/ref/*.h)

# What the compiler can do is found by compiling two-line programs.
ARCH_FLAG := $(shell echo 'int main(void) { return 0; }' | \
    $(CC) -march=native -x c - -o /dev/null 2>/dev/null && echo -march=native)
HASH := \#
OPENMP := $(shell printf '$(HASH)include <omp.h>\nint main(void) { return omp_in_parallel(); }' | \
    $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
# -ffast-math deletes NaN checks (util/check.h refuses it); -fopenmp-simd lets a loop say what
# may be reordered
CFLAGS ?= -O3 $(ARCH_FLAG)
ALL_CFLAGS = -std=gnu11 -fno-math-errno -fopenmp-simd $(OPENMP) $(CFLAGS) $(VERSION)

# Waiting threads sleep, not spin: ten times faster where the machine is busy (README.md).
export OMP_WAIT_POLICY ?= passive

# GPUs: 8.0 and newer. ARCH=90 builds for one generation.
ARCH ?= native
NVCC_FOUND := $(shell command -v $(NVCC) 2>/dev/null)
NVCC_ARCH = -arch=$(if $(filter native,$(ARCH)),native,sm_$(ARCH))
NVCC_FLAGS = -std=c++17 -O3 -Xcompiler -fopenmp $(VERSION) $(NVCC_ARCH) -lcublas -lcublasLt

.PHONY: help run test test-long test-ref cpu cuda test-cuda test-emulated check fix-copies debug \
        bench figures clean
help:
	@echo "seq.c: sequence-modeling architectures in plain C and CUDA. Read train_causalrn.c first."
	@echo
	@echo "  make run         main job: learn to copy 32 letters  gcc                10-40 s, 2 cores"
	@echo "  make test        all CPU tests                       gcc                2-3 min, 2 cores"
	@echo "  make test-long   other seeds, longer runs            gcc                2-10 min"
	@echo "  make test-ref    dumps and goldens against numpy     python3, numpy     1-2 min"
	@echo "  make cpu         the trainers: $(MODELS:%=./train_%)"
	@echo "  make debug       the same, NaN-poisoned memory, ASan, UBSan"
	@echo "  make check       house rules and drifted copies      python3            seconds"
	@echo "  make fix-copies FROM=file   spread a shared section  python3"
	@echo "  make bench       speed of the CPU kernels            gcc (OpenBLAS)     1 min"
	@echo "  make cuda        the GPU trainers (ARCH=90)          CUDA 12 or 13      minutes"
	@echo "  make test-cuda   GPU against CPU, tensor by tensor   a GPU (8.0+)       minutes"
	@echo "  make test-emulated   the same on the CPU, no GPU     CUDA's headers     1-3 min, 2 cores"
	@echo "  make figures     every figure: dev/figures/*.sh      a GPU, matplotlib  see README.md"
	@echo "  make clean       remove what was built; runs/ stays"
	@echo
	@echo "compiler $(CC); $(if $(OPENMP),OpenMP found,no OpenMP: one thread)"
	@echo "$(if $(NVCC_FOUND),nvcc found,no nvcc: no GPU targets)"

cpu: $(MODELS:%=train_%) $(OUT)/diff
train_%: train_%.c $(HEADERS)
	$(CC) $(ALL_CFLAGS) $(WARN) $< -o $@ -lm
$(OUT)/%: dev/%.c $(HEADERS) | $(OUT)
	$(CC) $(ALL_CFLAGS) $(WARN) $< -o $@ -lm
$(OUT):
	@mkdir -p $@

run: train_causalrn
	./train_causalrn --preset main
	@run=$$(ls -td runs/copying-quadratic-* | head -n 1); \
	python3 dev/plot.py "$$run" --out "$$run/loss.png" --optional || \
	echo "no picture: it needs python3 and matplotlib"

# Tests: fp32 and, for the architectures, double. Compiling them takes as long as running them.
CORES := $(shell nproc 2>/dev/null || echo 2)
TESTS := $(patsubst test_%.c,%,$(wildcard test_*.c))
DOUBLES := $(filter $(TESTS),$(MODELS))
TEST_BINARIES := $(TESTS:%=$(OUT)/test_%) $(DOUBLES:%=$(OUT)/test_%_double)
$(OUT)/test_%_double: test_%.c train_%.c $(HEADERS) | $(OUT)
	$(CC) $(ALL_CFLAGS) $(WARN) -DREAL_IS_DOUBLE $< -o $@ -lm
$(OUT)/test_%: test_%.c $(HEADERS) $(wildcard train_*.c) dev/diff.c | $(OUT)
	$(CC) $(ALL_CFLAGS) $(WARN) $< -o $@ -lm
test:
	@$(MAKE) --no-print-directory -j$(CORES) cpu $(TEST_BINARIES)
	@bash dev/run_tests.sh $(TEST_BINARIES) $(MODELS:%="env TRAIN=./train_% ./test_cli.sh")
test-long: cpu $(TEST_BINARIES)
	@bash dev/run_tests.sh $(DOUBLES:%="$(OUT)/test_% long")
test-ref: cpu
	@for m in $(MODELS); do python3 dev/ref/$$m.py --self-test | tail -n 1 && \
	bash dev/ref/dumps.sh $$m || exit 1; done

debug: CFLAGS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -DPOISON
debug: | $(OUT)
	$(foreach m,$(MODELS),$(CC) $(ALL_CFLAGS) $(WARN) train_$(m).c \
	    -o $(OUT)/train_$(m)_debug -lm || exit 1;)

check:
	@python3 dev/check_style.py
	@python3 dev/check_copies.py
fix-copies:
	@test -n "$(FROM)" || { echo "error: which file? make fix-copies FROM=train_causalrn.c"; exit 2; }
	@python3 dev/check_copies.py --fix $(FROM)

$(OUT)/bench_cpu: train_causalrn.c
$(OUT)/gateloop_stream: train_gateloop.c
bench: $(OUT)/bench_cpu
	@$(OUT)/bench_cpu

ifeq ($(NVCC_FOUND),)
cuda test-cuda:
	@echo "error: $(NVCC) was not found; the GPU targets need the CUDA Toolkit 12 or 13"; exit 2
else
cuda: $(CUDA_MODELS:%=train_%_gpu) $(CUDA_MODELS:%=train_%_gpu_fp32)
train_%_gpu: train_%.cu $(HEADERS)
	$(NVCC) $(NVCC_FLAGS) -DPRECISION_BF16 $< -o $@
train_%_gpu_fp32: train_%.cu $(HEADERS)
	$(NVCC) $(NVCC_FLAGS) $< -o $@
test-cuda: cpu cuda
	@for m in $(CUDA_MODELS); do bash dev/test_cuda.sh $$m || exit 1; done
endif
test-emulated: cpu
	@bash dev/emulate/test.sh $(CUDA_MODELS)
FIGURES := $(filter-out %/common.sh %/models.sh %/text.sh,$(wildcard dev/figures/*.sh))
figures:
	@for f in $(FIGURES); do env -u FIGURES bash $$f || exit 1; done

clean:
	rm -rf $(OUT) $(MODELS:%=train_%) train_*_gpu train_*_gpu_fp32
