#!/usr/bin/env bash
# test.sh [MODEL...]: train_MODEL.cu, in FP32 and BF16, run on the CPU (emulate.h) and held against
# ./train_MODEL, which is built; by default every model that has a .cu. It needs g++ and the headers
# of the CUDA Toolkit, no GPU, and says SKIP without them. Every check is a row in
# build/emulate/rows; ends with `N passed, N failed`.
#
# CUDA_HEADERS=DIR: where cuda_runtime.h and cublasLt.h are, if not beside nvcc. JOBS=N: checks at
# once, by default as many as there are cores.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=build/emulate
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
jobs_max=${JOBS:-$(nproc)}
export OMP_NUM_THREADS=1 # a check is one thread, and the checks are many

. dev/emulate/compile.sh
if [ -z "$headers" ]; then
    echo "SKIP the GPU trainers on the CPU: no g++ with cuda_runtime.h, cuda_bf16.h and cublasLt.h"
    echo "0 passed, 0 failed"
    exit 0
fi

# background COMMAND...: run it beside others, at most jobs_max at once
background() {
    while [ "$(jobs -rp | wc -l)" -ge "$jobs_max" ]; do wait -n; done
    "$@" &
}

# row NAME RESULT: one check's outcome, "ok ..." or "FAIL ..."
row() { printf '%s: %s\n' "$1" "$2" >>"$work/rows"; }

# compile SOURCE OUT FLAGS...: emulated, a row if it fails. COPYING_CAUSAL=0: the copying task takes
# --causal no too
compile() {
    emulated "$@" -DCOPYING_CAUSAL=0 >"$2.log" 2>&1 ||
        row "compile $1" "FAIL $(head -n 3 "$2.log" | tr '\n' ' ')"
}

# small OPTIONS...: options = these and, where they leave it open, those of a tiny model
small() {
    local given=" $* " default
    options=("$@")
    for default in --batch-size:2 --string-size:9 --layers:1 --threads:1; do
        [[ $default == --string-size* && $given == *" --task "* ]] &&
            [[ $given != *" --task copying "* ]] && continue
        [[ $given == *" ${default%:*} "* ]] || options+=("${default%:*}" "${default#*:}")
    done
}

# worst LOG: the largest relative errors of a diff, forward and gradients, and their tensors
worst() {
    awk '!/^params/ && ($NF == "ok" || /DIFFERS/) { if ($3 ~ /^[0-9.e+-]+$/) {
             k = $1 ~ /^grads/; if ($3 + 0 >= w[k] + 0) { w[k] = $3; n[k] = $1 } } }
         END { printf "%s %s, %s %s", n[0], w[0], n[1], w[1] }' "$1"
}

# agree NAME OPTIONS...: the dumps of the oracle and of both precisions (or PRECISIONS), with the
# bounds of build/diff; BF16_GRAD, FP32_GRAD: others for gradients, BF16_FORWARD: for the rest in
# BF16; ROUNDED: the oracle for BF16; FORM: the .cu's --form
agree() {
    local name="$model $1" dir precision program flag reference
    dir=$(mktemp -d -p "$work")
    shift
    small "$@" --steps 0
    export EMULATE_KERNELS=$work/kernels.$model
    for program in ${CPU:-./train_$model} ${ROUNDED:-}; do
        $program "${options[@]}" --dump "$dir/$(basename $program)" >"$dir/log" 2>&1 ||
            row "$name" "FAIL CPU: $(tail -n 2 "$dir/log" | tr '\n' ' ')"
    done
    for precision in ${PRECISIONS:-fp32 bf16}; do
        program=${CPU:-./train_$model} flag=
        [ $precision = bf16 ] && program=${ROUNDED:-$program}
        reference=$dir/$(basename $program) program=$build/${model}_$precision
        [ $precision = fp32 ] && flag=${FP32_GRAD:+--grad $FP32_GRAD}
        [ $precision = bf16 ] && flag="--bf16 ${BF16_GRAD:+--grad $BF16_GRAD}
            ${BF16_FORWARD:+--forward $BF16_FORWARD}"
        if ! $program "${options[@]}" ${FORM:+--form $FORM} --dump "$dir/gpu" >"$dir/log" 2>&1; then
            row "$name $precision" "FAIL $(tail -n 3 "$dir/log" | tr '\n' ' ')"
        elif build/diff "$reference" "$dir/gpu" $flag >"$dir/diff"; then
            row "$name $precision" "ok $(worst "$dir/diff")"
        else
            row "$name $precision" "FAIL $(grep DIFFERS "$dir/diff" | awk '{print $1, $3}' |
                tr '\n' ' ' | cut -c 1-200)"
        fi
    done
    rm -rf "$dir"
}

# trained NAME OPTIONS...: the same with weights after 30 of the oracle's steps (or as TRAINED has
# it): before the first attention is nearly uniform, and a wrong query moves nothing that BF16's
# bounds would see
trained() {
    local name=$1 run
    run=$(mktemp -d -p "$work")
    shift
    ./train_$model "$@" --threads 1 --out "$run/run" ${TRAINED:---steps 30 --batch-size 8 \
        --layers 1 --lr 5e-3 --warmup 5 --schedule constant} >"$run/log" 2>&1
    agree "$name" "$@" --load "$run/run/checkpoint.safetensors"
    rm -rf "$run"
}

