#!/usr/bin/env bash
# gateloop_transitions.sh: where the transitions a of trained models lie: the complex plane by
# layer, the sizes and angles, and the mean |a| around resets (text: line feeds). Sums since a
# reset with sep and cart (|a| >= 1/2: an empty disc), 2000 steps; characters of TEXT=FILE with
# sep, 3000 steps, left out without TEXT. Of tokens not trained on: sums of another seed, the
# held-out part of TEXT. Three runs; the dump is made on the CPU. gateloop_attention.sh draws the
# same runs' attention.
MAPS=${MAPS:-transitions}
FIGURE=gateloop_transitions STEPS=${STEPS:-2000} TEXT_STEPS=${TEXT_STEPS:-3000} THIN=${THIN:-50}
SEEDS=${SEEDS:-1} SAVE_EVERY=${SAVE_EVERY:-500} TEXT=${TEXT:-}
TRAINER=${TRAINER:-./train_gateloop_gpu} DUMPER=${DUMPER:-./train_gateloop}
. "$(dirname "$0")/common.sh"
number TEXT_STEPS "$TEXT_STEPS"
if [ -z "$DRAW_ONLY" ] && [ ! -x "$DUMPER" ]; then
    echo "error: $DUMPER is not built: make cpu" >&2 && exit 3
fi
readable TEXT "$TEXT"
SEEDS=$(first 1 $SEEDS) # a picture of one run each

DUMP="--seed 1000"
for kind in sep cart; do
    curve $kind "$TRAINER" --preset horizon --transition $kind --steps "$STEPS" \
        --warmup $((STEPS < 100 ? STEPS : 100))
done
if [ -n "$TEXT" ]; then
    tail -c $(($(wc -c <"$TEXT") / 10)) "$TEXT" >"$work/held" || exit 3 # what is held out
    DUMP="--text $work/held --batch-size 2"
    curve text "$TRAINER" --preset shakespeare --text "$TEXT" --steps "$TEXT_STEPS" \
        --warmup $((TEXT_STEPS < 100 ? TEXT_STEPS : 100))
else
    echo "skipped: text: no TEXT=FILE"
fi
ended

# table CURVE MARK: the table of its dump, if the run is there; MARK: the token to look around
table() {
    local dump=$RUNS/$FIGURE/$1-seed$SEEDS/dump.safetensors
    [ ! -e "$dump" ] || [ -n "$DRAW_ONLY" ] ||
        python3 dev/gateloop_maps.py "$MAPS" "$dump" --mark "$2" \
            --csv "$FIGURES/data/gateloop_$MAPS-$1.csv" || failed=$((failed + 1))
}

tables=() names=() marks=()
for kind in sep cart text; do
    mark=5 label="sums since a reset, $kind" what="a reset"
    [ $kind != text ] || mark=10 label="characters, sep" what="a line feed"
    table $kind $mark
    [ -e "$FIGURES/data/gateloop_$MAPS-$kind.csv" ] || continue
    tables+=("$FIGURES/data/gateloop_$MAPS-$kind.csv") names+=("$label") marks+=("$what")
done
if [ ${#tables[@]} -eq 0 ]; then
    echo "gateloop_$MAPS: no data, nothing to draw" && exit 1
fi
python3 dev/gateloop_maps.py draw "${tables[@]}" --label "${names[@]}" --marks "${marks[@]}" \
    --out "$FIGURES/gateloop_$MAPS.png" --svg --optional || failed=$((failed + 1))
FIGURE=gateloop_$MAPS
over
