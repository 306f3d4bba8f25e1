#!/usr/bin/env bash
# gateloop_wikitext103.sh: the paper's language model on WikiText-103, --preset wikitext103 (123
# million parameters, ten epochs of 14400 updates where the paper is said to have made a hundred).
# NOT RUN: no number here has been measured, and the paper's 13.4 is not claimed. It cannot be
# expected either: the author's code for it is not public, its reviewers doubted it, and nobody
# has reported it again. A fair bar is a Transformer of the same budget (18.6 in the table it is
# from).
#
# Perplexities are printed on both bases, by GPT-2 token and by word (words and line ends, as word
# models count: 245569 in the test set), and by both protocols: `fresh`, windows of 512 tokens
# that start from nothing; `carried`, one stream, whose state goes on from window to window. Every
# token but the first is a target. Say which one a number is.
#
#   DATA=DIR     train.bin, val.bin, test.bin: data/gpt2_tokens.py encode of the texts
#   TEST=FILE    the text that test.bin was made of, to count its words
#   TRAINER=./train_gateloop_gpu  RUNS=runs/figures  STEPS=144000  EXTRA="options"
# A run that was stopped goes on from its checkpoint. The last evaluation is the CPU's, 5e13
# FLOPs.
set -u
cd "$(dirname "$0")/../.." || exit 1
: "${TRAINER:=./train_gateloop_gpu}" "${RUNS:=runs/figures}" "${STEPS:=144000}" "${EXTRA:=}"
dir=$RUNS/gateloop_wikitext103 go=() extra=($EXTRA)
if [ -z "${DATA:-}" ] || [ -z "${TEST:-}" ]; then
    echo "skipped: gateloop_wikitext103: give DATA=DIR and TEST=FILE" && exit 0
fi
[[ $STEPS =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
    { echo "error: STEPS: expected a whole number, got \"$STEPS\"" >&2 && exit 2; }
for file in "$DATA/train.bin" "$DATA/val.bin" "$DATA/test.bin" "$TEST"; do
    [ -r "$file" ] || { echo "error: $file: cannot read it" >&2 && exit 3; }
done
[ -x "$TRAINER" ] || { echo "error: $TRAINER is not built" >&2 && exit 3; }
make build/gateloop_stream || exit 3
mkdir -p "$RUNS" || exit 3
[ ! -e "$dir/checkpoint.safetensors" ] || go=(--resume)
"$TRAINER" --preset wikitext103 --text "$DATA/train.bin" --val "$DATA/val.bin" --steps "$STEPS" \
    --eval-every $((STEPS < 10 ? 1 : STEPS / 10)) --out "$dir" ${go[@]+"${go[@]}"} \
    ${extra[@]+"${extra[@]}"} || exit
build/gateloop_stream --preset wikitext103 --load "$dir/checkpoint.safetensors" \
    --val "$DATA/test.bin" ${extra[@]+"${extra[@]}"} >"$dir/stream.txt" || exit
awk -v words=$(($(wc -w <"$TEST") + $(wc -l <"$TEST"))) '/^RESULT/ {
    for (i = 2; i <= NF; i++) { split($i, pair, "="); of[pair[1]] = pair[2] }
    print "RESULT state=" of["state"], "tokens=" of["targets"], "words=" words, \
        "token_ppl=" exp(of["nats"] / of["targets"]), "word_ppl=" exp(of["nats"] / words) }' \
    "$dir/stream.txt"
