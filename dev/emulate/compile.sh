# compile.sh: how a CUDA source becomes a program for the CPU; test.sh and ladder.sh source it.
# headers: where cuda_runtime.h, cuda_bf16.h and cublasLt.h are, of CUDA_HEADERS=DIR, else beside
# nvcc or where Debian and NVIDIA put them; empty if nowhere.

# has_headers DIR: whether g++ finds in DIR what emulate.h includes
has_headers() {
    printf '#include <cuda_bf16.h>\n#include <cuda_runtime.h>\n#include <cublasLt.h>\n' |
        g++ -x c++ -fsyntax-only -idirafter "$1" - 2>/dev/null
}

nvcc=$(command -v "${NVCC:-nvcc}" || true)
beside=$(dirname "$(realpath "${nvcc:-/}")")/../include
for headers in ${CUDA_HEADERS:-$beside /usr/local/cuda/include /usr/include}; do
    has_headers "$headers" && break
    headers=
done

# emulated SOURCE OUT FLAGS...: SOURCE as OUT. POISON: memory that was never written is NaN
emulated() {
    local source=$1 out=$2
    shift 2
    python3 dev/emulate/prepare.py "$source" "$out.cc" &&
        g++ -std=gnu++20 -O1 -g1 -w -fopenmp -fno-strict-aliasing -fsanitize=alignment \
            -fno-sanitize-recover=alignment -U_FORTIFY_SOURCE -DGIT_HASH='"emulation"' -DPOISON \
            -idirafter "$headers" -I. -include dev/emulate/emulate.h "$@" "$out.cc" -o "$out"
}
