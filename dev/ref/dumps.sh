#!/usr/bin/env bash
# dumps.sh MODEL: dump one batch of every variant of train_MODEL and let MODEL.py recompute it in
# float64; make the goldens again and compare. Ends with `N passed, N failed`.
set -u
model=${1:?"which model? dumps.sh causalrn"}
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

# count NAME COMMAND...: one check; show the end of what a failed one says
count() {
    local name=$1
    shift
    if "$@" >"$dir/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        tail -n 20 "$dir/log"
    fi
}

# recompute OPTIONS...: dump the model with these options on an odd shape, recompute it
recompute() {
    ./train_"$model" --steps 0 --dump "$dir/d" "$@" &&
        python3 "dev/ref/$model.py" "$dir/d"
}

# try OPTIONS...: count a variant
try() { count "$*" recompute "$@"; }

# images PATCH: options that read images of 4 x 6 pixels in 3 channels
python3 dev/small_images.py "$dir/images" 4 6 3 5 40 >/dev/null
images() { echo "--task images --causal no --images $dir/images --channels 12 --patch $1"; }

# causalrn, gpt2, deltanet, gateloop, metala, mamba: every variant
odd="--string-size 5 --channels 12 --batch-size 2"
causalrn() {
    local postnorm prenorm activation
    for postnorm in yes no; do
        for prenorm in exact approx none; do
            for activation in exp relu elu gelu; do
                try $odd --hidden 17 --prenorm $prenorm --postnorm $postnorm \
                    --activation $activation
            done
        done
        for prenorm in approx none; do
            try $odd --hidden 17 --model linear --prenorm $prenorm --postnorm $postnorm
            try $(images 1) --batch-size 2 --hidden 17 --model linear --prenorm $prenorm \
                --postnorm $postnorm
        done
        try $(images 2) --batch-size 3 --hidden 17 --postnorm $postnorm
    done
}

gpt2() {
    local kind heads
    for kind in gpt2 transformer linear-transformer; do
        for heads in 1 2 4 12; do
            try $odd --model $kind --heads $heads
        done
        try $(images 2) --model $kind --heads 3 --batch-size 3
        try $(images 1) --model $kind --heads 2 --batch-size 2
    done
    try --model gpt2 --heads 3 --layers 5 --channels 60 --string-size 40 --batch-size 2
}

# Heads of one channel are left out: their norm makes every output 1 or -1, up to its eps, and the
# gradient that is left is the rounding of 1 - 1 (fp32: 4e-4).
deltanet() {
    local range heads conv size="--task copying $odd --hidden 17"
    for range in nonneg signed; do
        for heads in 1 2 4 6; do
            for conv in "--conv yes" "--conv no" "--conv no --qk-silu yes"; do
                try $size --eigenvalues $range --heads $heads $conv
            done
        done
    done
    try --task copying --heads 3 --layers 5 --channels 60 --string-size 40 --batch-size 2
    try --task modular --channels 12 --heads 3 --batch-size 7
    try --task s5 --channels 12 --heads 3 --batch-size 16 --conv no
}

gateloop() {
    local transition kind
    for transition in sep sep-relu cart real-pos real-signed stable-exp fixed fixed-real ones; do
        for kind in "--head-size 1" "--head-size 3 --gn-groups 3 --proj-bias no" \
            "--wiring paper --head-size 12 --head-bias no" "--wiring paper --gn-groups 1"; do
            try --task copying $odd --hidden 17 --transition $transition $kind
        done
    done
    try --task copying --head-size 20 --layers 5 --channels 60 --string-size 40 --batch-size 2
    try --task horizon --channels 12 --batch-size 2
    try --task recall --channels 12 --head-size 2 --batch-size 3
}

mamba() {
    local range kind
    for range in nonneg signed; do
        for kind in "" "--window 1 --state 5" "--window 2 --hidden 17 --rank 3" \
            "--window 7 --state 1 --hidden 9 --rank 9"; do
            try --task copying $odd --eigenvalues $range $kind
        done
    done
    try --task copying --layers 5 --channels 36 --state 4 --string-size 40 --batch-size 2
    try --task modular --channels 12 --batch-size 7
    try --task s5 --channels 12 --batch-size 4 --window 1 --eval-max-length 33
    try --task recall --channels 12 --batch-size 4 --eigenvalues nonneg
}

metala() {
    local key conv augment heads
    for key in tied free; do
        for conv in 0 2 4; do
            for augment in yes no; do
                for heads in "--heads 1" "--heads 3 --key-channels 9 --tau 2 --scale no"; do
                    try --task copying $odd --hidden 17 --key $key --conv $conv \
                        --augment $augment $heads
                done
            done
        done
    done
    try --task copying --heads 3 --layers 5 --channels 60 --string-size 40 --batch-size 2
    try --task mqar --channels 12 --batch-size 7 --conv 4
    try --task noisy --channels 12 --batch-size 2
}

$model
# The committed goldens are what the script writes.
python3 "dev/ref/$model.py" --golden "$dir/goldens" >/dev/null
for golden in "dev/ref/${model}_goldens"/*.safetensors; do
    count "$golden" build/diff "$golden" "$dir/goldens/${golden##*/}" --forward 1e-12 \
        --grad 1e-12 --all
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
