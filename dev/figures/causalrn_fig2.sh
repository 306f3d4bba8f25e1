#!/usr/bin/env bash
# causalrn_fig2.sh: what each part of CausalRN is for. Copying S=128, loss against step. Six
# curves, 600 steps, three seeds: 18 runs, 11 minutes on an H200.
#   a  post-reduction norm: without it unstable, or slower
#   b  pre-activation norm: only exact, over every pair, shows the drop, near step 200
#   c  activation: only exp drops; relu and elu go down gradually, if at all
# A run of `none` may overflow: it then ends there, and so does its curve.
FIGURE=causalrn_fig2 STEPS=${STEPS:-600} THIN=${THIN:-2} S=${S:-128}
. "$(dirname "$0")/common.sh"

# ablation NAME OPTIONS...: the paper's model but for the options
ablation() {
    local name=$1
    shift
    curve "$name" "$TRAINER" --preset copy-s128 --string-size "$S" --steps "$STEPS" "$@"
}

ablation paper
ablation postnorm-no --postnorm no
ablation prenorm-approx --prenorm approx
ablation prenorm-none --prenorm none
ablation relu --activation relu
ablation elu --activation elu

panel="a: post-reduction norm"
add yes paper "$panel"
add no postnorm-no "$panel"
panel="b: pre-activation norm"
add exact paper "$panel"
add approx prenorm-approx "$panel"
add none prenorm-none "$panel"
panel="c: activation"
add exp paper "$panel"
add relu relu "$panel"
add elu elu "$panel"
finish --group --ylim 0 4 --title "CausalRN, copying $S letters"