# spiked NAME OPTIONS...: CausalRN's, C = 64, with weights that make channel 5 of every a outweigh
# all others, normalized it is sqrt(H), and that of b at most positions: at H = 3072 exp(a + b)
# comes to e^93, beyond fp32. o is 0 but there, whatever b is, and the gradient of left_w is what
# rounding leaves of 0 (0.36 off in FP32, 0.45 in BF16): it need only be finite
spiked() {
    local name=$1 run
    local -x FP32_GRAD=1 BF16_GRAD=100
    run=$(mktemp -d -p "$work")
    shift
    ./train_$model "$@" --steps 2 --batch-size 2 --layers 1 --threads 1 --out "$run/run" \
        >"$run/log" 2>&1
    python3 - "$run/run/checkpoint.safetensors" <<'END' >>"$run/log" 2>&1
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
start = 8 + int.from_bytes(data[:8], "little")
header = json.loads(data[8:start])
at = {k: start + v["data_offsets"][0] for k, v in header.items() if k != "__metadata__"}
struct.pack_into("<f", data, at["params.right_b"] + 4 * 5, 1e4)
for k in range(at["params.left_w"] + 4 * 5 * 64, at["params.left_w"] + 4 * 6 * 64, 4):  # C = 64
    struct.pack_into("<f", data, k, 30 * struct.unpack_from("<f", data, k)[0])
data[:start] = data[:start].replace(b'"checksum"', b'"unsummed"')  # what it is of has changed
open(sys.argv[1], "wb").write(data)
END
    agree "$name" "$@" --load "$run/run/checkpoint.safetensors"
    rm -rf "$run"
}

# noncausal COMMAND...: with the oracle that takes --causal no
noncausal() { CPU=$build/${model}_cpu_noncausal "$@"; }

# rounded: the oracle whose tensors are as round as those of train_$model.cu in BF16, which takes
# --causal no too
rounded() {
    local out=$build/rounded_$model
    python3 dev/rounded.py train_$model.c $out.c && gcc -std=gnu11 -O2 -march=native \
        -fno-math-errno -fopenmp-simd -fopenmp -DCOPYING_CAUSAL=0 -I. $out.c -o $out -lm ||
        row "compile dev/rounded.py" "FAIL"
}

# columns LOG: step, split, loss, accuracy, rate, norm of a log.csv
columns() { grep -v '^#' "$1" | cut -d , -f 1-6; }

# losses NAME PRECISION BOUND OPTIONS...: three steps' losses, and that of fresh sequences, beside
# the oracle's; under another order of warps the same bits
losses() {
    local name="$model $1 $2" program=$build/${model}_$2 bound=$3 dir seed
    dir=$(mktemp -d -p "$work")
    shift 3
    export EMULATE_KERNELS=$work/kernels.$model
    small "$@" --steps 3
    ./train_$model "${options[@]}" --out "$dir/cpu" >"$dir/log" 2>&1
    for seed in 1 2; do
        EMULATE_SEED=$seed $program "${options[@]}" ${FORM:+--form $FORM} --out "$dir/$seed" \
            >"$dir/log" 2>&1 ||
            row "$name" "FAIL $(tail -n 2 "$dir/log" | tr '\n' ' ')"
    done
    if paste -d , <(columns "$dir/cpu/log.csv") <(columns "$dir/1/log.csv") |
        awk -F , -v bound="$bound" '
            $2 != "split" { n++; e = ($9 - $3) / $3; e = e < 0 ? -e : e; if (e > worst) worst = e }
            END { print n + 0, worst; exit !(n == 4 && worst <= bound) }' >"$dir/worst"; then
        row "$name, losses" "ok largest difference $(cut -d ' ' -f 2 "$dir/worst")"
    else
        row "$name, losses" "FAIL steps, largest difference: $(cat "$dir/worst")"
    fi
    if cmp "$dir/1/checkpoint.safetensors" "$dir/2/checkpoint.safetensors" >"$dir/cmp" 2>&1 &&
        diff <(columns "$dir/1/log.csv") <(columns "$dir/2/log.csv") >>"$dir/cmp"; then
        row "$name, another order of warps" "ok same checkpoint and log"
    else
        row "$name, another order of warps" "FAIL $(head -n 3 "$dir/cmp" | tr '\n' ' ')"
    fi
    rm -rf "$dir"
}

# field NAME LOG: a value of the RESULT line
field() { sed -nE "s/^RESULT .* $1=([^ ]+).*/\1/p" "$2"; }

# decodes NAME STEPS OPTIONS...: weights that the oracle trains, not to the end, read back what the
# oracle reads: as accurate when the model reads its own output, and the same example
decodes() {
    local name="$model $1, decoding" steps=$2 dir program a b
    dir=$(mktemp -d -p "$work")
    shift 2
    export EMULATE_KERNELS=$work/kernels.$model
    set -- "$@" --string-size 4 --batch-size 32 --threads 1
    ./train_$model "$@" --steps $steps --schedule constant --out "$dir/run" >"$dir/log" 2>&1
    for program in ./train_$model $build/${model}_fp32; do
        $program "$@" --steps 0 --load "$dir/run/checkpoint.safetensors" \
            >"$dir/$(basename $program)" 2>&1
    done
    a=$(field greedy_accuracy "$dir/train_$model") b=$(field greedy_accuracy "$dir/${model}_fp32")
    if [ "$a" != 0.0000 ] && [ "$a" != 1.0000 ] && [ "$a" = "$b" ] &&
        diff <(grep ^decoded "$dir/train_$model") <(grep ^decoded "$dir/${model}_fp32"); then
        row "$name" "ok greedy accuracy $a on both"
    else
        row "$name" "FAIL greedy accuracy, expected between 0 and 1: CPU $a, GPU $b"
    fi
    rm -rf "$dir"
}

