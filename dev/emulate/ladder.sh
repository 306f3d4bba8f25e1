#!/usr/bin/env bash
# ladder.sh LADDER.cu [FLAGS...]: the checks of a kernel ladder of dev/ (--check-only), run on the
# CPU (emulate.h). It needs g++ and the headers of the CUDA Toolkit, no GPU. KERNEL=N: only that
# kernel; SHAPE="--B 2 --T 65 --C 33": only that shape; EMULATE_SEED=N: another order of warps.
set -eu
cd "$(dirname "$0")/../.."
source=$1 out=build/emulate/$(basename "$1" .cu)
shift
. dev/emulate/compile.sh
mkdir -p build/emulate
[ -n "$headers" ] || { echo "error: no g++ with the headers of the CUDA Toolkit" >&2 && exit 2; }
emulated "$source" "$out" -Idev "$@"
# SHAPE is a list of words
"$out" --check-only --kernel "${KERNEL:-all}" ${SHAPE:-}
