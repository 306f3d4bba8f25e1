#!/usr/bin/env bash
# causalrn_fig4.sh: how long a string each model learns to copy: training steps until a batch has
# 99% accuracy, for S letters, at most 2000 steps. The paper: CausalRN before the Transformer, the
# linear models later, Linear CausalRN not at all from S=128 on. Five sizes, four models,
# three seeds: 60 runs, each stopped at 99%; CausalRN's 30 take 5 minutes on an H200.
FIGURE=causalrn_fig4 STEPS=${STEPS:-2000} THIN=${THIN:-10}
SIZES=${SIZES:-16 32 64 128 256}
. "$(dirname "$0")/common.sh"

# each MODEL TRAINER LABEL: one model at all sizes
each() {
    local S name
    for S in $SIZES; do
        name=$1-s$(printf %03d "$S") # so that names sort by size
        curve "$name" "$2" --preset copy-s128 --string-size "$S" --steps "$STEPS" --model "$1" \
            --stop-at 0.99
        add "$3" "$name"
    done
}

each quadratic "$TRAINER" CausalRN
each linear "$TRAINER" "Linear CausalRN"
each transformer "$GPT2" Transformer
each linear-transformer "$GPT2" "Linear Transformer"
finish --points string-size --y first_99 --logy --title "Copying: steps to 99% accuracy"