# tokens: a file of 300 of GPT-2's tokens, as data/gpt2_tokens.py writes them
tokens() {
    local i t
    printf '\210\330\064\001\001\000\000\000\054\001\000\000'
    head -c 1012 /dev/zero
    for ((i = 0; i < 300; i++)); do
        t=$((i * 7919 % 50257))
        printf "\\x$(printf %02x $((t % 256)))\\x$(printf %02x $((t / 256)))"
    done
}

# launched: every kernel of the .cu and of util/*.cuh ran in some check; deltanet, mamba and metala
# leave a part of [layers] and of util/ to others
launched() {
    local never skip= sources="train_$model.cu util/*.cuh"
    [[ $model == deltanet || $model == mamba || $model == metala ]] &&
        sources="train_$model.cu util/asked.cuh" skip='/^\/\/ \[layers\]/,/^\/\/ \[model\]/d'
    [ $model = gateloop ] && sources="train_gateloop.cu util/asked.cuh" # no positions to learn
    [ $model = causalrn ] && skip='s/slices_table_kernel//' # its sums wait for no others
    never=$(comm -23 <(sed "$skip" $sources | tr '\n' ' ' | grep -oE '__global__[^{;]*' |
        grep -oE '\w+_kernel' | sort -u) <(grep -oE '\w+_kernel' "$work/kernels.$model" | sort -u))
    [ -z "$never" ] && row "$model, every kernel" "ok all of them ran" ||
        row "$model, every kernel" "FAIL never launched: $(tr '\n' ' ' <<<"$never")"
}

# faults: each of faults.cu is seen, and what is sound passes, under any order of warps
faults() {
    local name says seed
    for seed in 1 2 3; do
        EMULATE_SEED=$seed $build/faults sound >"$work/fault" 2>&1 && row "no fault, $seed" ok ||
            row "no fault, $seed" "FAIL $(tail -n 1 "$work/fault")"
        while IFS=: read -r name says; do
            ! EMULATE_SEED=$seed $build/faults "$name" >"$work/fault" 2>&1 &&
                grep -qE "${says# }" "$work/fault" && row "fault: $name, $seed" "ok seen" ||
                row "fault: $name, $seed" "FAIL not seen: $(tail -n 1 "$work/fault")"
        done < <($build/faults --list)
    done
}

text=$work/text # 32 times the licence, which nobody edits: another text has other roundings

# longer: a task whose evaluations have more than the 16 tokens of a training batch
longer=(--task parity --max-length 17 --eval-min-length 20 --eval-max-length 34 --eval-batches 2
    --batch-size 5)

# images, grey: options that read images of 4 x 6 pixels in 3 channels and in 1. 20 grey ones are
# evaluated on: the last batch of 3 has 2
images=(--task images --causal no --images "$work/rgb.images" --eval-batches 2)
grey=(--task images --causal no --images "$work/grey.images")

# gpt2_checks: head sizes of every kernel, rows that are not aligned, both vocabularies. BF16 is
# held against an oracle whose stored tensors are as round, the stream too (dev/rounded.py)
gpt2_checks() {
    local m hs s t
    local -x ROUNDED=$build/rounded_gpt2
    background decodes gpt2 30 --model gpt2
    background decodes transformer 60 --model transformer
    background decodes linear-transformer 100 --model linear-transformer
    for m in gpt2 transformer linear-transformer; do
        background losses "$m" fp32 1e-4 --model $m
        background losses "$m" bf16 1e-2 --model $m
        background losses "$m --accumulate 3" fp32 1e-4 --model $m --accumulate 3
        background losses "$m --accumulate 3" bf16 1e-2 --model $m --accumulate 3
        background losses "$m HS=64" bf16 1e-2 --model $m --channels 64 --heads 1 --string-size 40
        background losses "$m, longer fresh sequences" fp32 1e-4 --model $m "${longer[@]}"
        background agree "$m S=1 L=2" --model $m --string-size 1 --layers 2
        for hs in 1 5 20; do
            background agree "$m HS=$hs" --model $m --channels $((3 * hs)) --heads 3
        done
        for hs in 64 128 192; do
            background trained "$m HS=$hs" --model $m --channels $hs --heads 1 --string-size 40
        done
        background agree "$m T=17 C=33 B=1" --model $m --task text --text "$text" --context 17 \
            --channels 33 --heads 3 --batch-size 1
        background agree "$m text" --model $m --task text --text "$text" --context 33
        background agree "$m text, V=50257" --model $m --task text --vocab gpt2 --context 9 \
            --text "$work/tokens.bin" --channels 8 --batch-size 1
        background noncausal agree "non-causal $m" --causal no --model $m
        for s in 40 32; do # T = 82 and 66
            background noncausal agree "non-causal $m HS=64 S=$s" --causal no --model $m \
                --channels 64 --heads 1 --string-size $s
        done
        for t in 1 31 127; do # tiles of the hidden layer: a part of one, all of them but a row
            PRECISIONS=bf16 background agree "$m T=$t B=1" --model $m --task text --text "$text" \
                --context $t --channels $((t < 31 ? 192 : t < 127 ? 64 : 128)) --batch-size 1
        done
        for t in 66 129 258; do # tiles of one and two rows; three sequences: their order
            PRECISIONS=bf16 background agree "$m T=$t" --model $m --task text --text "$text" \
                --context $t --channels $((t < 258 ? 64 : 192)) --heads 1 --batch-size 3
        done
        background agree "$m images" --model $m "${images[@]}" --patch 2 --layers 2
        background agree "$m images C=33 D=1" --model $m "${grey[@]}" --patch 1 --channels 33 \
            --heads 3
        # gpt2, and CausalRN, say the same of every image after 30 steps: gradients are then what is
        # left of two opposite ones (of gpt2's cls 2e-4 in fp32)
        [ $m = gpt2 ] || background trained "$m images C=192" --model $m "${images[@]}" \
            --patch 1 --channels 192 --heads 3
        background losses "$m images" fp32 1e-4 --model $m "${images[@]}" --patch 2
        background losses "$m images --accumulate 3" bf16 1e-2 --model $m "${grey[@]}" --patch 2 \
            --accumulate 3 --batch-size 3
    done
}

