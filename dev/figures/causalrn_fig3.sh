#!/usr/bin/env bash
# causalrn_fig3.sh: CausalRN against the Transformer. Copying S=128, loss over 2000 steps, and the
# same from step 500 on. Both rest on a plateau, then fall almost vertically near step 200. The
# plateau is S/(S+1) ln 26: letters guessed, the end known from its position. Six runs; CausalRN's
# three take 3 minutes on an H200.
FIGURE=causalrn_fig3 STEPS=${STEPS:-2000} THIN=${THIN:-4} S=${S:-128}
. "$(dirname "$0")/common.sh"

setup=(--preset copy-s128 --string-size "$S" --steps "$STEPS")
curve quadratic "$TRAINER" "${setup[@]}"
curve transformer "$GPT2" "${setup[@]}" --model transformer

add CausalRN quadratic
add Transformer transformer
plateau=$(awk "BEGIN { printf \"%.3f\", $S / ($S + 1) * log(26) }")
finish --group --zoom $((STEPS / 4)) "$STEPS" --ylim 0 4 --title "Copying $S letters" \
    --hline "$plateau:S/(S+1) ln 26 = $plateau"
