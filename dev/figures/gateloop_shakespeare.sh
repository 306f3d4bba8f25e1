#!/usr/bin/env bash
# gateloop_shakespeare.sh: GateLoop beside GPT-2 with as many parameters, on characters of tiny
# Shakespeare: TEXT=FILE, about 1.1 MB of ASCII. C=256, L=6, T=256, B=64, 3000 steps, the same
# rates. A GateLoop layer has 7 C^2 + 2 C F weights (no angle: 6 C^2), one of GPT-2 12 C^2: F =
# 5/2 C = 640 (3 C = 768). GPT-2 has positions and one matrix for input and head, GateLoop two
# matrices; the sums differ by 0.7% and are printed. Held-out loss after 3000 steps, and its
# curve. Three seeds, three models: 9 runs.
FIGURE=gateloop_shakespeare STEPS=${STEPS:-3000} THIN=${THIN:-50} SAVE_EVERY=${SAVE_EVERY:-500}
TRAINER=${TRAINER:-./train_gateloop_gpu} TEXT=${TEXT:-}
. "$(dirname "$0")/common.sh"
if [ -z "$TEXT" ] && [ -z "$DRAW_ONLY" ]; then
    echo "skipped: $FIGURE: give TEXT=FILE" && exit 0
fi
readable TEXT "$TEXT"

setup=(--text "$TEXT" --vocab ascii --context 256 --layers 6 --channels 256 --batch-size 64
    --lr 1e-3 --lr-min 1e-4 --beta2 0.99 --weight-decay 0.1 --grad-clip 1 --eval-batches 0
    --eval-every $((STEPS < 12 ? 1 : STEPS / 12)) --steps "$STEPS"
    --warmup $((STEPS < 100 ? STEPS : 100)))
curve gateloop "$TRAINER" --preset shakespeare --hidden 640 "${setup[@]}"
curve gateloop-real "$TRAINER" --preset shakespeare --hidden 768 --transition real-pos \
    "${setup[@]}"
curve gpt2 "$GPT2" --preset shakespeare --model gpt2 --heads 4 "${setup[@]}"
ended

# parameters of each run, as its trainer says them
for dir in "$RUNS/$FIGURE"/*-seed*; do
    [ ! -d "$dir" ] || echo "RESULT run=${dir##*/} parameters=$(parameters "$dir")"
done
add GateLoop gateloop
add "GateLoop, no angle" gateloop-real
add "GPT-2" gpt2
finish --group --split val --title "Characters of tiny Shakespeare, held out"
