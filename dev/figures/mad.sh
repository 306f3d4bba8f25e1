#!/usr/bin/env bash
# mad.sh: five tasks of MAD (arXiv 2403.17844), compression left out, at its baseline settings: 128
# channels, two blocks, batch 128, 12800 sequences to train on (memorization 256), 200 times, which
# is 20000 steps, and 1280 to evaluate. Rates 5e-4 and 1e-3, the better one counts, decay 0.1. Every
# architecture of models.sh; one seed: 90 runs. A score is the mean over tokens (macro); RESULT has
# it over all targets too (micro). MAD takes the mean of batches' macro and the best of six runs.
# Other papers, whose models differ: MetaLA 99.9 in-context, 99.7 noisy, 15.2 fuzzy, 85.8
# memorization, 97.7 selective; Mamba 87.9, 90.9, 9.6, 89.5, 81.8; DeltaNet 100, 100, 35.7, 52.8,
# 100; Transformer 94.1, 86.8, 29.8, 85.2, 99.6. --full: 256 channels as well. EXTRA="--examples 0":
# fresh sequences.
FIGURE=mad STEPS=${STEPS:-20000} THIN=${THIN:-500} SAVE_EVERY=${SAVE_EVERY:-5000}
. "$(dirname "$0")/models.sh"
widths=128
[ -z "$FULL" ] || widths+=" 256"
TASKS=${TASKS:-in-context noisy fuzzy memorization selective} RATES=${RATES:-5e-4 1e-3}
CHANNELS=${CHANNELS:-$widths}

for task in $TASKS; do
    examples=12800 T=128
    [ "$task" != memorization ] || examples=256 T=32
    [ "$task" != selective ] || T=256
    for C in $CHANNELS; do
        for lr in $RATES; do
            recall "$task" "$C" "$lr" --task "$task" --vocab-size 0 --max-length $T \
                --eval-max-length $T --examples $examples --batch-size 128 --eval-batches 10
        done
    done
done
recalled task "macro micro" "MAD's tasks, two blocks, better of two rates"
