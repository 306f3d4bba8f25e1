#!/usr/bin/env bash
# ladder.sh LADDER.cu [FLAGS...]: the checks of a kernel ladder of dev/ (--check-only), run on the
# CPU (emulate.h). It needs g++ and the headers of the CUDA Toolkit, no GPU. KERNEL=N: only that
# kernel; SHAPE="--B 2 --T 65 --C 33": only that shape; EMULATE_SEED=N: another order of warps.
set -eu
cd "$(dirname "$0")/../.."
source=$1 out=build/emulate/$(basename "$1" .cu)
shift
nvcc=$(command -v "${NVCC:-nvcc}" || true)
headers=${CUDA_HEADERS:-$(dirname "$(realpath "${nvcc:-/}")")/../include}
mkdir -p build/emulate
python3 dev/emulate/prepare.py "$source" "$out.cc"
g++ -std=gnu++20 -O1 -g1 -w -fopenmp -fno-strict-aliasing -fsanitize=alignment \
    -fno-sanitize-recover=alignment -U_FORTIFY_SOURCE -DGIT_HASH='"emulation"' -DPOISON \
    -idirafter "$headers" -I. -Idev -include dev/emulate/emulate.h "$@" "$out.cc" -o "$out"
# SHAPE is a list of words
"$out" --check-only --kernel "${KERNEL:-all}" ${SHAPE:-}
