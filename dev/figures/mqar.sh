#!/usr/bin/env bash
# mqar.sh: multi-query associative recall (Zoology, arXiv 2312.04927): keys with values, then
# fillers 0 among which every key comes once more and asks for its value; 8192 symbols. Every
# architecture of models.sh at C = 64 and 128; 4 pairs in 64 tokens, 8 in 128, 16 in 256. At most
# 6000 steps of 65536 fresh tokens at both rates of RATES, the better one counts; 3000 sequences
# are evaluated. One seed: 108 runs. --full: 64 pairs in 512 too, C = 256 and 512, rates 1e-4 and
# 1e-2: 576 runs. The paper trains on 100000 sequences, 64 times, at four rates. It has a figure
# without numbers: attention above 99 everywhere, and MetaLA's (arXiv 2411.10741, Fig. 3): MetaLA
# the best of the linear models.
#
# Seen at 2.15e-3: what DeltaNet, MetaLA, GLA and Mamba have, a short convolution, brings key and
# value together at once. The others must learn that: the Transformer and CausalRN do to 8 pairs in
# 128 tokens, and with 16 in 256 are at the 6% of who names any value of the sequence when the steps
# are over. First embeddings of N(0,1) were far worse: 2% of 8 pairs for the Transformer of 64
# channels, for Mamba 71 and 80%.
FIGURE=mqar STEPS=${STEPS:-6000} THIN=${THIN:-200} SAVE_EVERY=${SAVE_EVERY:-2000}
. "$(dirname "$0")/models.sh"
sizes="64:4 128:8 256:16" widths="64 128" rates="4.64e-4 2.15e-3"
[ -z "$FULL" ] || sizes+=" 512:64" widths+=" 256 512" rates+=" 1e-4 1e-2"
SIZES=${SIZES:-$sizes} CHANNELS=${CHANNELS:-$widths} RATES=${RATES:-$rates} TOKENS=${TOKENS:-65536}

for size in $SIZES; do
    T=${size%:*} pairs=${size#"${size%:*}"}
    number SIZES=T:pairs "$T" 1 && number SIZES=T:pairs "${pairs#:}" 1
    number TOKENS "$TOKENS" "$T"
done

for size in $SIZES; do
    T=${size%:*} pairs=${size#*:}
    for C in $CHANNELS; do
        for lr in $RATES; do
            recall "$(printf t%04dp%d "$T" "$pairs")" "$C" "$lr" --task mqar --vocab-size 0 \
                --max-length "$T" --eval-max-length "$T" --pairs "$pairs" \
                --batch-size $((TOKENS / T)) --eval-batches $((3000 * T / TOKENS + 1))
        done
    done
done
recalled channels accuracy "MQAR, two blocks, better of two rates: values right"