# cut_checks: linear sequences in parts, the last of fewer tiles, its last tile not full: with
# cuts, one sequence has at most 6 parts, each of two has 3, three are not cut
cuts="-DLINEAR_PARTS=6 -DLINEAR_FULL=3 -DLINEAR_LEAST=2"
cut_checks() {
    local o h t b
    for o in "33 13 1" "33 2 1" "64 97 1" "64 40 1" "64 100 2" "192 97 1" "192 40 1" "192 100 2" \
        "384 97 1" "384 33 2" "64 97 3" "192 97 3" "384 97 3" "33 13 3" \
        "768 5 3"; do # of 33 and 768 a tile is 1 position
        read -r h t b <<<"$o"
        background agree "linear H=$h T=$t B=$b" --model linear --hidden $h --task text \
            --text "$text" --context $t --batch-size $b
    done
    for h in 64 192; do
        TRAINED="--steps 60 --layers 1 --lr 5e-3 --warmup 5 --schedule constant" \
            background trained "linear H=$h S=56 B=1" --model linear --hidden $h --batch-size 1 \
            --string-size 56
        background losses "linear H=$h B=1" bf16 1e-2 --model linear --hidden $h --batch-size 1 \
            --string-size 50
    done
    background losses "linear H=64 B=1" fp32 1e-4 --model linear --batch-size 1 --hidden 64 \
        --string-size 50
    for o in approx none; do
        background agree "linear $o T=97 B=1, no post norm" --model linear --prenorm $o \
            --hidden 64 --task text --text "$text" --context 97 --batch-size 1 --postnorm no
        for b in 1 2 3; do
            background noncausal agree "non-causal linear $o S=48 B=$b" --causal no --prenorm $o \
                --model linear --hidden 64 --string-size 48 --batch-size $b
        done
    done
}

# causalrn_checks: every norm and activation, widths of the fast and the general kernels
causalrn_checks() {
    local m h b prenorm activation
    for m in quadratic linear; do
        background decodes "$m" 50 --model $m
        background losses "$m" fp32 1e-4 --model $m --hidden 33
        background losses "$m" bf16 1e-2 --model $m --hidden 33
        background losses "$m --accumulate 3" fp32 1e-4 --model $m --accumulate 3 --hidden 64
        background losses "$m --accumulate 3" bf16 1e-2 --model $m --accumulate 3 --hidden 64
        background losses "$m H=192" bf16 1e-2 --model $m --hidden 192 --string-size 40
        background losses "$m, longer fresh sequences" fp32 1e-4 --model $m --hidden 64 \
            "${longer[@]}"
        background agree "$m S=1 L=2" --model $m --string-size 1 --layers 2
        for h in 33 64 192; do
            background trained "$m H=$h" --model $m --hidden $h --string-size 40
        done
        background agree "$m C=33 B=1" --model $m --channels 33 --hidden 64 --batch-size 1
        background agree "$m images" --model $m "${images[@]}" --patch 2 --layers 2 --hidden 64
        background agree "$m images C=33 D=1" --model $m "${grey[@]}" --patch 1 --channels 33 \
            --hidden 33
        background agree "$m images H=C=192" --model $m "${images[@]}" --patch 1 --channels 192 \
            --hidden 192
        background losses "$m images" fp32 1e-4 --model $m "${images[@]}" --patch 2 --hidden 64
        background losses "$m images --accumulate 3" bf16 1e-2 --model $m "${grey[@]}" --patch 2 \
            --hidden 64 --accumulate 3 --batch-size 3
        background agree "$m text" --model $m --task text --text "$text" --context 65 --hidden 64
        background agree "$m text, V=50257" --model $m --task text --vocab gpt2 --context 9 \
            --text "$work/tokens.bin" --channels 8 --hidden 64 --batch-size 1
    done
    cut_checks
    background spiked "linear H=3072, spikes" --model linear --hidden 3072 --string-size 16
    background spiked "quadratic H=3072, spikes" --model quadratic --hidden 3072 --string-size 16
    for prenorm in exact approx none; do
        for activation in exp relu elu gelu; do
            # as in dev/test_cuda.sh: rounding moves pairs across relu's step
            [ $activation = relu ] && export BF16_GRAD=4e-2 || unset BF16_GRAD
            background agree "quadratic $prenorm $activation" --prenorm $prenorm \
                --activation $activation --hidden 64 --string-size 20
        done
        unset BF16_GRAD
        background agree "quadratic $prenorm, no post norm" --prenorm $prenorm --postnorm no \
            --hidden 64 --string-size 20
        background noncausal agree "non-causal quadratic $prenorm" --causal no --prenorm $prenorm \
            --hidden 64 --string-size 20
        [ $prenorm = exact ] && continue
        background agree "linear $prenorm" --model linear --prenorm $prenorm --string-size 20
        background agree "linear $prenorm, no post norm" --model linear --prenorm $prenorm \
            --postnorm no --hidden 64 --string-size 40
        for b in 2 3; do # cut and not
            background noncausal agree "non-causal linear $prenorm B=$b" --causal no \
                --prenorm $prenorm --model linear --hidden 33 --string-size 20 --batch-size $b
        done
    done
}

