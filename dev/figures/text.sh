#!/usr/bin/env bash
# text.sh: a language model of characters, for causalrn_fig6.sh and text_all.sh, which source it in
# place of common.sh after FIGURE is set; what that says of the environment holds, but for TRAINER
# and GPT2: the trainers are ./train_X$SUFFIX, SUFFIX=_gpu.
#
# A token is a byte. Non-overlapping windows of T = 256, in shuffled order, 320 an update; the last
# 5% of the text are held out. 1159 updates: of classics100M (100 MB of books), 95 MB once. AdamW
# without decay, 200 updates of warm-up, a cosine from 5e-4 to 5e-5. One seed.
#
# From the environment, besides common.sh's:
#   TEXT=FILE          what to train on; the picture has its name
#   VAL=FILE           what to evaluate on, in place of the end of TEXT
#   STEPS=N            updates; the warm-up is 200/1159 of them
#   TIME=SECONDS       no run takes much longer: where the slowest model's 12 steps say that STEPS
#                      would, STEPS are fewer, for all. $RUNS/$FIGURE/steps keeps how many
#   CHANNELS  LAYERS   C, and the number L of blocks of 12 C^2 weights
#   BATCH=320  CONTEXT=256  LR=5e-4  LR_MIN=5e-5  EVALS=10     evaluations of a run
#   PROMPT="Three years later,"                           what it goes on from
SEEDS=${SEEDS:-1} SUFFIX=${SUFFIX-_gpu} STEPS=${STEPS:-1159} THIN=${THIN:-10} TIME=${TIME:-0}
SAVE_EVERY=${SAVE_EVERY:-1000} TEXT=${TEXT:-} VAL=${VAL:-} BATCH=${BATCH:-320}
CONTEXT=${CONTEXT:-256} LR=${LR:-5e-4} LR_MIN=${LR_MIN:-5e-5} EVALS=${EVALS:-10}
PROMPT=${PROMPT:-Three years later,} checks=()
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [ -z "$TEXT" ] && [ -z "$DRAW_ONLY" ]; then
    echo "skipped: $FIGURE: give TEXT=FILE" && exit 0
fi
about=$FIGURES/data/$FIGURE-text.txt # what the text of the data there is called
[ -n "$DRAW_ONLY" ] || [ ! -e "$about" ] || [ "$(cat "$about")" = "${TEXT##*/}" ] || {
    echo "error: $about: its data are of $(cat "$about"), not ${TEXT##*/}; give FIGURES=DIR, or" \
        "remove them" >&2 && exit 3
}
readable TEXT "$TEXT" && readable VAL "$VAL"
number TIME "$TIME" 0 && number EVALS "$EVALS" 1 && number BATCH "$BATCH" 1
spoken=$(LC_ALL=C && echo ${#PROMPT}) # bytes, which are tokens
number CONTEXT "$CONTEXT" "$spoken" && number CHANNELS "$CHANNELS" 1 && number LAYERS "$LAYERS" 1

# shape_of NAME: trainer, shape = its trainer and options, of about LAYERS blocks of 12 C^2 weights;
# reach = how many tokens it may read: those it was trained at, or twice as many where it learns no
# positions. Heads have 64 channels (MetaLA's 128, GateLoop's one) or there is one. The quadratic
# CausalRN is fast for H to 384: it has H = C in four times as many layers.
shape_of() {
    local C=$CHANNELS L=$LAYERS glu=$(((8 * CHANNELS / 3 + 4) / 8 * 8))
    local heads=$((CHANNELS % 64 ? 1 : CHANNELS / 64)) wide=$((CHANNELS % 128 ? 1 : CHANNELS / 128))
    reach=$((2 * CONTEXT))
    case $1 in
    gpt2 | transformer | linear-transformer)
        trainer=gpt2 reach=$CONTEXT
        shape=(--model "$1" --layers "$L" --heads "$heads")
        ;;
    linear-causalrn)
        trainer=causalrn reach=$CONTEXT
        shape=(--model linear --layers "$L" --hidden $((4 * C)))
        ;;
    causalrn)
        trainer=causalrn reach=$CONTEXT
        shape=(--model quadratic --layers $((4 * L)) --hidden "$C")
        ;;
    deltanet)
        trainer=deltanet
        shape=(--layers "$L" --heads "$heads" --hidden "$glu" --eigenvalues nonneg)
        ;;
    gateloop)
        trainer=gateloop
        shape=(--layers "$L" --hidden $((5 * C / 2)))
        ;;
    metala)
        trainer=metala
        shape=(--layers "$L" --heads "$wide" --hidden "$glu" --conv 2)
        ;;
    mamba) # a layer has 6.25 C^2 + 110 C weights
        trainer=mamba
        shape=(--layers $(((1200 * C * L + 313 * C + 5500) / (625 * C + 11000)))
            --eigenvalues nonneg)
        ;;
    esac
    trainer=./train_$trainer$SUFFIX
    shape+=(--channels "$C" --task text --vocab bytes --held-out 0.05 --text "$TEXT"
        --context "$CONTEXT" --batch-size "$BATCH" --weight-decay 0 --beta1 0.9 --beta2 0.999
        --adam-eps 1e-8 --grad-clip 1 --schedule cosine --lr "$LR" --lr-min "$LR_MIN")
    [ -z "$VAL" ] || shape+=(--val "$VAL")
}

