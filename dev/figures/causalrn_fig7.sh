#!/usr/bin/env bash
# causalrn_fig7.sh: classifying images by their patches of 2 x 2, all of which see all; the class is
# read off <CLS>, the last token: Linear BiRN, the Transformer and the Linear Transformer, equal in
# weights. Must hold: Linear BiRN's accuracy on the test images is at most 1.5 points below the
# Transformer's. The quadratic BiRN, H = C, has one epoch, for the test. One seed.
#
#   IMAGES=FILE    corpora/fashion_mnist.images of data/fashion_mnist.sh, or what cifar10.sh or
#                  cifar5m.sh make: data and pictures of these have its name too
#   EPOCHS=20 or STEPS=N     of 60000 images, 3750 updates of 320
#   BATCH=320  PATCH=2  EVALS=20
#
# Fashion-MNIST, and anything but --paper: C = 384, L = 6, MLP or H of 1536, 5e-4 to 5e-5 by a
# cosine, 5% of warm-up, no augmentation. --paper, for cifar5m.images: C = 768, L = 12, 3072, one
# epoch, 1e-4 to 1e-5, 2000 updates of warm-up, as the authors' code has it (the paper: 5e-4).
# NOT RUN: --paper, CIFAR-5m, CIFAR-10.
#
# A step of Fashion-MNIST is 4e12 operations a model, on an H200 36 ms (Transformers 22): 1.5 to 2.5
# minutes a run. MAPS=1: what causalrn_fig8.sh draws, and the run it needs.
IMAGES=${IMAGES:-} EPOCHS=${EPOCHS:-} BATCH=${BATCH:-320} PATCH=${PATCH:-2} EVALS=${EVALS:-20}
SEEDS=${SEEDS:-1} THIN=${THIN:-20} SAVE_EVERY=${SAVE_EVERY:-2000} MAPS=${MAPS:-} SHOWN=${SHOWN:-10}
size=(384 6 5e-4 5e-5 5/100 20)
for arg; do
    [ "$arg" = --paper ] || { echo "error: $arg: expected --paper" >&2 && exit 2; }
    size=(768 12 1e-4 1e-5 2000/18750 1)
done
FIGURE=${IMAGES##*/} && FIGURE=causalrn_fig7_${FIGURE%.images}
[ -n "$IMAGES" ] && [ "$FIGURE" != causalrn_fig7_fashion_mnist ] || FIGURE=causalrn_fig7
images=$( # to train on, as the file's header has it; nothing of what is no such file
    cd "$(dirname "$0")/../.." && head -c 8 "$IMAGES" 2>/dev/null | grep -qa '^seqimage' &&
        od -An -t u8 -j 32 -N 8 "$IMAGES" | tr -d ' ' | grep -E '^[1-9][0-9]{0,8}$'
)
: "${EPOCHS:=${size[5]}}"
[[ $EPOCHS =~ ^[1-9][0-9]{0,3}$ ]] ||
    { echo "error: EPOCHS: expected 1 to 9999, got \"$EPOCHS\"" >&2 && exit 2; }
[[ $BATCH =~ ^[1-9][0-9]{0,5}$ ]] && [ "$BATCH" -le "${images:-999999}" ] || {
    echo "error: BATCH: expected 1 to ${images:-999999}, got \"$BATCH\"" >&2 && exit 2
}
EPOCH=$((${images:-999999} / BATCH)) && STEPS=${STEPS:-$((EPOCH * EPOCHS))}
. "$(dirname "$0")/common.sh"
if [ -z "$IMAGES" ] && [ -z "$DRAW_ONLY" ]; then
    echo "skipped: $FIGURE: give IMAGES=FILE" && exit 0
fi
if [ -z "$DRAW_ONLY" ]; then
    readable IMAGES "$IMAGES"
    [ -n "$images" ] || { # the trainers look at the rest of it
        echo "error: IMAGES: expected a file of data/images.py, got \"$IMAGES\"" >&2 && exit 3
    }
fi
number PATCH "$PATCH" 1 && number EVALS "$EVALS" 1 && number SHOWN "$SHOWN" 1
C=${CHANNELS:-${size[0]}} L=${LAYERS:-${size[1]}}
number CHANNELS "$C" 1 && number LAYERS "$L" 1

# classify NAME STEPS TRAINER OPTIONS...: train it for so many steps.
classify() {
    local name=$1 steps=$2 trainer=$3
    shift 3
    curve "$name" "$trainer" "$@" --task images --images "$IMAGES" --patch "$PATCH" --causal no \
        --channels "$C" --batch-size "$BATCH" --steps "$steps" --lr "${size[2]}" \
        --lr-min "${size[3]}" --schedule cosine --warmup $((steps * ${size[4]})) --weight-decay 0 \
        --beta1 0.9 --beta2 0.999 --adam-eps 1e-8 --grad-clip 1 --eval-batches 0 \
        --eval-every $((steps < EVALS ? 1 : steps / EVALS))
}
heads=$((C % 64 ? 1 : C / 64))
DUMPER=${DUMPER:-./train_causalrn} DUMP="--batch-size $SHOWN" # for the maps
classify linear-birn "$STEPS" "$TRAINER" --model linear --layers "$L" --hidden $((4 * C))
ended
DUMP=
if [ -n "$MAPS" ]; then
    dump=$RUNS/$FIGURE/linear-birn-seed${SEEDS%% *}/dump.safetensors
    FIGURE=${FIGURE/fig7/fig8}
    [ -e "$dump" ] || { echo "$FIGURE: no data, nothing to draw" && exit 1; }
    python3 dev/birn_maps.py "$dump" --csv "$FIGURES/data/$FIGURE.csv" --images "$SHOWN" \
        --layers $((L < 6 ? L : 6)) --out "$FIGURES/$FIGURE.png" --svg --optional ||
        failed=$((failed + 1))
    over
fi
classify transformer "$STEPS" "$GPT2" --model transformer --layers "$L" --heads "$heads"
classify linear-transformer "$STEPS" "$GPT2" --model linear-transformer --layers "$L" \
    --heads "$heads"
classify birn $((STEPS < EPOCH ? STEPS : EPOCH)) "$TRAINER" --model quadratic --layers "$L" \
    --hidden "$C"

add "Linear BiRN" linear-birn
add Transformer transformer
add "Linear Transformer" linear-transformer
add "BiRN, H = C, one epoch" birn
found "$FIGURE"
args+=(--split val --group)
title="Patches of $PATCH x $PATCH, C = $C, L = $L, test images"
python3 dev/plot.py "${args[@]}" --title "$title" --ylabel "Loss (nats)" --table ||
    failed=$((failed + 1))
python3 dev/plot.py "${args[@]}" --title "$title" --y acc --ylabel "Share of images right" \
    --out "$FIGURES/${FIGURE}_accuracy.png" || failed=$((failed + 1))
a=$(kept linear-birn accuracy) b=$(kept transformer accuracy)
for name in linear-birn transformer linear-transformer birn; do
    echo "RESULT model=$name parameters=$(kept $name parameters) accuracy=$(kept $name accuracy)"
done
[ -z "$a" ] || [ -z "$b" ] ||
    holds "accuracy linear-birn=$a transformer=$b bound=0.015" "$a >= $b - 0.015" ||
    failed=$((failed + 1))
over