# states PRECISION: states that come in and go out, beta 0 and 2, equal keys (dev/test_delta.cu)
states() {
    local log
    log=$work/states.$1
    compile dev/test_delta.cu $build/delta_$1 -Idev -DTESTING \
        -DTRAINER="\"$build/deltanet_$1.cc\"" ${2:-}
    $build/delta_$1 >"$log" 2>&1 && row "deltanet states $1" "ok $(tail -n 1 "$log")" ||
        row "deltanet states $1" "FAIL $(grep -m 1 FAIL "$log") $(tail -n 1 "$log")"
}

# recurrence PRECISION: MetaLA's, from state to state, gates from 0 to -30 (dev/test_gla.cu)
recurrence() {
    local log=$work/recurrence.$1
    export EMULATE_KERNELS=$work/kernels.metala
    compile dev/test_gla.cu $build/gla_$1 -Idev -DTESTING -DTRAINER="\"$build/metala_$1.cc\"" \
        ${2:-}
    $build/gla_$1 >"$log" 2>&1 && row "metala recurrence $1" "ok $(tail -n 1 "$log")" ||
        row "metala recurrence $1" "FAIL $(grep -m 1 FAIL "$log") $(tail -n 1 "$log")"
}

# metala_checks: keys tied and free, every convolution, lengths around strips, blocks and chunks,
# heads of every kernel, gates as strong as HGRN2's. BF16 is held against the oracle that is as
# round (dev/rounded.py): by tokens they are 1e-5 apart, and where the order of sums turns a
# rounding over up to 5e-3. What chunks round inside is not in the oracle: with weights after 30
# steps of 5e-3 it made 4.8e-2 of one seed's a_w, after 60 of 3e-3 at most 1.2e-2 (6 seeds, tied and
# free). Trained free gates have gradients to speak of only at a small tau; what the augmentation
# does to dk is a part of a_w's that is seen after 300 steps.
metala_checks() {
    local t o
    local -x ROUNDED=$build/rounded_metala
    background recurrence bf16 -DPRECISION_BF16
    background recurrence fp32
    for o in "--key tied" "--key free"; do
        background decodes "$o" 200 --task copying $o --lr 6e-3 --eval-batches 1
        background losses "$o" fp32 1e-4 --task copying $o --eval-batches 1
        background losses "$o" bf16 1e-2 --task copying $o --eval-batches 1
        for t in 0 2 4; do
            background agree "$o conv $t" --task copying $o --conv $t --layers 2
        done
        background agree "$o, no augmentation" --task copying $o --augment no --conv 0
        t=$([ "$o" = "--key free" ] && echo 1 || echo 16)
        TRAINED="--steps 60 --batch-size 16 --layers 1" background trained "$o by chunks" \
            --task copying --string-size 40 $o --key-channels 64 --tau $t
        TRAINED="--steps 300 --batch-size 32" background trained "$o by tokens" --task copying \
            --string-size 8 $o --layers 2 --tau $t
        background agree "$o, strong gates" --task mqar --max-length 70 --pairs 4 $o --tau 0.3 \
            --scale no --channels 32
    done
    for t in 1 2 31 33 64 65 255 258; do
        background agree "T=$t C=33 B=1" --task text --text "$text" --context $t --batch-size 1 \
            --channels 33 --heads 3 --key-channels 15
        PRECISIONS=bf16 FORM=chunk background agree "T=$t, chunks" --task text --text "$text" \
            --context $t --batch-size 1 --channels 32 --key-channels 16
    done
    for o in "1 128 64" "1 128 128" "1 64 40" "4 64 16" "1 160 130"; do
        set -- $o
        background agree "NH=$1 C=$2 K=$3" --task copying --string-size 35 --heads $1 \
            --channels $2 --key-channels $3 --hidden 30 --batch-size 1
    done
    background agree "text, V=50257" --task text --vocab gpt2 --context 9 --channels 16 \
        --text "$work/tokens.bin" --batch-size 1
    background losses "--accumulate 3" fp32 1e-4 --task copying --accumulate 3 --conv 0 \
        --eval-batches 1
    background losses "longer fresh sequences" fp32 1e-4 "${longer[@]}" --channels 32
    FORM=chunk background losses "shorter fresh sequences" bf16 1e-2 --task parity --channels 32 \
        --max-length 150 --eval-min-length 5 --eval-max-length 17 --eval-batches 2 --batch-size 1
}