# fit NAMES...: with TIME, STEPS = what the slowest of these models makes in it, if that is fewer.
fit() {
    local name ms slowest=0 file=$RUNS/$FIGURE/steps
    [ "$TIME" -gt 0 ] && [ -z "$DRAW_ONLY" ] || return 0
    for name in $([ -e "$file" ] || echo "$@"); do
        shape_of "$name"
        [ -x "$trainer" ] || continue
        merge "${shape[@]}" --steps 12 --warmup 0 --eval-batches 1 --save-every 0 $EXTRA
        "$trainer" "${options[@]}" --out "$work/fit-$name" >"$work/fit" 2>&1 ||
            { echo "FAILED: $name: $(grep -m 1 '^error' "$work/fit")" && exit 1; }
        ms=$(awk -F , '$2 == "train" { print $7 }' "$work/fit-$name/log.csv" | tail -n 8 | median)
        rm -rf "$work/fit-$name"
        echo "$name: $ms ms a step"
        slowest=$(awk "BEGIN { print ($ms > $slowest ? $ms : $slowest) }")
    done
    [ -e "$file" ] || awk "BEGIN { n = $slowest > 0 ? int(1000 * $TIME / $slowest) : $STEPS
        print (n < 1 ? 1 : n < $STEPS ? n : $STEPS) }" >"$file"
    STEPS=$(cat "$file")
    number "$file" "$STEPS" 1
    echo "$FIGURE: $STEPS steps a run, for TIME=$TIME"
}

# learn NAME: train it, and let it speak.
learn() {
    shape_of "$1"
    curve "$1" "$trainer" "${shape[@]}" --steps "$STEPS" --warmup $((STEPS * ${WARM:-200/1159})) \
        --eval-batches 0 --eval-every $((STEPS < EVALS ? 1 : STEPS / EVALS)) --temperature 0.7 \
        --sample $((reach + 1 - spoken)) --prompt "$PROMPT"
}

# said NAME: what it said after its first seed, also data/FIGURE-NAME-sample.txt.
said() {
    local file=$FIGURES/data/$FIGURE-$1-sample.txt from=$RUNS/$FIGURE/$1-seed${SEEDS%% *}
    [ -n "$DRAW_ONLY" ] || [ ! -e "$from/RESULT" ] ||
        LC_ALL=C sed -n '/^sample of /,/^RESULT /{/^RESULT /!p;}' "$from.txt" >"$file"
    [ ! -s "$file" ] || { echo "$1: $(cat "$file")" && echo; }
}

# equal NAMES...: whether those that were run have as many parameters, embeddings with them, to 3%.
equal() {
    local name n least=0 most=0
    for name; do
        n=$(kept "$name" parameters)
        [ -n "$n" ] || continue
        echo "RESULT model=$name parameters=$n"
        least=$((least == 0 || n < least ? n : least)) most=$((n > most ? n : most))
    done
    holds "parameters least=$least most=$most bound=1.03" "$least > 0 && $most <= 1.03 * $least"
}

# near NAME OTHER BOUND: whether its held-out loss is at most BOUND times the other's; nothing to
# say where one has not been run.
near() {
    local a b
    a=$(kept "$1" loss) b=$(kept "$2" loss)
    [ -z "$a" ] || [ -z "$b" ] || holds "loss $1=$a $2=$b bound=$3" "$a <= $3 * $b"
}

# text_finish: both pictures of what was added, held-out loss by steps and by seconds; the table of
# all runs; what was said; what must hold, as far as the functions in `checks` say; exit.
text_finish() {
    local name check
    found "$FIGURE"
    [ -n "$DRAW_ONLY" ] || echo "${TEXT##*/}" >"$about"
    name=$(cat "$about" 2>/dev/null || echo a text)
    args+=(--split val --group --title "Bytes of $name, equal numbers of parameters, C = $CHANNELS")
    args+=(--ylabel "Held-out loss (nats a byte)")
    python3 dev/plot.py "${args[@]}" --table || failed=$((failed + 1))
    python3 dev/plot.py "${args[@]}" --x seconds --out "$FIGURES/${FIGURE}_seconds.png" ||
        failed=$((failed + 1))
    for name in "${curves[@]}"; do said "$name"; done
    for check in "${checks[@]}"; do $check || failed=$((failed + 1)); done
    over
}
