#!/usr/bin/env bash
# throughput.sh: tokens a second and memory of every architecture against T: training steps over
# 65536 tokens, in sequences of 512 to 65536. Two blocks of models.sh, 384 channels, heads of 128
# (GateLoop: one channel; CausalRN: eight layers of H = 384), bf16; MAD's selective copying, 16
# symbols, no decoding. The median step of the last two thirds of STEPS. A T is left out, and with
# it every longer one of that model, where a step takes more than 10 s, would if it took twice as
# long as at the T before, or does not fit in memory. --full: 768 channels. Rows of data/ of models
# that are not measured stay.
FIGURE=throughput STEPS=${STEPS:-12} THIN=1 TOKENS=${TOKENS:-65536}
. "$(dirname "$0")/models.sh"
C=${CHANNELS:-$([ -z "$FULL" ] && echo 384 || echo 768)} HEAD=${HEAD:-128}
SIZES=${SIZES:-512 1024 2048 4096 8192 16384 32768 65536}
number CHANNELS "$C" && number HEAD "$HEAD"
for T in $SIZES; do number SIZES "$T" 1 && number TOKENS "$TOKENS" "$T"; done

table=$FIGURES/data/$FIGURE.csv
# measure NAME T: a row of the table; ms = the step's, 1e9 where there is none. Where the T before
# took long, ms, four steps are enough.
measure() {
    local out=$work/run-$1-$2 memory code steps=$STEPS
    [ "$STEPS" -le 4 ] || awk "BEGIN { exit ($ms > 500) }" || steps=4
    model "$1" "$C" "$HEAD"
    merge "${shape[@]}" --task selective --vocab-size 16 --max-length "$2" --eval-max-length "$2" \
        --min-length 0 --eval-min-length 0 --steps "$steps" --warmup 0 --stop-at 0 \
        --batch-size $((TOKENS / $2)) --eval-batches 1 --save-every 0 $EXTRA
    timeout -k 10 $((12 * steps + 60)) "$trainer" "${options[@]}" --out "$out" >"$work/log" 2>&1
    code=$?
    ms=$(awk -F , '$2 == "train" { print $7 }' "$out/log.csv" 2>/dev/null |
        tail -n +$((steps / 3 + 1)) | median)
    ms=${ms:-1e9}
    memory=$(grep -m 1 -oE '[0-9.]+ MiB' "$work/log")
    if [ $code -ne 0 ] && [ $code -ne 124 ] && [ $code -ne 137 ] && [ $code -ne 4 ]; then
        echo "FAILED: $1, T=$2: $(grep -m 1 '^error' "$work/log" || tail -n 1 "$work/log")"
        ms=1e9
        return 1
    fi
    if [ $code -ne 0 ] || awk "BEGIN { exit !($ms > 10000) }"; then
        echo "left out: $1, T=$2: $([ $code = 4 ] && grep -m 1 '^error' "$work/log" ||
            echo "more than 10 s a step")"
        ms=1e9
        return 0
    fi
    awk -v name="$1" -v T="$2" -v n="$TOKENS" -v ms="$ms" -v m="${memory% MiB}" 'BEGIN {
        printf "%s,%d,%.6g,%s,%s\n", name, T, n / ms / 1000, m, ms }' >>"$work/table"
    echo "$1, T=$2: $ms ms a step, $memory, $(sed -n 's/^.* \([0-9]*\) parameters.*/\1/p' \
        "$work/log" | head -n 1) parameters"
}

if [ -z "$DRAW_ONLY" ]; then
    rate="Million tokens a second"
    echo "model,T (B T = $TOKENS; C = $C),$rate,Memory (MiB),Step (ms)" >"$work/table"
    [ ! -e "$table" ] || refill "$table" "$work/table" # another size is refused at once
    for name in $MODELS; do
        model "$name" "$C" "$HEAD"
        [ -x "$trainer" ] || { echo "skipped: $name: $trainer is not built" && continue; }
        ms=0
        for T in $SIZES; do
            if awk "BEGIN { exit !(2 * $ms > 10000) }"; then
                echo "left out: $name, T=$T: half of it took $ms ms a step, or was left out"
                ms=1e9
                continue
            fi
            measure "$name" "$T" || failed=$((failed + 1))
        done
    done
    [ "$(wc -l <"$work/table")" -gt 1 ] || { echo "$FIGURE: nothing was measured" && exit 1; }
    refill "$table" "$work/table"
fi
[ -e "$table" ] || { echo "$FIGURE: no data, nothing to draw" && exit 1; }
awk -F , 'NR > 1 { if (!($1 in from)) from[$1] = $5
    print "RESULT model=" $1 " T=" $2 " ms=" $5 " times=" $5 / from[$1] " MiB=" $4 }' "$table"
cut -d , -f 1-4 "$table" >"$work/drawn.csv"
python3 dev/plot.py "$work/drawn.csv" --columns --out "$FIGURES/$FIGURE.png" --svg --optional \
    --logy --title "A training step over $TOKENS tokens, $C channels" || failed=$((failed + 1))
over
