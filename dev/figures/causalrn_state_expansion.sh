#!/usr/bin/env bash
# causalrn_state_expansion.sh: how much a larger state helps Linear CausalRN, whose memory is H
# numbers a layer. Copying S=64, C=96, L=6, H = 1, 2, 4, 8, 16 times C; accuracy on fresh sequences
# after 1500 steps. From the paper's reviews: retrieval grows with the state and saturates early.
# Five sizes, three seeds: 15 runs.
FIGURE=causalrn_state_expansion STEPS=${STEPS:-1500} THIN=${THIN:-10} S=${S:-64}
HIDDEN=${HIDDEN:-96 192 384 768 1536} # not an option of EXTRA here
. "$(dirname "$0")/common.sh"

for H in $HIDDEN; do
    name=linear-h$(printf %04d "$H") # so that names sort by size
    curve "$name" "$TRAINER" --preset state-expansion --hidden "$H" --string-size "$S" \
        --steps "$STEPS"
    add "Linear CausalRN" "$name"
done
finish --points hidden --y acc --ylim 0 1.02 --title "State expansion: copying $S letters"
