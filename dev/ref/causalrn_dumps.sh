#!/usr/bin/env bash
# causalrn_dumps.sh: dump one batch of every variant of train_causalrn and let causalrn.py recompute
# it in float64; make the goldens again and compare. Ends with `N passed, N failed`.
set -u
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

# try OPTIONS...: one variant on an odd shape
try() {
    if ./train_causalrn --steps 0 --dump "$dir/d" --string-size 5 --batch-size 2 --channels 12 \
        --hidden 17 "$@" >"$dir/log" 2>&1 &&
        python3 dev/ref/causalrn.py "$dir/d" >>"$dir/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $*"
        tail -n 20 "$dir/log"
    fi
}

for postnorm in yes no; do
    for prenorm in exact approx none; do
        for activation in exp relu elu gelu; do
            try --prenorm $prenorm --postnorm $postnorm --activation $activation
        done
    done
    for prenorm in approx none; do
        try --model linear --prenorm $prenorm --postnorm $postnorm
    done
done
# The committed goldens are what the script writes.
python3 dev/ref/causalrn.py --golden "$dir/goldens" >/dev/null
for golden in dev/ref/causalrn_goldens/*.safetensors; do
    if build/diff "$golden" "$dir/goldens/${golden##*/}" --forward 1e-12 --grad 1e-12 --all \
        >"$dir/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $golden"
        tail -n 5 "$dir/log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
