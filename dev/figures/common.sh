#!/usr/bin/env bash
# common.sh: what the figures' scripts share. They source it after FIGURE, STEPS and THIN are set.
#
# A curve is a name, a trainer and its options, run once for each seed in $RUNS/$FIGURE/CURVE-seedN.
# A run that ended has a file RESULT there: its command, and what came of it. It is not run again;
# a run that was interrupted goes on from its checkpoint. So a script may be stopped and started at
# will; remove the directory to have a run made anew. Each run's log, thinned, is what is drawn; the
# RESULT stands above it, and the number of parameters.
#
# A script that sets LENGTHS, options, has each run evaluated once more at its end with them: the
# accuracy by length, with the run's RESULT above it, is data/lengths-FIGURE-CURVE-seedN.csv. A
# trainer that lacks the task, or, where LENGTHS names lengths, evaluates only at those it trains
# at, is skipped.
#
# A script that sets DUMP, options, has the trainer DUMPER (the CPU's: a run may move to it) write
# a dump with the weights of each run's end: dump.safetensors in the run's directory.
#
# From the environment:
#   TRAINER=./train_causalrn_gpu  GPT2=./train_gpt2_gpu    a trainer that is not built is skipped
#   SEEDS="1 2 3"  STEPS=N        EXTRA="options"          more options for every run
#   RUNS=runs/figures             FIGURES=dev/figures      where runs, and pictures and data/, go
#   ONLY="curve ..."              these curves' runs; all that have data are drawn
#   DRAW_ONLY=1                   no runs: draw what is in $FIGURES/data
#   JOBS=1                        runs at once, in turn on the GPUs of CUDA_VISIBLE_DEVICES, or all
#   SAVE_EVERY=200                steps between a run's checkpoints
# On the CPU, tiny: TRAINER=./train_causalrn SEEDS=1 STEPS=20 RUNS=/tmp/runs FIGURES=/tmp/figures
#   EXTRA="--layers 1 --channels 16 --batch-size 4"
set -u
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 3
: "${TRAINER:=./train_causalrn_gpu}" "${GPT2:=./train_gpt2_gpu}" "${SEEDS:=1 2 3}" "${EXTRA:=}"
: "${RUNS:=runs/figures}" "${FIGURES:=dev/figures}" "${DRAW_ONLY:=}" "${LENGTHS:=}"
: "${JOBS:=1}" "${SAVE_EVERY:=200}" "${ONLY:=}" "${DUMP:=}" "${DUMPER:=}"
number() { # NAME VALUE [LEAST]: die unless the value is a whole number, and LEAST to 999999999
    case $2 in
    "" | *[!0-9]* | 0?*) echo "error: $1: expected a whole number, got \"$2\"" >&2 && exit 2 ;;
    esac
    [ $# -lt 3 ] || { [ ${#2} -le 9 ] && [ "$2" -ge "$3" ]; } ||
        { echo "error: $1: expected $3 to 999999999, got $2" >&2 && exit 2; }
}
once() { # NAME WORDS...: die over a word that is given twice: its runs would share a directory
    local twice
    twice=$(printf '%s\n' "${@:2}" | sort | uniq -d)
    [ -z "$twice" ] ||
        { echo "error: $1: expected each word once, got \"${*:2}\"" >&2 && exit 2; }
}
readable() { # NAME FILE: die unless the file, if one is named, can be read
    [ -z "$2" ] || { [ -f "$2" ] && [ -r "$2" ]; } ||
        { echo "error: $1: expected a file that can be read, got \"$2\"" >&2 && exit 3; }
}
for seed in $SEEDS; do number SEEDS "$seed"; done
once SEEDS $SEEDS
number STEPS "$STEPS" 1 && number THIN "$THIN" 1 && number S "${S:-1}"
number SAVE_EVERY "$SAVE_EVERY" 1
[[ $JOBS =~ ^[1-9][0-9]{0,2}$ ]] ||
    { echo "error: JOBS: expected 1 to 999, got \"$JOBS\"" >&2 && exit 2; }
