#!/usr/bin/env bash
# deltanet_s5.sh: products in S5, all permutations of five points, and Z60, sums modulo 60: trained
# on words of 32 elements, evaluated on words of 500; the fraction of words of which every product
# so far is right. The paper (Fig. 4, 8): only swaps, a reflection each, one layer of DeltaNet with
# eigenvalues in [-1,1] solves to 500, with [0,1] little beyond 32; with 3-permutations too five
# layers do best; four tokens an element to about 200 tokens; S5 as such and Z60 not even 32.
# Mamba, of a depth it does not say, is poor in all of them, and on Z60 with [-1,1] the best of all.
# Here 60000 steps on fresh sequences, batch 512, the paper 312500 on a fixed set. Swaps with three
# seeds, the others with one; Mamba of five layers on swaps and Z60, one seed: 18 runs.
FIGURE=deltanet_s5 STEPS=${STEPS:-60000} THIN=${THIN:-600} SAVE_EVERY=${SAVE_EVERY:-5000}
TRAINER=${TRAINER:-./train_deltanet_gpu} LENGTHS="--eval-max-length 500"
MAMBA=${MAMBA:-./train_mamba_gpu}
. "$(dirname "$0")/common.sh"

all=$SEEDS
for preset in s5-swaps s5-triples s5-tokens s5 z60; do
    [ $preset = s5-swaps ] || SEEDS=$(first 1 $all)
    case $preset in
    s5-swaps) panel="only swaps, 1 layer" ;;
    s5-triples) panel="and 3-permutations, 5 layers" ;;
    s5-tokens) panel="4 tokens an element, 5 layers" ;;
    s5) panel="S5, 5 layers" ;;
    z60) panel="Z60, 5 layers" ;;
    esac
    for range in signed nonneg; do
        curve $preset-$range "$TRAINER" --preset $preset --eigenvalues $range --steps "$STEPS"
    done
    add "DeltaNet [-1,1]" $preset-signed "$panel"
    add "DeltaNet [0,1]" $preset-nonneg "$panel"
    [ $preset = s5-swaps ] || [ $preset = z60 ] || continue
    SEEDS=$(first 1 $all)
    for range in signed nonneg; do
        curve $preset-mamba-$range "$MAMBA" --preset $preset --eigenvalues $range --steps "$STEPS"
    done
    add "Mamba [-1,1], 5 layers" $preset-mamba-signed "$panel"
    add "Mamba [0,1], 5 layers" $preset-mamba-nonneg "$panel"
done
finish_lengths --at 33 65 101 201 --ylim -0.02 1.05 --vline "33:" \
    --title "Words in S5 and Z60, trained on 32 tokens (four an element: 64)"