# deltanet_checks: head sizes of every kernel, lengths around strips and warps, both ranges, the
# tasks that ask for states. BF16 is held against an oracle whose stored tensors are as round
# (dev/rounded.py). From the one that rounds nothing both are as far as each other, 1.9e-2 at most
# and 4.1e-2 in gradients (s5, grads.norm1_w: 4.06e-2 either way), and rounding only what products
# read is 1.4e-2 and 3.2e-2 of it: with the first weights a layer's output, 0.2, replaces
# embeddings of 0.02, so that all its error is the next layer's, and a head's output is divided by
# its length, however short its terms leave it.
deltanet_checks() {
    local t hs task range
    local -x ROUNDED=$build/rounded_deltanet
    background states bf16 -DPRECISION_BF16
    background states fp32
    for range in signed nonneg; do
        background decodes "$range" 60 --task copying --eigenvalues $range --lr 2e-3
        background losses "$range" fp32 1e-4 --task copying --eigenvalues $range
        background losses "$range" bf16 1e-2 --task copying --eigenvalues $range
        background agree "$range L=2" --task copying --eigenvalues $range --layers 2
        background trained "$range" --task copying --string-size 9 --eigenvalues $range
    done
    background decodes "no convolution" 300 --task copying --conv no --lr 2e-3
    background losses "--accumulate 3" fp32 1e-4 --task copying --accumulate 3 --conv no
    background agree "no convolution" --task copying --conv no
    background agree "no convolution, SiLU" --task copying --conv no --qk-silu yes --layers 2
    for task in parity modular brackets s5 z60; do
        set -- --task $task --eval-max-length 17 --eval-batches 2 --batch-size 3
        [[ $task == [sz]* ]] || set -- "$@" --eval-min-length 5 # words have one length
        background losses "$task" fp32 1e-4 "$@" --max-length 9
        background losses "$task, shorter fresh sequences" bf16 1e-2 "$@" --max-length 20
        background agree "$task" "$@" --max-length 9
    done
    for t in 1 2 31 33 63 65 255 258; do
        background agree "T=$t NH=3 B=1" --task text --text "$text" --context $t --batch-size 1 \
            --channels 24 --heads 3 --hidden 10
    done
    for hs in 20 33 64 100 128; do
        background agree "HS=$hs" --task copying --string-size 6 --channels $hs --heads 1
    done
    chunk_checks
    background agree "HS=64 NH=3" --task copying --string-size 6 --channels 192 --heads 3
    for hs in 1 5; do
        background agree "HS=$hs" --task copying --channels $((3 * hs)) --heads 3
    done
    background agree "text, V=50257" --task text --vocab gpt2 --context 9 --channels 16 \
        --text "$work/tokens.bin" --batch-size 1
}

# chunk_checks: both forms in BF16, where --form auto would take the other, chunks that T fills and
# does not, evaluations of more and of fewer chunks than a batch. What chunks round inside is not in
# the oracle, so that a second layer rounds other numbers than it does: one layer.
chunk_checks() {
    local t hs
    local -x PRECISIONS=bf16 FORM=chunk
    for hs in 8 16 32 40 64 72 128; do
        # a head's length is a sum over few channels (measured: 1.06e-2 for 8, 9.0e-3 for 16)
        BF16_FORWARD=$([ $hs = 8 ] && echo 1.5e-2) background agree "chunk HS=$hs" --task text \
            --text "$text" --context 70 --heads 2 --channels $((2 * hs))
    done
    for t in 3 63 64 65 130 255; do
        background agree "chunk T=$t B=1" --task text --text "$text" --context $t --batch-size 1 \
            --channels 96 --heads 3 --hidden 10
    done
    background trained "chunk" --task copying --string-size 33 --channels 128 --heads 2
    background losses "chunk --accumulate 3" bf16 1e-2 --task copying --accumulate 3
    background losses "chunk, longer fresh sequences" bf16 1e-2 --layers 2 --task parity \
        --max-length 40 --eval-min-length 64 --eval-max-length 90 --batch-size 5 --eval-batches 2
    background losses "chunk, shorter fresh sequences" bf16 1e-2 --layers 2 --task parity \
        --max-length 90 --eval-min-length 10 --eval-max-length 20 --batch-size 3 --eval-batches 2
    FORM=recurrent background agree "recurrent HS=64" --task copying --channels 128 --heads 2
    FORM=recurrent background agree "recurrent HS=128" --task copying --channels 128 --heads 1
}

# delta_ladder DIRECTION B T C: the chunk kernels of the delta rule's ladder on a shape of two heads
delta_ladder() {
    local log=$work/delta.$1.$2.$3.$4 kernel=4
    [ $1 = forward ] && kernel=5 # with what the backward pass needs
    $build/delta_$1 --check-only --kernel $kernel --B $2 --T $3 --C $4 >"$log" 2>&1 &&
        row "delta $1 B=$2 T=$3 HS=$(($4 / 2))" "ok $(tail -n 1 "$log")" ||
        row "delta $1 B=$2 T=$3 HS=$(($4 / 2))" "FAIL $(head -n 3 "$log" | tr '\n' ' ')"
}

# gla_ladder DIRECTION KERNEL B T C: a chunk kernel of the ladder of gated linear attention, all
# gates, on a shape of one head
gla_ladder() {
    local log=$work/gla.$1.$2.$4.$5
    $build/gla_$1 --check-only --kernel $2 --B $3 --T $4 --C $5 >"$log" 2>&1 &&
        row "gla $1 kernel $2 B=$3 T=$4 DK=DV=$5" "ok" ||
        row "gla $1 kernel $2 B=$3 T=$4 DK=DV=$5" "FAIL $(head -n 3 "$log" | tr '\n' ' ')"
}

# fused PRECISION FLAG: the ladder of GateLoop's layer: states that come in and go out, every
# transition and tile
fused() {
    local log=$work/fused.$1
    compile dev/scan/gateloop_fused.cu $build/fused_$1 -Idev $2
    $build/fused_$1 --check-only >"$log" 2>&1 && row "gateloop layer $1" "ok $(tail -n 1 "$log")" ||
        row "gateloop layer $1" "FAIL $(head -n 3 "$log" | tr '\n' ' ') $(tail -n 1 "$log")"
}

