#!/usr/bin/env bash
# common.sh: what the figures' scripts share. They source it after FIGURE, STEPS and THIN are set.
#
# A curve is a name, a trainer and its options, run once for each seed in $RUNS/$FIGURE/CURVE-seedN.
# A run that ended has a file RESULT there: its command, and what came of it. It is not run again;
# a run that was interrupted goes on from its checkpoint. So a script may be stopped and started at
# will; remove the directory to have a run made anew. Each run's log, thinned, is what is drawn.
#
# From the environment:
#   TRAINER=./train_causalrn_gpu  GPT2=./train_gpt2_gpu    a trainer that is not built is skipped
#   SEEDS="1 2 3"  STEPS=N        EXTRA="options"          more options for every run
#   RUNS=runs/figures             FIGURES=dev/figures      where runs, and pictures and data/, go
#   DRAW_ONLY=1                   no runs: draw what is in $FIGURES/data
# On the CPU, tiny: TRAINER=./train_causalrn SEEDS=1 STEPS=20 RUNS=/tmp/runs FIGURES=/tmp/figures
#   EXTRA="--layers 1 --channels 16 --batch-size 4"
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
: "${TRAINER:=./train_causalrn_gpu}" "${GPT2:=./train_gpt2_gpu}" "${SEEDS:=1 2 3}" "${EXTRA:=}"
: "${RUNS:=runs/figures}" "${FIGURES:=dev/figures}" "${DRAW_ONLY:=}"
number() { # NAME VALUE: die unless the value is a whole number from 0 on
    case $2 in
    "" | *[!0-9]*) echo "error: $1: expected a whole number, got \"$2\"" >&2 && exit 2 ;;
    esac
}
for seed in $SEEDS; do number SEEDS "$seed"; done
number STEPS "$STEPS" && number THIN "$THIN" && number S "${S:-1}"
failed=0 files=() labels=() panels=()
mkdir -p "$FIGURES/data" "$RUNS/$FIGURE" || exit 3

# train DIR COMMAND...: take one run to its end. 0: it ended, or stopped over a number that is not
# finite, which is a result too.
train() {
    local dir=$1 go=() code
    shift
    if [ -e "$dir/RESULT" ]; then
        if [ "$(head -n 1 "$dir/RESULT")" = "$*" ]; then
            echo "done before: $dir"
            return 0
        fi
        echo "error: $dir: is the run of another command; give RUNS=DIR, or remove it"
        return 3
    fi
    if [ -e "$dir/checkpoint.safetensors" ]; then
        go=(--resume)
    elif [ -e "$dir/log.csv" ]; then
        go=(--force) # interrupted before its first checkpoint: nothing to keep
    fi
    echo "\$ $* --out $dir ${go[*]-}"
    "$@" --save-every 200 --print-every 200 --out "$dir" ${go[@]+"${go[@]}"} 2>&1 |
        tee "$dir.txt" | grep --line-buffered -E "^(step|RESULT|error|hint)"
    code=${PIPESTATUS[0]}
    [ "$code" -ne 130 ] || exit 130 # Ctrl-C
    if [ "$code" -eq 1 ] && grep -q "no weight was changed" "$dir.txt"; then
        code=0
    fi
    if [ "$code" -eq 0 ]; then
        { echo "$*"; grep -E "^(RESULT|error:)" "$dir.txt" | tail -n 1; } >"$dir/RESULT"
        rm -f "$dir/checkpoint.safetensors" # 20 MB a run, for which a figure has no use
        return 0
    fi
    echo "FAILED: $dir: the trainer ended with $code"
    return 1
}

# curve NAME TRAINER OPTIONS...: train it with every seed and copy the logs, thinned, to data/.
curve() {
    local name=$1 trainer=$2 dir seed
    shift 2
    if [ -n "$DRAW_ONLY" ]; then
        return
    fi
    if [ ! -x "$trainer" ]; then
        echo "skipped: $name: $trainer is not built"
        return
    fi
    for seed in $SEEDS; do
        dir=$RUNS/$FIGURE/$name-seed$seed
        # EXTRA is a list of words
        if train "$dir" "$trainer" "$@" --seed "$seed" $EXTRA; then
            python3 dev/plot.py "$dir" --thin "$THIN" \
                --out "$FIGURES/data/$FIGURE-$name-seed$seed.csv" >"$dir.txt.thin" ||
                failed=$((failed + 1))
            rm -f "$dir.txt.thin"
        else
            failed=$((failed + 1))
        fi
    done
}

# add LABEL CURVE [PANEL]: have the curve's data drawn, all its seeds.
add() {
    local file
    for file in "$FIGURES/data/$FIGURE-$2-seed"*.csv; do
        if [ -e "$file" ]; then
            files+=("$file") labels+=("$1") panels+=("${3-}")
        fi
    done
}

# finish OPTIONS...: draw what was added, as plot.py's options say; the table of all runs; exit.
finish() {
    local all=("$FIGURES/data/$FIGURE-"*-seed*.csv) names=() file
    if [ ! -e "${all[0]}" ]; then
        echo "$FIGURE: no data, nothing to draw"
        exit 1
    fi
    python3 dev/plot.py "${files[@]}" --label "${labels[@]}" --out "$FIGURES/$FIGURE.png" --svg \
        --optional "$@" || failed=$((failed + 1))
    for file in "${all[@]}"; do
        file=${file##*/"$FIGURE"-}
        names+=("${file%-seed*}")
    done
    python3 dev/plot.py "${all[@]}" --label "${names[@]}" --table
    echo "$FIGURE: $failed failed"
    [ "$failed" -eq 0 ]
    exit
}