failed=0 labels=() curves=() panels_of=()
for dir in "$FIGURES/data" "$RUNS/$FIGURE"; do
    mkdir -p "$dir" 2>/dev/null ||
        { echo "error: FIGURES, RUNS: cannot make the directory $dir" >&2 && exit 3; }
done

# A slot for each job: a line in a pipe, taken by who runs and put back at the end. Of jobs beside
# each other, each is a process group, to which Ctrl-C is passed on.
work=$(mktemp -d 2>/dev/null) ||
    { echo "error: TMPDIR: cannot make a directory in ${TMPDIR:-/tmp}" >&2 && exit 3; }
trap 'rm -rf "$work"' EXIT
mkfifo "$work/slots" && exec 3<>"$work/slots" || exit 3
for ((slot = 0; slot < JOBS; slot++)); do echo $slot >&3; done
gpus=(${CUDA_VISIBLE_DEVICES-})
gpus=(${gpus[*]//,/ })
[ ${#gpus[@]} -gt 0 ] ||
    gpus=($(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+$'))
if [ "$JOBS" -gt 1 ]; then # the runs share the cores: of too many threads most would wait
    export OMP_NUM_THREADS=$((($(nproc) + JOBS - 1) / JOBS))
    set -m
    trap 'touch "$work/stop"; for job in $(jobs -p); do kill -INT -- -$job; done' INT TERM
fi

# ended: wait for all jobs; count those that failed; exit if Ctrl-C was pressed.
ended() {
    wait
    [ ! -e "$work/stop" ] || exit 130
    [ ! -e "$work/failed" ] || failed=$((failed + $(wc -l <"$work/failed")))
    rm -f "$work/failed"
}

# job COMMAND...: run it, with JOBS above 1 beside others as soon as a slot is free.
job() {
    local slot
    read -r slot <&3
    [ ! -e "$work/stop" ] || ended
    if [ "$JOBS" -gt 1 ]; then
        in_slot "$slot" "$@" &
    else
        (in_slot "$slot" "$@")
        ended
    fi
}

# in_slot SLOT COMMAND...: run it on the slot's GPU, in a subshell; put the slot back.
in_slot() {
    local slot=$1
    shift
    trap 'echo "$slot" >&3' EXIT
    trap - INT TERM
    [ ${#gpus[@]} -eq 0 ] || export CUDA_VISIBLE_DEVICES=${gpus[slot % ${#gpus[@]}]}
    "$@" || echo "$*" >>"$work/failed"
}

# merge OPTIONS...: options = them, --NAME VALUE each; of one that is given twice the last value.
merge() {
    local i
    options=()
    while [ $# -gt 0 ]; do
        case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
        for ((i = 0; i < ${#options[@]}; i += 2)); do
            [ "${options[i]}" != "$1" ] || break
        done
        options[i]=$1 options[i + 1]=${2-}
        shift $(($# > 1 ? 2 : 1))
    done
}

# train DIR COMMAND...: take one run to its end. 0: it ended, or stopped over a number that is not
# finite, which is a result too.
train() {
    local dir=$1 go=() code options
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
    "$@" --save-every "$SAVE_EVERY" --print-every "$SAVE_EVERY" --out "$dir" \
        ${go[@]+"${go[@]}"} 2>&1 | (
        trap '' INT # Ctrl-C is the trainer's, which says more before it ends
        tee "$dir.txt" | grep --line-buffered -E "^(step|RESULT|error|hint)"
    )
    code=${PIPESTATUS[0]}
    [ "$code" -ne 130 ] || { touch "$work/stop" && exit 130; } # Ctrl-C
    if [ "$code" -eq 1 ] && grep -q "no weight was changed" "$dir.txt"; then
        code=0
    elif [ "$code" -eq 0 ] && [ -n "$LENGTHS" ]; then # words, not one
        merge "${@:2}" $LENGTHS --steps 0 --warmup 0 --load "$dir/checkpoint.safetensors" \
            --curve "$dir/lengths.csv"
        "$1" "${options[@]}" >"$dir.txt.lengths" 2>&1
        code=$?
    fi
    if [ "$code" -eq 0 ] && [ -n "$DUMP" ]; then
        merge "${@:2}" $DUMP --steps 0 --warmup 0 --load "$dir/checkpoint.safetensors" \
            --dump "$dir/dump.safetensors"
        "$DUMPER" "${options[@]}" >"$dir.txt.dump" 2>&1
        code=$?
        [ "$code" -eq 0 ] || grep -E "^(error|hint)" "$dir.txt.dump"
    fi
    if [ "$code" -eq 0 ]; then
        { echo "$*"; grep -E "^(RESULT|error:)" "$dir.txt" | tail -n 1; } >"$dir/RESULT"
        rm -f "$dir/checkpoint.safetensors" # 20 MB a run, for which a figure has no use
        return 0
    fi
    echo "FAILED: $dir: the trainer ended with $code"
    return 1
}

# parameters DIR: how many the run has, embeddings with them, as its trainer says.
parameters() {
    awk '/ parameters / { for (i = 2; i <= NF; i++) {
        if ($i == "parameters") n += $(i - 1)
        if ($i == "embeddings,") n += $(i - 2) }
        print n; exit }' "$1.txt"
}

# run NAME SEED TRAINER OPTIONS...: one run, and its data: RESULT, parameters, the thinned log.
run() {
    local name=$1-seed$2 seed=$2 trainer=$3 dir=$RUNS/$FIGURE/$1-seed$2 options
    shift 3
    merge "$@" --seed "$seed" $EXTRA # a list of words
    train "$dir" "$trainer" "${options[@]}" || return 1
    python3 dev/plot.py "$dir" --thin "$THIN" --out "$dir.txt.thin" >"$dir.txt.thinned" || return 1
    {
        sed -n 's/^RESULT/# &/p' "$dir/RESULT"
        parameters "$dir" | sed 's/^/# parameters=/'
        cat "$dir.txt.thin"
    } >"$FIGURES/data/$FIGURE-$name.csv"
    rm -f "$dir.txt.thin" "$dir.txt.thinned"
    if [ -e "$dir/lengths.csv" ]; then
        { sed 's/^/# /' "$dir/RESULT" && cat "$dir/lengths.csv"; } \
            >"$FIGURES/data/lengths-$FIGURE-$name.csv"
    elif [ -n "$LENGTHS" ]; then
        echo "left out: $name: $(tail -n 1 "$dir/RESULT")"
    fi
}

# offers NAME TRAINER OPTIONS...: whether the trainer has the task and evaluates it at LENGTHS.
offers() {
    local name=$1 trained reached options
    shift
    merge "${@:2}" $EXTRA $LENGTHS --steps 0 --warmup 0 --eval-batches 20 --curve "$work/curve"
    if ! "$1" "${options[@]}" >"$work/offers" 2>&1; then
        echo "skipped: $name: $1: $(grep -m 1 -E "^error" "$work/offers")"
        return 1
    fi
    [[ $LENGTHS == *-length* ]] || return 0
    trained=$(sed -nE 's/^RESULT .* max_length=([0-9]+) .*/\1/p' "$work/offers")
    reached=$(tail -n 1 "$work/curve" | cut -d , -f 1)
    [ "$reached" -gt "$trained" ] && return
    echo "skipped: $name: $1 evaluates only at the lengths it trains at, to $trained"
    return 1
}

# curve NAME TRAINER OPTIONS...: train it with every seed and copy the logs, thinned, to data/.
curve() {
    local name=$1 trainer=$2 seed
    if [ -n "$DRAW_ONLY" ] || [[ -n $ONLY && " $ONLY " != *" $name "* ]]; then
        return
    fi
    if [ ! -x "$trainer" ]; then
        echo "skipped: $name: $trainer is not built"
        return
    fi
    if [ -n "$DUMP" ] && [ ! -x "$DUMPER" ]; then # before the run, not after it
        echo "skipped: $name: $DUMPER, which writes its dump, is not built: make cpu"
        return
    fi
    if [ -n "$LENGTHS" ]; then
        offers "$@" || return
    fi
    shift
    for seed in $SEEDS; do
        job run "$name" "$seed" "$@"
    done
}

# scaled CURVE SEED: of its evaluation at its end, from data/lengths-*; nothing without data.
scaled() {
    sed -nE 's/^# RESULT .* scaled=(-?[0-9.]+) .*/\1/p' \
        "$FIGURES/data/lengths-$FIGURE-$1-seed$2.csv" 2>/dev/null
}

# refill TABLE NEW: of a table's rows, those whose first field the table NEW has become NEW's, the
# others stay; dies where the headers differ. Both begin with a header.
refill() {
    [ ! -e "$1" ] || [ "$(head -n 1 "$1")" = "$(head -n 1 "$2")" ] || {
        echo "error: $1: is of another size: $(head -n 1 "$1"); give FIGURES=DIR, or remove it" >&2
        exit 3
    }
    awk -F , 'FNR == 1 { file++; if (file == 1) print; next }
        file == 1 { if (!($1 in new)) order[++n] = $1; new[$1] = new[$1] $0 "\n"; next }
        !($1 in new) { print; next }
        !said[$1]++ { printf "%s", new[$1] }
        END { for (i = 1; i <= n; i++) if (!said[order[i]]) printf "%s", new[order[i]] }' \
        "$2" "$([ -e "$1" ] && echo "$1" || echo "$2")" >"$work/refilled" &&
        cp "$work/refilled" "$1"
}

# median: of the numbers on stdin; nothing of none.
median() {
    sort -g | awk '{ x[NR] = $1 }
        END { if (NR) printf "%.9g\n", (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 }'
}

# kept CURVE FIELD: the median over seeds of what its data have as FIELD=VALUE above the log.
kept() {
    sed -nE "s/^# (RESULT .* )?$2=(-?[0-9.]+)( .*)?\$/\\2/p" "$FIGURES/data/$FIGURE-$1-seed"*.csv \
        2>/dev/null | median
}

# holds WHAT CONDITION: print whether it does, awk's word; 1 if it does not.
holds() {
    awk "BEGIN { ok = $2; print \"RESULT must_hold=$1\", ok ? \"ok\" : \"FAILED\"; exit !ok }"
}

# first N WORDS...: the first N of them.
first() { echo "${@:2:$1}"; }

# add LABEL CURVE [PANEL]: have the curve's data drawn, all its seeds.
add() { labels+=("$1") curves+=("$2") panels_of+=("${3-}"); }

# found PREFIX: wait for the runs; args = plot.py's files and labels for what was added, of the data
# PREFIX-*, panels = theirs; exits without any.
found() {
    local i file names=()
    ended
    args=() panels=()
    for i in "${!curves[@]}"; do
        for file in "$FIGURES/data/$1-${curves[i]}-seed"*.csv; do
            [ -e "$file" ] || continue
            args+=("$file") names+=("${labels[i]}") panels+=("${panels_of[i]}")
        done
    done
    if [ ${#args[@]} -eq 0 ]; then
        echo "$FIGURE: no data, nothing to draw"
        exit 1
    fi
    args+=(--label "${names[@]}" --out "$FIGURES/$FIGURE.png" --svg --optional)
    [ -z "${panels[0]}" ] || args+=(--panel "${panels[@]}")
}

# finish OPTIONS...: draw what was added, as plot.py's options say; the table of all runs; exit.
finish() {
    local all names=() file
    found "$FIGURE"
    python3 dev/plot.py "${args[@]}" "$@" || failed=$((failed + 1))
    all=("$FIGURES/data/$FIGURE-"*-seed*.csv)
    for file in "${all[@]}"; do
        file=${file##*/"$FIGURE"-}
        names+=("${file%-seed*}")
    done
    python3 dev/plot.py "${all[@]}" --label "${names[@]}" --table
    over
}

# finish_lengths OPTIONS...: draw the accuracy by length of what was added; print the table of
# scores and write it to data/FIGURE.tsv; exit.
finish_lengths() {
    found "lengths-$FIGURE"
    python3 dev/plot.py "${args[@]}" --group --x tokens --y acc --table \
        --tsv "$FIGURES/data/$FIGURE.tsv" "$@" || failed=$((failed + 1))
    over
}

over() {
    echo "$FIGURE: $failed failed"
    [ "$failed" -eq 0 ]
    exit
}
