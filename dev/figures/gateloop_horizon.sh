#!/usr/bin/env bash
# gateloop_horizon.sh: what a transition must be able to do. Sums modulo 10 since the last of
# three resets, 128 tokens; two layers, 32 channels, 2000 steps: accuracy on 256 fresh sequences,
# and on 1024 by tokens since a reset. Nine transitions, three seeds: 27 runs; on two CPU cores 50
# seconds each. The paper's own task of this name is not public; this one is specified in its
# place. Must hold, of each seed: sep >= 0.95, fixed <= 0.55, ones <= 0.35, sep - real-pos >=
# 0.25; RESULT lines say so.
FIGURE=gateloop_horizon STEPS=${STEPS:-2000} THIN=${THIN:-50} SAVE_EVERY=${SAVE_EVERY:-500}
TRAINER=${TRAINER:-./train_gateloop_gpu} LENGTHS="--eval-batches 32"
. "$(dirname "$0")/common.sh"

warmup=$((STEPS < 100 ? STEPS : 100))
for kind in sep sep-relu cart stable-exp real-signed real-pos fixed fixed-real ones; do
    curve $kind "$TRAINER" --preset horizon --transition $kind --steps "$STEPS" --warmup $warmup
done

panel="size and angle by the token"
for kind in sep sep-relu cart stable-exp; do add $kind $kind "$panel"; done
panel="no free angle"
for kind in sep real-signed real-pos; do add $kind $kind "$panel"; done
panel="the same for every token"
for kind in sep fixed fixed-real ones; do add $kind $kind "$panel"; done
ended

# accuracy KIND SEED: of the run's evaluation at its end, from its data; nothing without data
accuracy() {
    sed -nE 's/^# RESULT .* accuracy=([0-9.]+) .*/\1/p' \
        "$FIGURES/data/lengths-$FIGURE-$1-seed$2.csv" 2>/dev/null
}

for seed in $SEEDS; do # a run without data counts as one that fails
    awk -v seed="$seed" -v sep="$(accuracy sep "$seed")" -v real="$(accuracy real-pos "$seed")" \
        -v fixed="$(accuracy fixed "$seed")" -v ones="$(accuracy ones "$seed")" 'BEGIN {
        hold = sep != "" && real != "" && fixed != "" && ones != ""
        hold = hold && sep >= 0.95 && fixed <= 0.55 && ones <= 0.35 && sep - real >= 0.25
        print "RESULT seed=" seed " sep=" sep " fixed=" fixed " ones=" ones " real-pos=" real \
            " must_hold=" (hold ? "yes" : "no")
        exit !hold }' || failed=$((failed + 1))
done
finish_lengths --bin 8 --at 1 17 33 49 65 --ylim 0 1.03 --xlabel "Tokens since a reset" \
    --ylabel Accuracy --hline "0.1:chance" --title "Sums modulo 10 since a reset"