# gateloop_checks: every transition, both wirings, heads that are matrices, lengths around strips
# and tiles, one and two channels a lane (B C from 16384 on). BF16 is held against an oracle whose
# stored tensors are as round (dev/rounded.py): measured 1e-3 and, in gradients, 4e-3 at most. From
# the one that rounds nothing both are as far as each other, and for some inputs that is far:
#   cart: an error of 2.4e-3 in its logits w turns a by that over |w|. C = 64, T = 256: a token with
#     |w| = 0.025 makes 5.16e-1 of wte's gradient, either way; were W_gate and what it multiplies
#     not rounded, 7e-3.
#   real-signed jumps at 0: 7.5e-2.
#   weights after 300 steps of copying, loss 2.8, states up to 37, y to 570: 5.85e-1 of down_b's,
#     either way; 5.96e-1 if the weights alone are rounded.
# The GPU's own sine, 2^x, 1/x, 1/sqrt(x) and sums, imitated by errors of 2^-21 or 2^-22, leave the
# distance from the rounded oracle at 2e-3 and 4e-3 at most.
gateloop_checks() {
    local t o
    local -x ROUNDED=$build/rounded_gateloop
    background fused fp32 -DPRECISION_FP32
    background fused bf16 -DPRECISION_BF16
    background decodes "sep" 300 --task copying --layers 1 --lr 5e-3
    background decodes "matrices, paper" 300 --task copying --layers 1 --lr 5e-3 --channels 64 \
        --head-size 16 --wiring paper --gn-groups 4
    for o in sep sep-relu cart real-pos real-signed stable-exp fixed fixed-real ones; do
        background agree "$o" --task copying --transition $o --string-size 20
        PRECISIONS=fp32 background agree "$o L=2 paper" --task copying --transition $o --layers 2 \
            --wiring paper
        PRECISIONS=fp32 background agree "$o matrices" --task copying --transition $o --head-size 8
        background trained "$o" --task copying --string-size 20 --transition $o
    done
    background agree "paper" --task copying --wiring paper --string-size 20
    background agree "groups" --task copying --gn-groups 4 --string-size 20
    background agree "paper, groups, no biases" --task copying --wiring paper --gn-groups 4 \
        --proj-bias no --head-bias no --string-size 20
    background agree "fixed, no biases" --task copying --transition fixed --proj-bias no \
        --string-size 20
    background agree "ones, no biases" --task copying --transition ones --proj-bias no \
        --string-size 20
    background agree "HS=16" --task copying --head-size 16 --string-size 40
    background agree "HS=11 groups" --task copying --channels 33 --head-size 11 --gn-groups 3 \
        --hidden 7 --string-size 40
    background agree "HS=40 L=1" --task copying --channels 40 --head-size 40 --string-size 20
    for t in 1 2 31 33 255 258; do
        for o in 32 33; do
            background agree "T=$t C=$o B=1" --task text --text "$text" --context $t \
                --batch-size 1 --channels $o
        done
    done
    background agree "two channels a lane" --task copying --string-size 20 --batch-size 256 \
        --channels 64 --hidden 8
    background agree "whole tiles" --task copying --string-size 31 --batch-size 256 \
        --channels 64 --hidden 8 --layers 1
    background agree "whole tiles, groups" --task copying --string-size 31 --batch-size 256 \
        --channels 64 --hidden 8 --layers 1 --wiring paper --gn-groups 4
    background agree "text, V=50257" --task text --vocab gpt2 --context 9 --channels 16 \
        --text "$work/tokens.bin" --batch-size 1
    background losses "horizon" fp32 1e-4 --task horizon --batch-size 3
    background losses "horizon" bf16 1e-2 --task horizon --batch-size 3
    background losses "recall" fp32 1e-4 --task recall --batch-size 3
    background losses "paper, groups" bf16 1e-2 --task copying --wiring paper --gn-groups 4
    background losses "--transition-lr" fp32 1e-4 --task copying --transition-lr 0.3
    background losses "--accumulate 3" fp32 1e-4 --task copying --accumulate 3
    background losses "--accumulate 3" bf16 1e-2 --task copying --accumulate 3
    background losses "matrices, longer fresh sequences" fp32 1e-4 "${longer[@]}" --head-size 8
    background losses "longer fresh sequences" fp32 1e-4 "${longer[@]}"
}

# asked PRECISION: rows that are asked of, fewer than there is room for, none (dev/test_asked.cu)
asked() {
    local log=$work/asked.$1
    compile dev/test_asked.cu $build/asked_$1 -Idev -DTESTING \
        -DTRAINER="\"$build/mamba_$1.cc\"" -DPRECISION_${1^^}
    $build/asked_$1 >"$log" 2>&1 && row "asked rows $1" "ok $(tail -n 1 "$log")" ||
        row "asked rows $1" "FAIL $(grep -m 1 FAIL "$log") $(tail -n 1 "$log")"
}

# asked_checks: a head that reads what MQAR asks alone (util/asked.cuh): channels in 16 bytes and
# not, batches of training and evaluations that are shorter and longer, several an update
asked_checks() {
    local o=(--task mqar --vocab-size 1024 --max-length 24 --pairs 3 --eval-batches 2) odd
    local -x ROUNDED=$([ $model = causalrn ] || echo $build/rounded_$model)
    case $model in
    gpt2) odd=(--channels 33 --heads 3 --model transformer) ;;
    deltanet) odd=(--channels 33 --heads 3) ;;
    metala) odd=(--channels 33 --heads 3 --key-channels 15) ;;
    *) odd=(--channels 33) ;;
    esac
    background agree "asked" "${o[@]}" --batch-size 3
    background agree "asked C=33" "${o[@]}" "${odd[@]}" --batch-size 3
    background losses "asked, longer fresh sequences" fp32 1e-4 "${o[@]}" --batch-size 5 \
        --eval-max-length 40
    background losses "asked, shorter fresh sequences" bf16 1e-2 "${o[@]}" --batch-size 3 \
        --eval-max-length 14 --accumulate 3
}

