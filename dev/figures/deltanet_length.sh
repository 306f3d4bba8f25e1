#!/usr/bin/env bash
# deltanet_length.sh: DeltaNet's time and memory should be linear in T: a step over the same number
# of tokens, 65536, in sequences of 64 to 65536, should take as long and as much memory. Two layers
# of 512 channels, heads of 128; parity of T bits. A softmax Transformer's time would grow with T.
# Rows of data/ of other T stay.
FIGURE=deltanet_length STEPS=${STEPS:-30} THIN=1 TRAINER=${TRAINER:-./train_deltanet_gpu}
TOKENS=${TOKENS:-65536} SIZES=${SIZES:-64 128 256 512 1024 2048 4096 8192 16384 32768 65536}
. "$(dirname "$0")/common.sh"
once SIZES $SIZES
for T in $SIZES; do number SIZES "$T" 1 && number TOKENS "$TOKENS" "$T"; done

table=$FIGURES/data/$FIGURE.csv
# measure T: a row of the table: the median time of a step after a third of them, and memory
measure() {
    local n=$(($1 + 1)) out=$work/run-$1 ms memory
    merge --task parity --layers 2 --channels 512 --heads 4 --hidden 0 --steps "$STEPS" \
        --warmup 0 --batch-size $((TOKENS / $1)) --min-length $n --max-length $n \
        --eval-min-length $n --eval-max-length $n --eval-batches 1 --save-every 0 $EXTRA
    "$TRAINER" "${options[@]}" --out "$out" >"$work/log" 2>&1 ||
        { tail -n 2 "$work/log"; return 1; }
    ms=$(awk -F , '$2 == "train" { print $7 }' "$out/log.csv" | tail -n $((STEPS - STEPS / 3)) |
        median)
    memory=$(grep -m 1 -oE '[0-9.]+ MiB' "$work/log")
    echo "$1,$ms,${memory% MiB}" >>"$work/table"
    echo "T=$1 B=$((TOKENS / $1)): $ms ms a step, $memory"
}

if [ -z "$DRAW_ONLY" ]; then
    if [ ! -x "$TRAINER" ]; then
        echo "error: $TRAINER is not built"
        exit 3
    fi
    echo "T (B T = $TOKENS),Time of a step (ms),Memory (MiB)" >"$work/table"
    [ ! -e "$table" ] || refill "$table" "$work/table" # another size is refused at once
    for T in $SIZES; do
        measure "$T" || failed=$((failed + 1))
    done
    refill "$table" "$work/table"
    { head -n 1 "$table" && tail -n +2 "$table" | sort -n; } >"$work/sorted"
    cp "$work/sorted" "$table"
fi
awk -F , 'NR == 2 { ms = $2; m = $3 } END { if (NR > 2)
    print "RESULT T=" $1 " ms=" $2 " times=" $2 / ms " MiB=" $3 " times_memory=" $3 / m }' "$table"
python3 dev/plot.py "$table" --columns --out "$FIGURES/$FIGURE.png" --svg --optional \
    --title "DeltaNet: a step over $TOKENS tokens" || failed=$((failed + 1))
over
