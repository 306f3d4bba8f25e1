#!/usr/bin/env bash
# text_all.sh: every architecture as a language model of characters, at 10.8 to 10.9 million
# parameters (C = 384, six blocks of 12 C^2; text.sh has the shapes, the data and the schedule):
# held-out loss against steps and against seconds. Must hold: the numbers of parameters that the
# trainers print are within 3%. MODELS="mamba metala" makes only these runs.
#
# A step is 5 to 6e12 operations; the quadratic CausalRN's 2e11 exponentials make it the slowest.
# TIME=30 for runs of half a minute.
FIGURE=text_all CHANNELS=${CHANNELS:-384} LAYERS=${LAYERS:-6}
. "$(dirname "$0")/text.sh"
models="linear-causalrn causalrn gpt2 transformer linear-transformer deltanet gateloop metala mamba"
MODELS=${MODELS:-$models}
[ $# = 0 ] || { echo "error: $1: expected no argument" >&2 && exit 2; }
[[ $MODELS = *[!\ ]* ]] ||
    { echo "error: MODELS: expected some of $models, got none" >&2 && exit 2; }
once MODELS $MODELS
for name in $MODELS; do
    [[ " $models " == *" $name "* ]] ||
        { echo "error: MODELS: expected some of $models, got \"$name\"" >&2 && exit 2; }
done
fit $MODELS
for name in $MODELS; do learn "$name"; done
add "Linear CausalRN" linear-causalrn
add CausalRN causalrn
add GPT-2 gpt2
add Transformer transformer
add "Linear Transformer" linear-transformer
add DeltaNet deltanet
add GateLoop gateloop
add MetaLA metala
add Mamba mamba
checks=("equal $models")
text_finish