# selective PRECISION: the ladder of Mamba's scan, the trainer's choice of its kernels: states that
# come in and go out, steps that are huge and 0
selective() {
    local log=$work/selective.$1
    compile dev/scan/selective_scan.cu $build/selective_$1 -Idev -DPRECISION_${1^^}
    $build/selective_$1 --check-only --kernel 6 >"$log" 2>&1 &&
        row "mamba scan $1" "ok $(tail -n 1 "$log")" ||
        row "mamba scan $1" "FAIL $(head -n 3 "$log" | tr '\n' ' ') $(tail -n 1 "$log")"
}

# mamba_checks: both ranges, states that 16 does not divide and that pass in several rounds, windows
# of both kernels, lengths around tiles and chunks (one sequence of a few channels is cut from 128
# positions on), blocks of channels that are not full. BF16 is held against an oracle that rounds
# (dev/rounded.py), as above: at T=2 C=33 the weights of dt, B and C have few terms to average over
mamba_checks() {
    local t c range
    local -x ROUNDED=$build/rounded_mamba
    background selective fp32
    background selective bf16
    background asked fp32
    background asked bf16
    for range in signed nonneg; do
        background decodes "$range" 130 --task copying --layers 1 --eigenvalues $range --lr 4e-3 \
            --eval-batches 1
        background losses "$range" fp32 1e-4 --task copying --eigenvalues $range \
            --eval-batches 1
        background losses "$range" bf16 1e-2 --task copying --eigenvalues $range \
            --eval-batches 1
        background agree "$range L=2" --task copying --eigenvalues $range --layers 2
        background trained "$range" --task copying --string-size 9 --eigenvalues $range
        background agree "$range T=258 S=19" --task text --text "$text" --context 258 \
            --eigenvalues $range --batch-size 1 --channels 8 --state 19
    done
    for t in 1 2 5 31 33 255 258; do
        c=$((t % 2 ? 33 : 16))
        background agree "T=$t C=$c B=1" --task text --text "$text" --context $t --batch-size 1 \
            --channels $c
    done
    background agree "S=1 W=1 R=3" --task copying --channels 12 --state 1 --window 1 --rank 3
    background agree "S=7 W=2 H=37" --task copying --channels 12 --state 7 --window 2 --hidden 37
    background agree "S=33 W=7 B=3" --task copying --channels 24 --state 33 --window 7 \
        --batch-size 3
    background agree "W=16 H=130" --task copying --channels 8 --window 16 --hidden 130
    background losses "--accumulate 3" fp32 1e-4 --task copying --accumulate 3 --channels 16 \
        --eval-batches 1
    background losses "longer fresh sequences" fp32 1e-4 "${longer[@]}" --channels 16
    background losses "parity, shorter fresh sequences" bf16 1e-2 --channels 16 --task parity \
        --max-length 150 --eval-min-length 5 --eval-max-length 17 --eval-batches 2 --batch-size 1
}

start=$(date +%s)
mkdir -p $build
[ $# -gt 0 ] || set -- $(ls train_*.cu | sed -E 's/train_(.*)\.cu/\1/')
background compile dev/emulate/faults.cu $build/faults -Idev/emulate
for direction in forward backward; do
    background compile dev/delta/delta_$direction.cu $build/delta_$direction -DPRECISION_BF16
    background compile dev/gla/gla_$direction.cu $build/gla_$direction -DPRECISION_BF16
done
for model in "$@"; do
    [ $model = causalrn ] && flags=$cuts || flags=
    background compile train_$model.cu $build/${model}_bf16 -DPRECISION_BF16 $flags
    background compile train_$model.cu $build/${model}_fp32 $flags
    [ $model = causalrn ] || background rounded
    background gcc -std=gnu11 -O2 -march=native -fno-math-errno -fopenmp-simd -fopenmp \
        -DCOPYING_CAUSAL=0 train_$model.c -o $build/${model}_cpu_noncausal -lm
done
wait
compiled=$(date +%s)
tokens >"$work/tokens.bin"
python3 dev/small_images.py "$work/rgb.images" 4 6 3 5 600 >/dev/null
python3 dev/small_images.py "$work/grey.images" 4 6 1 7 40 >/dev/null
for _ in {1..32}; do cat LICENSE; done >"$text"
background faults
for direction in forward backward; do
    background delta_ladder $direction 2 65 64
    background delta_ladder $direction 1 130 144 # 72 channels in tiles of 128
    background delta_ladder $direction 50 2 128 # 4 warps of rows a block, elsewhere their parts
    background delta_ladder $direction 25 2 256
    for kernel in 5 7; do
        background gla_ladder $direction $kernel 1 130 72 # 72 channels in tiles of 128
        background gla_ladder $direction $kernel 2 65 64
        background gla_ladder $direction $kernel 1 600 16 # three segments
    done
done
for model in "$@"; do
    ${model}_checks
    asked_checks
    # parts of runs, two groups of channels (util/sums.cuh)
    ROUNDED=$([ $model = causalrn ] || echo $build/rounded_$model) background agree \
        "a token that is everywhere" --task mqar --max-length 100 --batch-size 3 --channels 160
done
wait
for model in "$@"; do
    launched
done
sort "$work/rows" >$build/rows
grep ': FAIL' $build/rows | sed -E 's/(.*): FAIL/FAIL \1:/'
echo "$((compiled - start)) seconds of compiling, $(($(date +%s) - compiled)) of running"
failed=$(grep -c ': FAIL' $build/rows) passed=$(grep -c ': ok' $build/rows)
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
