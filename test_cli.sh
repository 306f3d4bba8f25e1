#!/usr/bin/env bash
# test_cli.sh: a trainer as its users meet it: options, files, signals, full disks, kills.
#
#     ./test_cli.sh                                            # ./train_causalrn, build/diff
#     TRAIN=./train_gpt2 DIFF=build/diff ./test_cli.sh         # what depends on the model
#     TRAIN=build/other ARCH=causalrn ./test_cli.sh            # another build of it
#
# Prints a line for every check that fails (what, expected, got) or is skipped, and at the end
# `N passed, N failed`; exit code 1 if any failed. Works in a temporary directory, removed at the
# end. The numbers in comments are those of our list of failures that users of such programs report.
set -u
export LC_ALL=C OMP_NUM_THREADS=1 # a machine that others use as well makes more threads slow

absolute() { echo "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"; }
train=$(absolute "${TRAIN:-./train_causalrn}")
compare=$(absolute "${DIFF:-build/diff}")
for binary in "$train" "$compare"; do
    [ -x "$binary" ] || { echo "error: $binary: expected a program; build it first"; exit 3; }
done
arch=${ARCH:-$(basename "$train")} && arch=${arch#train_}
here=$PWD
tmp=$(mktemp -d) && mkdir "$tmp/work" && cd "$tmp/work" || exit 3
trap 'kill -9 $(jobs -p) 2>/dev/null; rm -rf "$tmp"' EXIT
limit=$(command -v timeout >/dev/null && echo "timeout -k 5 60")
RANDOM=1 # the kills come at the same times in every run
passed=0 failed=0

# What depends on the model: its default --model, another one (or the option that tells its kinds
# apart), its size beside --channels, presets, the option that makes copying its task, and those
# that make its presets small.
kind=model first= plain=
case $arch in
causalrn)
    model=quadratic other=linear size=hidden wrong="--hidden 9"
    presets="main copy-s16 copy-s32 copy-s64 copy-s128 copy-s256 state-expansion"
    ;;
gpt2)
    model=transformer other=linear-transformer size=heads wrong="--channels 16"
    presets="main copy-s16 copy-s32 copy-s64 copy-s128 copy-s256"
    presets="$presets shakespeare gpt2 gpt2-medium gpt2-large gpt2-xl"
    ;;
deltanet)
    model=signed other=nonneg kind=eigenvalues size=heads wrong="--channels 16"
    first="--task copying"
    presets="main parity modular brackets s5-swaps s5-triples s5 s5-tokens z60"
    ;;
gateloop)
    model=sep other=fixed kind=transition size=hidden wrong="--hidden 9"
    first="--task copying"
    presets="main horizon recall shakespeare wikitext103" plain="--head-size 1 --gn-groups 0"
    ;;
mamba)
    model=signed other=nonneg kind=eigenvalues size=hidden wrong="--hidden 9"
    first="--task copying"
    presets="main parity modular brackets s5-swaps z60"
    ;;
metala)
    model=tied other=free kind=key size=hidden wrong="--hidden 9"
    first="--task copying"
    presets="main mqar mqar-80"
    ;;
*)
    echo "error: $arch: expected causalrn, gpt2, deltanet, gateloop, metala or mamba; give ARCH"
    exit 2
    ;;
esac

# A model that takes no time, and one whose checkpoint is large enough to be cut.
shape="--layers 1 --channels 8 --$size 8 --batch-size 2 --string-size 2"
small="--schedule constant $shape --warmup 3"
wide="--layers 1 --channels 24 --$size 24 --batch-size 4 --string-size 4 --warmup 3"
medium="--schedule constant $wide"

# but OPTION VALUE ...: $small with these instead of its own; an option may not be given twice.
but() {
    local word base=" $small"
    for word in "$@"; do base=$(echo "$base" | sed -E "s/ $word [^ ]+//"); done
    echo "$base" "$@"
}

# has_positions: whether the model learns positions and may be bidirectional.
has_positions() { [ $arch = causalrn ] || [ $arch = gpt2 ]; }

# ---- checks

# good: count a check that passed; bad WHAT EXPECTED GOT: one that failed; skip WHAT WHY: neither.
good() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "FAIL $1: expected $2, got $3"; }
skip() { echo "SKIP $1: $2"; }

# is WHAT EXPECTED GOT: the two texts are equal; of long ones the first lines that differ are shown.
is() {
    if [ "$2" = "$3" ]; then
        good
    elif [ ${#2} -lt 200 ] && [ ${#3} -lt 200 ]; then
        bad "$1" "$2" "$3"
    else
        bad "$1" "the same text" "$(diff <(echo "$2") <(echo "$3") | head -6)"
    fi
}

# has WHAT PATTERN FILE: a line of the file matches the extended regular expression.
has() {
    if grep -aqE -e "$2" "$3"; then good; else bad "$1" "a line like $2" "$(head -c 600 "$3")"; fi
}

# same WHAT FILE FILE: the files are bit for bit the same.
same() { if cmp -s "$2" "$3"; then good; else bad "$1" "$2 = $3" "$(cmp "$2" "$3" 2>&1)"; fi; }

# run ARGS: the trainer, copying unless they name a task; $code, and $tmp/out, $tmp/err with what it
# printed.
run() {
    [[ " $* " == *" --task"* ]] || set -- $first "$@"
    $limit "$train" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    code=$?
}

# works ARGS: exit code 0, no complaint, a RESULT line (or that of a dump).
works() {
    run "$@"
    if [ $code = 0 ] && [ ! -s "$tmp/err" ] && grep -qE "^(RESULT|dump:) " "$tmp/out"; then
        good
    else
        bad "$*" "exit code 0 and RESULT" "exit code $code, $(head -c 400 "$tmp/err")"
    fi
}

# sums: a line for every file and directory here, with checksum and size of the files.
sums() { find . \( -type d -print -o -type f -exec cksum {} + \) | sort; }

# clean WHAT CODE PATTERN: what `run` left is one line `error: ...` that matches the pattern, then
# at most one line `hint: ...`, and this exit code.
clean() {
    local error= hint= more=
    { IFS= read -r error || error=; IFS= read -r hint; read -r -d '' more; } <"$tmp/err"
    if [ $code = "$2" ] && [[ $error == "error: "* && $error =~ $3 ]] &&
        [[ -z $hint || $hint == "hint: "* ]] && [ -z "$more" ]; then
        good
    else
        bad "$1" "exit code $2 and an error like $3" "exit code $code, $(head -c 600 "$tmp/err")"
    fi
}

# refused CODE PATTERN ARGS: fails cleanly before step 0, and no file here is made or changed.
refused() {
    local want=$1 pattern=$2 before
    shift 2
    before=$(sums)
    run "$@"
    clean "$*" "$want" "$pattern"
    is "files after $*" "$before" "$(sums)"
    if grep -q "^step " "$tmp/out"; then bad "$*" "an end before step 0" "$(cat "$tmp/out")"; fi
}

# rows LOG: the columns of log.csv that a resumed run shares with an unbroken one.
rows() { grep -v "^#" "$1" | cut -d, -f1-6; }

# same_run WHAT DIR DIR: two runs ended in the same bits: checkpoints, and logs but for the times.
same_run() {
    same "$1" "$2/checkpoint.safetensors" "$3/checkpoint.safetensors"
    is "$1, log.csv" "$(rows "$2/log.csv")" "$(rows "$3/log.csv")"
}

# saved_step DIR: the step of its checkpoint.
saved_step() {
    head -c 8192 "$1/checkpoint.safetensors" | grep -aoE '"step":"[0-9]+"' | grep -oE '[0-9]+'
}

# wait_for FILE: until it exists, at most 20 seconds.
wait_for() { for _ in $(seq 1000); do [ -e "$1" ] && return; sleep 0.02; done; }

# ends PID: wait until it does, at most 20 seconds; $code is its exit code.
ends() {
    for _ in $(seq 1000); do
        kill -0 "$1" || break
        sleep 0.02
    done
    kill -9 "$1"
    wait "$1"
    code=$?
} 2>/dev/null # bash reports a killed child when it hears of it

# tensors FILE: a line `name dtype shape` for every tensor of a safetensors file, sorted.
tensors() {
    tail -c +9 "$1" | head -c "$(od -An -tu8 -N8 "$1" | tr -d ' ')" |
        grep -oE '"[^"]*":\{"dtype":"[^"]*","shape":\[[0-9,]*\]' |
        sed -E 's/^"([^"]*)":\{"dtype":"([^"]*)","shape":\[(.*)\]$/\1 \2 \3/' | sort
}

# ---- options

# --help exits 0 and shows every preset; every preset it shows works.
test_help() {
    local preset
    run --help
    is "--help" 0 $code
    is "--help, standard error" "" "$(cat "$tmp/err")"
    cp "$tmp/out" "$tmp/help"
    for preset in $presets; do
        has "--help" "^  $preset +[^ ]" "$tmp/help"
    done
    for preset in $(sed -n '/^Presets/,$p' "$tmp/help" | grep -oE '^  [a-z0-9-]+'); do
        works --preset "$preset" --task copying $small $plain --steps 0
    done
}

# alone OPTION [VALUE]: valid with the defaults of all others, but those that make a run short.
alone() {
    local base args=("$@")
    tried="$tried ${1#--}"
    for base in --steps=1 --batch-size=1 --string-size=2 --out=alone$((++alone_count)); do
        [[ $base == --string-size* && $* == *" --task "* ]] && continue
        [[ $1 == "${base%%=*}" || $1 == --out ]] && [[ $base == "$1="* ]] || args+=("$base")
    done
    works "${args[@]}"
}

# Every option, alone (D06); `tried` must name every one that --help shows.
test_every_option() {
    local tried="help resume init-from" alone_count=0 option own
    local of_text="--task text --text numbers" of_bits="--task parity --eval-max-length 40"
    seq 400 >numbers
    case $arch in # --init-from: test_published and test_gpt2.c
    causalrn) own=("model linear" "prenorm approx" "prenorm none" "postnorm no" "activation relu"
        "activation elu" "activation gelu" "channels 7" "hidden 5" "causal yes") ;;
    gpt2) own=("model gpt2" "model linear-transformer" "channels 6" "heads 4" "causal yes") ;;
    deltanet) own=("eigenvalues nonneg" "conv no" "qk-silu yes" "channels 8" "heads 2"
        "hidden 5") ;;
    gateloop) own=("transition cart" "transition ones" "wiring paper" "head-size 4" "gn-groups 4"
        "proj-bias no" "head-bias no" "transition-lr 0.5" "channels 7" "hidden 0") ;;
    mamba) own=("eigenvalues nonneg" "channels 7" "hidden 5" "state 3" "rank 2" "window 1") ;;
    metala) own=("key free" "conv 0" "conv 4" "augment no" "scale no" "tau 1" "channels 8"
        "key-channels 6" "heads 4" "hidden 0") ;;
    esac
    works --batch-size 1 --string-size 2 --schedule constant --steps 1 --out every
    for option in "${own[@]}" "task copying" "string-size 5" \
        "layers 3" "batch-size 3" "accumulate 2" "steps 2" "lr 1e-4" "warmup 0" \
        "schedule cosine" "lr-min 1e-5" "grad-clip 0" "weight-decay 0.1" "beta1 0" "beta2 0.99" \
        "adam-eps 1e-6" "stop-at 0.5" "embed-std 0.1" "seed 0" "threads 2" "eval-every 1" \
        "save-every 1" "print-every 1" "out elsewhere" "force" \
        "load every/checkpoint.safetensors" "dump d" "preset main" "vocab ascii $of_text" \
        "context 7 $of_text" "held-out 0.2 $of_text" \
        "eval-batches 2" "sample 3" "temperature 0" "top-k 2" "min-length 4 $of_bits" \
        "max-length 99 $of_bits" "eval-min-length 5 $of_bits" \
        "eval-max-length 40 --task parity" "multiply no --task brackets --eval-max-length 40" \
        "elements swaps --task s5 --eval-max-length 9" \
        "tokens-per-element 2 --task s5 --eval-max-length 9" "modulus 3 --task horizon" \
        "resets 0 --task horizon" "pairs 3 --task mqar" "vocab-size 30 --task fuzzy" \
        "noise 0 --task noisy" "copies 3 --task selective" "examples 5 --task mqar" \
        "eval-depth 0.5 --task needle --eval-max-length 99"; do
        alone --${option%% *} $([[ $option == *" "* ]] && echo "${option#* }")
    done
    # with others: test_text, test_images, test_state_tasks
    tried="$tried text val tokenizer prompt images patch curve"
    works --batch-size 1 --string-size 2 --schedule constant --steps 2 --out every --resume
    for option in $(grep -oE '^  --[a-z0-9-]+' "$tmp/help" | tr -d ' '); do
        case " $tried " in
        *" ${option#--} "*) good ;;
        *) bad "test_every_option" "a try of $option" "none" ;;
        esac
    done
    works $small --steps 1
    is "the default directory" "runs/copying-$model-001" "$(ls -d runs/*)"
}

# What makes no sense is refused with its reason; what is mistyped, with the option and the value.
test_refused_options() {
    if [ $arch = causalrn ]; then
        refused 2 "--activation.*exp" $small --model linear --activation relu
        refused 2 "--prenorm.*factor" $small --model linear --prenorm exact
        refused 2 "--hidden 1201.*1200" $(but --hidden 1201 --prenorm approx)
        works $(but --hidden 1200 --prenorm approx --steps 0)
    fi
    if [ $arch = gateloop ]; then
        refused 2 "--channels 8: expected a multiple of --head-size 3" $small --head-size 3
        refused 2 "--gn-groups 4: expected equal groups" $small --gn-groups 4
    fi
    [ $arch = mamba ] && refused 2 "--rank 9: expected at most the 8 channels" $small --rank 9
    if [ $arch = metala ]; then
        refused 2 "--channels 8: expected a multiple of --heads 3" $small --heads 3
        refused 2 "--key-channels 5: expected a multiple of --heads 2" $small --key-channels 5
    fi
    has_positions && refused 2 "--causal no.*targets" $small --causal no
    refused 2 "--dump and --accumulate 2" $small --steps 0 --accumulate 2 --dump d
    refused 2 "--accumulate.*got 0" --accumulate 0
    refused 2 "--resume.*--force" $small --out x --resume --force
    refused 2 "--resume.*--load" $small --out x --resume --load y
    refused 2 "--resume.*--out" $small --resume
    refused 2 "--lr-min" $small --lr 1e-4 --lr-min 1e-3
    refused 2 "--batch-size.*\"8x\"" --batch-size 8x
    refused 2 "--steps.*99999999999" --steps 99999999999
    refused 2 "--lr.*nan" --lr nan
    refused 2 "--lr.*1e400" --lr 1e400
    refused 2 "--lr.*-1" --lr -1
    refused 2 "--grad-clip.*-1" --grad-clip -1
    refused 2 "--batch-size.*got 0" --batch-size 0
    refused 2 "--layers.*got 0" --layers 0
    refused 2 "--channels.*got -1" --channels -1
    refused 2 "--seed.*-1" --seed -1
    refused 2 "--seed.*18446744073709551616" --seed 18446744073709551616
    refused 2 "--lr.*twice" --lr 1e-3 --lr 1e-3
    refused 2 "bogus" --bogus
    refused 2 "nearest is --seed" -seed 1
    refused 2 "nearest is --string-size" --sting-size 3
    refused 2 "\"word\"" word
    refused 2 "--lr needs a value" --lr
    refused 2 "--lr needs a value.*--seed" --lr --seed 1
    refused 2 "no preset \"mian\"" --preset mian
}

# ---- text

# said: what the last run sampled.
said() { sed -n '/^sample of/,/^RESULT/p' "$tmp/out" | sed '1d;$d'; }

# A text is learned, evaluated on what is held out, and gone on with; the same bits when the run is
# resumed in the middle of an epoch (F01), of several that a short text takes (F10).
test_text() {
    local text="--task text --vocab ascii --context 6 --layers 1 --channels 8 --$size 8"
    local seed samples
    text="$text --batch-size 4 --schedule constant --warmup 3"
    for _ in $(seq 12); do echo "the quick brown fox jumps over the lazy dog"; done >fox
    seq 100 >numbers
    works $text --text fox --steps 40 --eval-every 10 --sample 4 --prompt th --out t40
    has "a text" "^text: fox, checksum [0-9a-f]{16}: 476 tokens .* 79 windows" "$tmp/out"
    has "a text" "^held out: fox, 52 tokens, 8 windows" "$tmp/out"
    has "a text" "^step 40: held out: loss [0-9.]+, [0-9.]+ bits per character" "$tmp/out"
    has "a text" "^RESULT task=text .*context=6 .* bits_per_char=[0-9.]+ loss=" "$tmp/out"
    has "log.csv of a text" "^#.* data_checksum=[0-9a-f]{16}" t40/log.csv
    is "rows of log.csv" "40,val_bits 40,val" "$(tail -2 t40/log.csv | cut -d, -f1,2 | xargs)"
    is "nats and bits" 1 "$(tail -2 t40/log.csv | cut -d, -f3 | xargs |
        awk '{ d = $2 / log(2) / $1 - 1; print d * d < 1e-12 }')"
    samples=$(said)
    is "a sample of 4 after th" 6 ${#samples}
    works $text --text fox --steps 25 --out t25
    cp fox moved # the content counts, not the name
    works $text --text moved --steps 40 --eval-every 10 --sample 4 --prompt th --out t25 --resume
    is "the sample of a resumed run" "$samples" "$(said)"
    same "resumed in the middle of an epoch" t40/checkpoint.safetensors t25/checkpoint.safetensors
    cp fox $'fox\e[2J\x9b2J'
    works $text --text $'fox\e[2J\x9b2J' --steps 0 --eval-batches 1
    has "a name that commands a terminal" "^text: fox\?\[2J\?2J, " "$tmp/out"
    has "a name that commands a terminal" "^held out: fox\?\[2J\?2J, " "$tmp/out"
    refused 3 "checksum [0-9a-f]{16}, this run's is" $text --text numbers --out t40 --resume
    cp -r t40 valued
    refused 3 "checksum.*this run's is" $text --text fox --val numbers --steps 50 --out valued \
        --resume
    refused 3 "--context 6" ${text/--context 6/--context 5} --text fox --steps 50 --out t40 --resume
    works $text --text numbers --steps 0 --load t40/checkpoint.safetensors
    works $text --text fox --val numbers --steps 1 --out v
    has "--val" "^held out: numbers, 292 tokens, 48 windows" "$tmp/out"
    refused 3 "checksum.*this run's is" $text --text fox --steps 2 --out v --resume
    works $text --text fox --val numbers --steps 2 --out v --resume
    works $text --val fox --steps 0 --load t40/checkpoint.safetensors
    samples= # without a text; the same seed says the same, others say something else (D07)
    for seed in 1 1 0 2 18446744073709551615; do
        works $text --steps 0 --load t40/checkpoint.safetensors --sample 6 --seed $seed
        samples="$samples $(said | cksum | cut -d' ' -f1)"
    done
    has "RESULT of a sample" "^RESULT .* first_99=-1 ms_per_step=" "$tmp/out"
    is "different samples of $samples" 4 "$(echo $samples | tr ' ' '\n' | sort -u | wc -l | xargs)"
    works $text --steps 0 --load t40/checkpoint.safetensors --sample 5 --prompt t --temperature 0
    samples=$(said)
    works $text --steps 0 --load t40/checkpoint.safetensors --sample 5 --prompt t --temperature 1 \
        --top-k 1 --seed 9
    is "--top-k 1" "$samples" "$(said)"
    works $small --steps 1 --sample 3 --prompt '^ab|' --out sampled
    has "a sample of copying" "^\^ab\|[a-z^|$]{3}$" "$tmp/out"
    works $text --$kind $other --text fox --steps 2 --dump td --out linear
}

# What people have as texts: CR LF, a byte order mark, bytes that are no ASCII, twice the memory;
# and what the figures ask a model to say, past the trained length where it has no positions.
test_texts() {
    local text="--task text --context 20 --layers 1 --channels 8 --$size 8 --batch-size 2"
    local file n said vocab
    text="$text --schedule constant --warmup 3 --temperature 0.7"
    for n in $(seq 20); do printf 'line %d of a text\r\n' "$n"; done >crlf
    { printf '\357\273\277' && cat crlf; } >bom
    { cat crlf && printf '\303\251\377\000\200 is no ASCII'; } >high
    n=$(wc -c <crlf)
    for file in crlf bom; do
        works $text --text $file --held-out 0.2 --steps 2 --out $file-run
        has "$file" "^text: $file, .* $((n - n / 5)) tokens to train on" "$tmp/out"
    done
    is "losses of the text and of the same with a byte order mark" "$(rows crlf-run/log.csv)" \
        "$(rows bom-run/log.csv)"
    works $text --text high --val crlf --steps 1 --out high-run
    has "bytes of 128 and more" "^text: high, .* $(wc -c <high | xargs) tokens to train on" \
        "$tmp/out"
    printf 'short' >short
    refused 3 "short: need 41 tokens for a batch .*have [45]" $text --text short
    refused 3 "short: need 41 tokens for a batch .*have 5 to" $text --text short --val crlf
    refused 3 "--val short: need 21 tokens to evaluate" $text --text crlf --val short
    n=$(awk '/^MemTotal/ { printf "%.0f", 2048 * $2 }' /proc/meminfo 2>/dev/null)
    if [ -n "$n" ] && truncate -s "$n" large 2>/dev/null; then
        works $text --text large --val crlf --steps 2 --out large-run
        has "a text of twice the memory" "^text: large, .* $n tokens to train on" "$tmp/out"
    else
        skip "a text of twice the memory" "no file of that size can be made here"
    fi
    rm -f large
    for vocab in ascii bytes; do
        n=3 && has_positions || n=90 # 18 characters of prompt and 20 positions
        works $text --vocab $vocab --text crlf --held-out 0.2 --steps 2 --sample $n \
            --prompt "Three years later," --out $vocab-said
        said=$(tail -n +2 <(LC_ALL=C sed -n '/^sample of/,/^RESULT/p' "$tmp/out") |
            sed '$d' | head -c 18)
        is "the prompt of a sample of $vocab" "Three years later," "$said"
        has "a sample of $vocab" "^sample of $n tokens, temperature 0.7" "$tmp/out"
        has "bits of $vocab" "^step 2: held out: loss [0-9.]+, [0-9.]+ bits per" "$tmp/out"
    done
}

# Texts, tokenizers and samples that cannot be.
test_refused_texts() {
    local file text="--task text --context 6 --batch-size 4 --text"
    printf 'caf\303\251 and a text that is long enough for one batch of windows' >latin
    printf '\357\273\277a text after a byte order mark, long enough for a batch' >marked
    : >nothing
    mkdir -p folder
    refused 2 "--text.*--task copying" $small --text fox
    refused 2 "--task text needs --text" --task text
    refused 2 "--task text needs --text FILE, --val FILE or --sample" --task text --steps 0
    refused 2 "--val fox: expected another file" $text fox --val fox
    works $text fox --steps 1 --out own
    for file in own/checkpoint.safetensors own/log.csv; do
        refused 2 "$file: expected a file that is no part" $text $file --out own --force
        refused 2 "$file: expected a file that is no part" $text $file --out own --resume
        refused 2 "$file: expected a file that is no part" $text fox --val $file --out own --force
    done
    cp fox shrinking
    "$train" $text shrinking --steps 1000000 --save-every 1 --out shrunk >"$tmp/out" 2>"$tmp/err" &
    file=$!
    wait_for shrunk/checkpoint.safetensors
    : >shrinking
    ends $file
    clean "a text that is made shorter" 3 "^error: --text or --images: changed while"
    refused 3 "latin: the byte at offset 3 is 0xC3" --vocab ascii $text latin
    works $text latin --steps 1 --held-out 0.2 --out latin-run
    works --vocab ascii $text marked --steps 1 --held-out 0.2 --out marked-run
    has "a byte order mark" "byte order mark left out" "$tmp/out"
    refused 3 "nothing: .*got an empty file" $text nothing
    refused 3 "folder: expected a file, got a directory" $text folder
    refused 3 "absent: cannot read: No such file" $text absent
    refused 3 "fox: expected a file of tokens.*got plain text" --vocab gpt2 $text fox
    refused 3 "need 481 tokens.*have 476" --task text --context 6 --batch-size 80 --text fox
    refused 3 "need 7 tokens to evaluate" $text fox --held-out 0.01
    refused 2 "--tokenizer is for --vocab gpt2" $text fox --tokenizer fox
    refused 3 "fox: expected a tokenizer" --vocab gpt2 $text fox --tokenizer fox
    refused 2 "--prompt needs --sample" $text fox --prompt a
    refused 2 "--prompt: the byte at offset 1 is 0xC3" --vocab ascii $text fox --sample 2 \
        --prompt $'a\303\251'
    refused 2 "--prompt: character 0 is no token" $small --sample 2 --prompt A
    refused 2 "--temperature.*-1" $text fox --sample 2 --temperature -1
    refused 2 "--top-k.*-1" $text fox --sample 2 --top-k -1
    if ! has_positions; then
        works $text fox --steps 1 --sample 60 --prompt 0123456789 --out every60
    else
        refused 2 "--sample 7: after a prompt of 1 tokens the model would read 7" $text fox \
            --sample 7
        refused 2 "--sample 60: after.*6 positions" $text fox --sample 60
        refused 2 "--sample 1: after a prompt of 10 tokens" $text fox --sample 1 \
            --prompt 0123456789
    fi
    works $text fox --steps 1 --sample 6 --out every6 # every position, and a prompt of all but none
    works $text fox --steps 1 --sample 1 --prompt 012345 --out every1
    if [ "$(id -u)" = 0 ]; then
        skip "a text that may not be read" "root may read it"
    else
        chmod 0 latin
        refused 3 "latin: cannot read: Permission denied" $text latin
    fi
}

# ---- images

# Half of 8 images are evaluated on; a trainer that reads none does not know their options.
test_images() {
    local i images="--task images --causal no --layers 1 --channels 8 --$size 8 --batch-size 4"
    if [ $arch != causalrn ] && [ $arch != gpt2 ]; then
        refused 2 "unknown option.*--images" --images flat
        refused 2 "--task: expected one of" --task images
        return
    fi
    {
        printf 'seqimage\1\0\0\0\4\0\0\0\4\0\0\0\1\0\0\0\2\0\0\0\0\0\0\0'
        printf '\4\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0'
        for i in 1 2 3 4 5 6 7 8; do printf '\0\0\0\0\0\0\340\77'; done # 0.5
        printf '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\0\1\0\1\0\1'
        for i in 1 2 3 4; do printf 'pixels of image 1PIXELS OF IMAGE'; done
    } >flat
    works $images --images flat --steps 3 --eval-every 2 --out images
    has "images" "^images: flat, .*: 4 to train on, 4 to evaluate on, 4 x 4 x 1, 2 classes" \
        "$tmp/out"
    has "images, evaluated" "^step 2: held out: loss [0-9.]+, accuracy [0-9.]+%" "$tmp/out"
    has "images" "^RESULT task=images .*patches=4 .*accuracy=[0-9.]+ loss=[0-9.]+" "$tmp/out"
    works $images --images flat --load images/checkpoint.safetensors --steps 0
    works $images --$kind $other --images flat --steps 0 --dump images.dump
    refused 2 "--task images needs --images FILE" $images
    refused 2 "--task images: expected --causal no" --task images --images flat
    refused 2 "--images is for --task images" $small --images flat
    refused 2 "--patch 3: .* 4 x 4; expected a patch that divides" $images --images flat --patch 3
    refused 2 "--sample: --task images" $images --images flat --sample 3
    refused 2 "--curve: --task images has no accuracy by length" $images --images flat --curve curve
    refused 2 "images/log.csv: expected a file that is no" $images --images images/log.csv \
        --out images --force
    refused 3 "fox: expected a file of images" $images --images fox
    refused 3 "made with --patch 2, this run has 4" $images --images flat --patch 4 \
        --load images/checkpoint.safetensors
}

# ---- state tracking

# Every task is trained at its lengths and evaluated beyond them; what is asked of it is in its
# checkpoint, the lengths of evaluations are not.
test_state_tasks() {
    local task long shape="--layers 1 --channels 8 --$size 8 --batch-size 5 --steps 3"
    shape="$shape --max-length 7"
    local eval="--eval-min-length 8 --eval-max-length 20 --curve curve"
    for task in parity modular brackets s5 z60 horizon recall; do
        [ $task != s5 ] || eval=${eval#*8 } # from here on sequences have one length
        works --task $task $shape $eval --out $task
        has "$task" "^step 3: .*scaled -?[0-9.]+; the most frequent target: [0-9.]+%" "$tmp/out"
        has "$task" "^RESULT task=$task .*max_length=7 .*scaled=.* constant=[0-9.]+ loss=" \
            "$tmp/out"
        is "$task, curve" "tokens,sequences,accuracy" "$(head -1 curve)"
    done
    works --task s5 $shape --elements swaps --eval-max-length 9 --out swaps
    refused 3 "--elements swaps" --task s5 ${shape/steps 3/steps 4} --eval-max-length 9 \
        --out swaps --resume
    refused 3 "was made with --tokens-per-element 1, this run has 3" --task s5 \
        ${shape/steps 3/steps 0} --tokens-per-element 3 --eval-max-length 9 \
        --load swaps/checkpoint.safetensors # V is another
    refused 2 "--resets 7: expected at most 6" --task horizon $shape --resets 7
    works --task s5 ${shape/steps 3/steps 4} --schedule constant --elements swaps \
        --eval-max-length 11 --out longer
    refused 2 "--batch-size 5: an evaluation reads sequences of 255" --task parity $shape \
        --eval-max-length 256
    refused 2 "--min-length: expected at least 3" --task parity $shape --min-length 2
    refused 2 "--eval-min-length and --eval-max-length: expected a range, got 40 to 20" \
        --task modular $shape --eval-min-length 40 --eval-max-length 20
    long=${shape/--max-length 7/--max-length 32}
    for task in mqar in-context noisy fuzzy memorization selective needle; do
        works --task $task $long --eval-max-length 40 --curve curve --out $task \
            $([ $task = needle ] || echo --vocab-size 24) \
            $([ $task != selective ] || echo --copies 9)
        has "$task" "^RESULT task=$task .*max_length=32 .*macro=[0-9.]+ micro=[0-9.]+ scaled=" \
            "$tmp/out"
    done
    refused 3 "--noise 0.2" --task noisy ${long/steps 3/steps 4} --vocab-size 24 \
        --noise 0.5 --out noisy --resume
    refused 2 "--max-length: expected an even number of at least 16 for --task mqar, got 7" \
        --task mqar $shape
    refused 2 "--batch-size 5: an evaluation reads sequences of 2048" --task needle $long \
        --eval-max-length 2048
    refused 3 "absent/c.*No such file" --task z60 ${shape/steps 3/steps 0} --eval-max-length 9 \
        --curve absent/c
    local steps=${shape/steps 3/steps 2}
    refused 3 "absent/c.*No such file" --task z60 $steps --eval-max-length 9 --curve absent/c
    refused 3 "--curve parity.*directory" --task z60 $steps --eval-max-length 9 --curve parity
    refused 2 "older curve, got another" --task z60 $steps --eval-max-length 9 \
        --curve parity/checkpoint.safetensors
    works --task z60 $steps --eval-max-length 9 --out within --curve within/curve
    is "a curve within --out" "tokens,sequences,accuracy" "$(head -1 within/curve)"
    refused 2 "--prompt: the tokens of --task mqar are numbers" --task mqar $long \
        --sample 2 --prompt x
    # what only other tasks read is refused, and said whose it is; but a default is nobody's
    refused 2 "--pairs 8 is for --task mqar.needle, this is --task parity" --task parity --pairs 8
    refused 2 "--string-size 9 is for --task copying, this is --task s5" --task s5 --string-size 9
    refused 2 "--vocab ascii is for --task text, this is --task mqar" --task mqar --vocab=ascii
    refused 2 "--max-length 9 is for --task parity.*needle, this is --task copying" $small \
        --max-length 9
    refused 2 "--vocab-size 9 is for --task mqar.*, this is --task text" --task text \
        --vocab-size 9
    for task in "tokens-per-element 2" "modulus 3" "multiply no" "elements swaps" "resets 0" \
        "noise 0" "copies 3" "examples 5" "eval-depth 0" "held-out 0.2" "context 7"; do
        refused 2 "--$task is for --task .*, this is --task parity" --task parity --$task
    done
    for task in s5 z60 horizon recall mqar selective copying; do
        refused 2 "--min-length 5 is for --task parity.*needle, this is --task $task" \
            --task $task --min-length 5
    done
    refused 2 "--eval-min-length 9 is for --task parity.*, this is --task z60" --task z60 \
        --eval-min-length 9
    works --task recall $shape $eval --pairs 0 --vocab-size 0 --string-size 16 \
        --eval-min-length 0 --out unread
    # a preset's may stay
    [ $arch != deltanet ] || works --preset small --task mqar --steps 0 --warmup 0
}

# ---- evaluation and dumps

# --steps 0 evaluates and writes no run; it says how many threads it has (E03).
test_steps_0() {
    local before
    before=$(sums)
    works $small --steps 0 --threads 2
    has "--steps 0" "^RESULT .*steps=0 .*accuracy=" "$tmp/out"
    has "--threads 2" "2 threads|OpenMP off" "$tmp/out"
    works $small --steps 0 --threads 1
    has "--threads 1" "1 threads?" "$tmp/out"
    is "files after --steps 0" "$before" "$(sums)"
}

# --steps 0 --dump F: exactly the tensors that tools rely on, and the same bits every time.
test_dump() {
    local shape="--layers 2 --channels 6 --batch-size 3 --string-size 4 --steps 0"
    local p expected name acts
    [ $arch != gpt2 ] && shape="--hidden 5 $shape"
    case $arch in gpt2 | deltanet | metala) shape="--heads 3 $shape" ;; esac
    works $shape --dump d1
    works $shape --dump d2
    works $shape --dump d3 --seed 2
    works $shape --dump d4 --threads 2
    works $shape --dump d5 --$kind $other
    same "two dumps" d1 d2
    same "dumps of one and two threads" d1 d4
    expected=$(for p in params grads; do
        if [ $arch = causalrn ]; then
            echo "$p.wte F32 29,6,$p.wpe F32 10,6,$p.right_w F32 2,5,6,$p.right_b F32 2,5"
            echo "$p.left_w F32 2,5,6,$p.out_w F32 2,6,5,$p.out_b F32 2,6,$p.head_w F32 29,6"
        elif [ $arch = deltanet ]; then
            echo "$p.wte F32 29,6,$p.norm1_w F32 2,6,$p.qkv_w F32 2,18,6,$p.beta_w F32 2,3,6"
            echo "$p.conv_w F32 2,18,4,$p.norm_o_w F32 2,2,$p.proj_w F32 2,6,6"
            echo "$p.norm2_w F32 2,6,$p.gu_w F32 2,10,6,$p.down_w F32 2,6,5,$p.norm_w F32 6"
            echo "$p.head_w F32 29,6"
        elif [ $arch = gateloop ]; then
            echo "$p.wte F32 29,6,$p.norm1_w F32 2,6,$p.norm1_b F32 2,6,$p.qkvg_w F32 2,24,6"
            echo "$p.qkvg_b F32 2,24,$p.gate_w F32 2,12,6,$p.gate_b F32 2,12,$p.out_w F32 2,6,6"
            echo "$p.norm2_w F32 2,6,$p.norm2_b F32 2,6,$p.fc_w F32 2,5,6,$p.fc_b F32 2,5"
            echo "$p.down_w F32 2,6,5,$p.down_b F32 2,6,$p.norm_w F32 6,$p.norm_b F32 6"
            echo "$p.head_w F32 29,6,$p.head_b F32 29"
        elif [ $arch = mamba ]; then
            echo "$p.wte F32 29,6,$p.norm_w F32 2,6,$p.in_w F32 2,10,6,$p.conv_w F32 2,5,4"
            echo "$p.conv_b F32 2,5,$p.x_w F32 2,33,5,$p.dt_w F32 2,5,1,$p.dt_b F32 2,5"
            echo "$p.A_log F32 2,5,16,$p.skip F32 2,5,$p.out_w F32 2,6,5,$p.head_w F32 29,6"
        elif [ $arch = metala ]; then
            echo "$p.wte F32 29,6,$p.conv_w F32 2,6,2,$p.qv_w F32 2,9,6,$p.a_w F32 2,3,6"
            echo "$p.aug_w F32 2,3,$p.gate_w F32 2,6,6,$p.gate_b F32 2,6,$p.out_w F32 2,6,6"
            echo "$p.gu_w F32 2,10,6,$p.down_w F32 2,6,5,$p.head_w F32 29,6"
        else
            echo "$p.wte F32 29,6,$p.wpe F32 10,6,$p.qkv_w F32 2,18,6,$p.proj_w F32 2,6,6"
            echo "$p.fc_w F32 2,24,6,$p.fc_b F32 2,24,$p.out_w F32 2,6,24,$p.out_b F32 2,6"
            echo "$p.head_w F32 29,6"
        fi
    done | sed -E "s/,(params|grads)/\n\1/g"; echo "inputs I32 3,10
targets I32 3,10
loss F32 1")
    is "tensors of a dump" "$(echo "$expected" | sort)" "$(tensors d1 | grep -v '^acts')"
    case $arch in
    causalrn) acts=("x F32 3,3,10,6" "a F32 2,3,10,5" "b F32 2,3,10,5" "o F32 2,3,10,5") ;;
    gpt2) acts=("x F32 3,3,10,6" "qkv F32 2,3,10,18" "o F32 2,3,10,6" "mid F32 2,3,10,6") ;;
    deltanet) acts=("x F32 3,3,10,6" "qkv F32 2,3,10,18" "beta F32 2,3,10,3" "o F32 2,3,10,6") ;;
    gateloop) acts=("x F32 3,3,10,6" "qkvg F32 2,3,10,24" "a F32 2,3,10,12" "y F32 2,3,10,6") ;;
    mamba) acts=("x F32 3,3,10,6" "u F32 2,3,10,5" "dt F32 2,3,10,5" "y F32 2,3,10,5") ;;
    metala) acts=("x F32 3,3,10,6" "qv F32 2,3,10,9" "g F32 2,3,10,3" "o F32 2,3,10,6") ;;
    esac
    for name in "${acts[@]}" "logits F32 3,10,29"; do
        is "tensors of a dump" "acts.$name" "$(tensors d1 | grep "^acts.${name%% *} ")"
        is "tensors of a $other dump" "acts.$name" "$(tensors d5 | grep "^acts.${name%% *} ")"
    done
    "$compare" d1 d2 >"$tmp/out" 2>&1
    is "diff of equal dumps" 0 $?
    has "diff of equal dumps" " 0 do not, 0 in one file only" "$tmp/out"
    "$compare" d1 d3 >"$tmp/out" 2>&1
    is "diff of dumps of two seeds" 1 $?
    works ${shape% *} 2 --dump d6 --out dumped
    "$compare" d1 d6 >"$tmp/out" 2>&1
    is "diff of dumps with and without training" 0 $?
    # what is no dump stays, whatever it is; an empty file is as good as none
    echo "notes of a year" >notes
    head -c 50 d1 >cut
    printf '\200\0\0\0\0\0\0\0{"inputs":' >damaged
    works $small --steps 1 --out own
    for name in notes cut damaged own/log.csv own/checkpoint.safetensors; do
        refused 2 "^error: --dump $name: expected a new file or an older dump, got another file$" \
            $shape --dump $name
        has "$name as a dump" "^hint: nothing was changed; give another name$" "$tmp/err"
        refused 2 "--dump $name: expected a new file" $small --steps 2 --out fresh --dump $name
    done
    : >nothing
    works $shape --dump nothing
    same "a dump in place of an empty file" d1 nothing
    works $shape --dump d3
    same "a dump in place of an older one" d1 d3
    refused 3 "absent/d.*No such file" $shape --dump absent/d
    refused 3 "got a directory" $shape --dump .
}

# ---- resuming

# 10 steps and 10 more are 20 steps, bit for bit (F01); so are runs of one and of three threads.
test_resume() {
    local threads
    works $medium --steps 20 --out r20
    works $medium --steps 10 --out r10
    works $medium --steps 20 --out r10 --resume
    same_run "resumed at 10" r20 r10
    works $medium --steps 20 --out r20 --resume
    same_run "resumed when done" r20 r10
    local easy="--layers 1 --channels 32 --$size 32 --batch-size 16 --string-size 1 --steps 300"
    works $easy --stop-at 0.3 --out stop
    cp -r stop stopped
    works $easy --stop-at 0.3 --out stopped --resume
    same_run "resumed after --stop-at" stop stopped
    works $medium --steps 20 --out r20 --force
    same_run "--force starts over" r20 r10
    for threads in 1 2 3; do # large enough for parallel products
        works --string-size 8 --batch-size 6 --steps 4 --out t$threads --threads $threads
    done
    same_run "1 and 2 threads" t1 t2
    same_run "1 and 3 threads" t1 t3
    works $medium --steps 12 --accumulate 3 --out a12
    is "--accumulate: steps are updates" "$(seq -s ' ' 0 11) 12" \
        "$(grep -v '^#' a12/log.csv | tail -n +2 | cut -d, -f1 | xargs)"
    works $medium --steps 7 --accumulate 3 --out a7
    works $medium --steps 12 --accumulate 3 --out a7 --resume
    same_run "--accumulate, resumed at 7" a12 a7
    works $wide --steps 12 --$kind $other --schedule cosine --lr-min 1e-5 --eval-every 4 --out l12
    works $wide --steps 12 --$kind $other --schedule cosine --lr-min 1e-5 --eval-every 4 \
        --save-every 4 --out l4
    same_run "--save-every changes nothing" l12 l4
}

# A run killed without warning goes on from its last save with the same command and --resume.
test_resume_killed() {
    local args="--string-size 8 --batch-size 16 --layers 1 --steps 40 --schedule cosine --warmup 3"
    local pid
    args="$args --lr-min 1e-5 --save-every 10 --eval-every 7"
    works $args --out whole
    "$train" $args --out killed >"$tmp/out" 2>&1 &
    pid=$!
    wait_for killed/checkpoint.safetensors
    kill -9 $pid
    ends $pid
    is "kill -9" 137 $code
    is "killed after a save, before the end" 1 "$(($(saved_step killed) < 40))"
    works $args --out killed --resume
    same_run "resumed after kill -9" whole killed
    printf '39,train,0.5' >>killed/log.csv # a line that was being written
    works $args --out killed --resume
    same_run "resumed after half a line" whole killed
    refused 3 "--steps 40" ${args/--steps 40/--steps 50} --out killed --resume
    refused 3 "--lr-min" ${args/1e-5/2e-5} --out killed --resume
    refused 3 "--seed 1" $args --out killed --resume --seed 2
}

# Ctrl-C saves without an evaluation, says how to go on, exits 130; another run in its directory is
# refused (C21).
test_interrupt() {
    local pid step
    if [ -n "$(trap -p INT)" ]; then
        skip "Ctrl-C" "this shell was started with SIGINT ignored, and so are its programs"
        return
    fi
    set -m # without job control a shell's background programs ignore SIGINT
    "$train" $small --steps 1000000 --save-every 10 --out int >"$tmp/int" 2>&1 &
    pid=$!
    set +m
    wait_for int/checkpoint.safetensors
    run $small --steps 1000000 --out int --resume
    clean "a second run with --resume" 3 "int/log.csv.*another run"
    run $small --steps 1000000 --out int --force
    clean "a second run with --force" 3 "int/log.csv.*another run"
    run $small --steps 1000000 --out int
    clean "a second run" 2 "--out int"
    kill -INT $pid
    ends $pid
    is "exit code after SIGINT" 130 $code
    has "after SIGINT" "^interrupted: saved, not evaluated; .* --out int --resume" "$tmp/int"
    has "RESULT after SIGINT" "^RESULT .* first_99=[-0-9]+ ms_per_step=" "$tmp/int"
    step=$(saved_step int)
    is "evaluations after SIGINT" 0 "$(grep -c ',val,' int/log.csv)"
    is "rows of log.csv" "$(seq 0 $((step - 1)))" "$(grep ,train, int/log.csv | cut -d, -f1)"
    works $small --steps $((step + 5)) --out int --resume
    works $small --steps $((step + 5)) --out int2
    same_run "resumed after SIGINT" int int2
    # in the middle of an evaluation that takes hours: no step is lost
    "$train" $small --steps 2 --save-every 0 --eval-batches 999999999 --out long >"$tmp/int" 2>&1 &
    pid=$!
    for _ in $(seq 1000); do
        grep -qs '^1,train' long/log.csv && break
        sleep 0.02
    done
    sleep 0.2
    kill -TERM $pid
    ends $pid
    is "exit code after SIGTERM during an evaluation" 143 $code
    is "the step it saves" 2 "$(saved_step long)"
    has "RESULT without an evaluation" "^RESULT .*steps=2 first_99=-1 ms_per_step=" "$tmp/int"
}

# A model without learned positions speaks for hours: Ctrl-C ends it, and what it said is printed.
test_interrupted_sample() {
    local pid n
    [ -n "$(trap -p INT)" ] && return # see test_interrupt
    seq 100 >numbers
    set -m
    "$train" --task text --text numbers --context 6 --layers 1 --channels 8 --$size 8 --steps 1 \
        --batch-size 4 --warmup 3 --sample 100000000 --prompt 12 --out talk >"$tmp/int" 2>&1 &
    pid=$!
    set +m
    wait_for talk/checkpoint.safetensors
    sleep 0.2
    kill -INT $pid
    ends $pid
    is "exit code after SIGINT during a sample" 130 $code
    has "the evaluation before a sample" "^interrupted: saved; .* --out talk --resume" "$tmp/int"
    n=$(sed -nE 's/^sample of ([1-9][0-9]*) tokens.*/\1/p' "$tmp/int")
    is "characters of the interrupted sample of ${n:-0}" $((n + 2)) \
        "$(sed '1,/^sample of/d;/^interrupted/,$d' "$tmp/int" | head -c -1 | wc -c)"
}

# 20 kills at any time of a run that saves at every step (G05): the checkpoint always loads, its
# step never goes back, and what comes out is what an unbroken run gives.
test_kills() {
    local pid k step last=1 stale
    works $small --steps 1 --out kills
    for k in $(seq 20); do
        "$train" $small --steps 1000000 --save-every 1 --out kills --resume >"$tmp/out" 2>&1 &
        pid=$!
        sleep "0.$(printf %03d $((RANDOM % 150 + 5)))"
        kill -9 $pid
        ends $pid
        works $small --steps 0 --load kills/checkpoint.safetensors
        step=$(saved_step kills)
        if [ "${step:-0}" -ge $last ]; then good; else bad "kill $k" "step >= $last" "$step"; fi
        last=$step
    done
    is "progress in 20 kills" 1 "$((last > 1))"
    stale=$(find kills -name '*.tmp-*' | wc -l)
    works $small --steps $((last + 3)) --out kills --resume
    works $small --steps $((last + 3)) --out unbroken
    same_run "resumed after 20 kills ($stale during a save)" kills unbroken
}

# ---- directories and files

# A run is never overwritten unasked, and what cannot be a directory is said before step 0 (C18).
test_directories() {
    works $small --steps 2 --out mine
    echo precious >mine/notes
    refused 2 "--out mine.*new" $small --steps 3 --out mine
    works $small --steps 3 --out mine --force
    works $small --steps 3 --out fresh
    same_run "--force starts over" mine fresh
    is "--force keeps other files" precious "$(cat mine/notes)"
    works $small --steps 1 --out a/b/c
    mkdir empty
    works $small --steps 1 --out empty
    echo x >file
    refused 3 "--out file" $small --out file
    refused 3 "--out file" $small --out file --force
    refused 3 "file/run" $small --out file/run
    refused 3 "/proc/seqc/run" $small --out /proc/seqc/run
    refused 3 "--out nowhere" $small --out nowhere --resume
    mkdir void
    refused 3 "void/checkpoint.safetensors.*No such file" $small --out void --resume
    mkdir readonly && chmod 500 readonly
    if [ "$(id -u)" = 0 ]; then
        skip "a read-only directory" "root may write there"
    else
        refused 3 "readonly/run.*Permission denied" $small --out readonly/run
        refused 3 "readonly/log.csv.*Permission denied" $small --out readonly
    fi
}

# not_loaded PATTERN: bad.safetensors is refused by --load and by --resume, which change nothing.
not_loaded() {
    refused 3 "bad.safetensors.*$1" $small --steps 2 --load bad.safetensors --out new
    cp bad.safetensors victim/checkpoint.safetensors
    refused 3 "victim/checkpoint.safetensors.*$1" $small --steps 2 --out victim --resume
}

# Truncated, damaged and foreign files (C01, C02), and those of other models (C24, B19).
test_bad_files() {
    local size cut
    works $small --steps 1 --out ckpt
    works $small --steps 1 --out victim
    size=$(wc -c <ckpt/checkpoint.safetensors)
    for cut in 0 4 8 100 $((size / 2)) $((size - 1)); do
        head -c "$cut" ckpt/checkpoint.safetensors >bad.safetensors
        not_loaded "(short|cut|length).*expected"
    done
    { cat ckpt/checkpoint.safetensors; echo; } >bad.safetensors
    not_loaded "long"
    { head -c $((size - 9)) ckpt/checkpoint.safetensors; printf 'xxxxxxxxx'; } >bad.safetensors
    not_loaded "checksum"
    printf 'Once upon a time there was a file.\n' >bad.safetensors
    not_loaded "expected"
    has "a text file" "plain text" "$tmp/err"
    printf '\211PNG\r\n\032\n\0\0\0\rIHDR' >bad.safetensors
    not_loaded "expected"
    has "an image" "PNG" "$tmp/err"
    rm -f bad.safetensors
    works $small --steps 0 --dump bad.safetensors
    not_loaded "tensor"
    refused 3 "absent.*No such file" $small --load absent --out new
    refused 3 "ckpt.*directory" $small --load ckpt --out new
    refused 3 "/dev/null" $small --load /dev/null --out new
    works $small --steps 0 --load ckpt/checkpoint.safetensors
    works $(but --batch-size 3 --lr 0.5 --seed 9) --steps 0 --load ckpt/checkpoint.safetensors
    refused 3 "${wrong% *} 8" $(but $wrong) --load ckpt/checkpoint.safetensors
    refused 3 "--$kind $model" $small --$kind $other --load ckpt/checkpoint.safetensors
    if ! has_positions; then
        works $(but --string-size 3) --steps 0 --load ckpt/checkpoint.safetensors
    else
        refused 3 "params.wpe.*\(8,8\).*\(6,8\)|--string-size" \
            $(but --string-size 3) --load ckpt/checkpoint.safetensors
    fi
    works $small --steps 1 --load ckpt/checkpoint.safetensors --out loaded
}

# A save that fails (C19) ends the run, leaves the old checkpoint and no half-written one.
test_failed_save() {
    local before
    works $medium --steps 5 --out full
    before=$(cksum <full/checkpoint.safetensors)
    (
        trap '' XFSZ
        ulimit -f 8
        run $medium --steps 10 --out full --resume
        exit $code
    )
    code=$?
    clean "a full disk" 3 "full/checkpoint.safetensors.*(File too large|size check)"
    is "the old checkpoint after a failed save" "$before" "$(cksum <full/checkpoint.safetensors)"
    is "files after a failed save" "checkpoint.safetensors log.csv" "$(ls full | xargs)"
    works $medium --steps 10 --out full --resume
    works $medium --steps 10 --out full2
    same_run "resumed after a failed save" full full2
}

# The new checkpoint is on the disk before it takes the old one's name, and the name after (C20).
test_sync() {
    if ! strace -o "$tmp/trace" true 2>/dev/null; then
        skip "fsync before and after rename" "strace does not work here"
        return
    fi
    strace -f -e trace=openat,fsync,rename,renameat,renameat2 -o "$tmp/trace" \
        "$train" $small --steps 1 --out sync >/dev/null 2>&1
    is "strace" 0 $?
    sed -nE 's/.*openat\(AT_FDCWD, "sync\/checkpoint.safetensors\.tmp[^"]*".* = ([0-9]+)$/open \1/p
             s/.*openat\(AT_FDCWD, "sync",.* = ([0-9]+)$/directory \1/p
             s/.*fsync\(([0-9]+)\).* = 0$/fsync \1/p
             s/.*rename.*"sync\/check.*\.tmp.*"sync\/checkpoint.safetensors".*/rename/p
            ' "$tmp/trace" | xargs >"$tmp/calls"
    has "order of system calls" "open ([0-9]+) fsync \1 rename directory ([0-9]+) fsync \2$" \
        "$tmp/calls"
}

# ---- numbers

# A loss that is not finite stops the run by its step; the last good checkpoint stays (A27).
test_nan() {
    local before
    works $(but --warmup 0 --lr 1e30) --steps 1 --out nan
    before=$(cksum <nan/checkpoint.safetensors)
    run $(but --warmup 0 --lr 1e30) --steps 20 --out nan --resume
    clean "--lr 1e30" 1 "^error: step [0-9]+: .*(loss|norm)"
    is "the checkpoint after a bad step" "$before" "$(cksum <nan/checkpoint.safetensors)"
    works $small --steps 0 --load nan/checkpoint.safetensors --lr 1e30
}

# Four seeds, four different first losses; the seed is printed (D07).
test_seeds() {
    local seed losses=""
    for seed in 0 1 2 18446744073709551615; do
        works $small --steps 1 --seed $seed --out seed$seed
        has "--seed $seed" "seed=$seed( |$)" "$tmp/out"
        has "--seed $seed, log.csv" "^#.* seed=$seed( |$)" seed$seed/log.csv
        losses="$losses $(grep '^0,train' seed$seed/log.csv | cut -d, -f3)"
    done
    is "different first losses of $losses" 4 \
        "$(echo $losses | tr ' ' '\n' | sort -u | wc -l | xargs)"
}

# Models that no memory holds end in one line (G01), before a directory is made.
test_memory() {
    if ! (ulimit -v 4000000) 2>/dev/null; then
        skip "too little memory" "ulimit -v does not work here"
        return
    fi
    (
        failed=0
        ulimit -v 4000000
        refused 4 "cannot allocate [0-9.]+ GiB" --batch-size 1000000 --layers 1000
        refused 4 "does not fit in memory|cannot allocate" --batch-size 1000000 --layers 1024 \
            --channels 65536 --$size 65536 --string-size 1000000
        exit $((failed > 0))
    )
    is "models that do not fit" 0 $?
}

# The log begins with what is needed to repeat the run.
test_log() {
    works $small --steps 3 --eval-every 2 --out log
    has "log.csv" "^#.* task=copying" log/log.csv
    has "log.csv" "^# git=.* compiler=" log/log.csv
    is "columns of log.csv" "step,split,loss,acc,lr,grad_norm,ms,tokens_per_s" \
        "$(grep -v '^#' log/log.csv | head -1)"
    is "rows of log.csv" "0,train 1,train 2,val 2,train 3,val" \
        "$(grep -v '^#' log/log.csv | tail -n +2 | cut -d, -f1,2 | xargs)"
    is "the last line" RESULT "$(tail -1 "$tmp/out" | cut -d' ' -f1)"
}

# A NaN at the evaluation ends the run before it is saved.
test_nan_evaluation() {
    local how="--lr 1e30"
    [ $arch = causalrn ] && how="--prenorm none --lr 100"
    run ${small/--warmup 3/--warmup 0} $how --steps 1 --out nan-eval
    clean "a NaN at the evaluation" 1 "step 1: the loss on fresh"
    is "files after a NaN at the evaluation" "log.csv" "$(ls nan-eval)"
}

# What else people and schedulers do to a program.
test_hostile() {
    works $small --steps 5 --out hostile
    refused 2 "--resume and --dump" $small --steps 6 --out hostile --resume --dump d
    refused 2 "--steps 0 writes no run" $small --steps 0 --out hostile --resume
    refused 2 'got "8\?error: forged' --batch-size $'8\nerror: forged'
    "$train" $small --steps 20 --print-every 1 --out closed >&- 2>"$tmp/err"
    is "lines of log.csv with stdout closed" 22 "$(grep -cv '^#' closed/log.csv)"
    "$train" $small --steps 300000 --out pipe 2>"$tmp/err" | head -1 >/dev/null
    is "exit code when nobody reads" 3 "${PIPESTATUS[0]}"
    is "what it leaves" "checkpoint.safetensors log.csv" "$(ls pipe | xargs)"
    [ -e /dev/full ] && "$train" --help >/dev/full 2>"$tmp/err"
    is "exit code of --help on a full disk" 3 $?
    mkdir fifo && mkfifo fifo/log.csv
    refused 3 "fifo/log.csv: expected a file" $small --steps 3 --out fifo --force
    mkdir -p taken/checkpoint.safetensors
    refused 3 "taken/checkpoint.safetensors: cannot be written" $small --steps 3 --out taken --force
    run --help --resume
    is "exit code of --help --resume" 0 $code
    run -h
    is "exit code of -h" 0 $code
}

# Weights that others published: what the command line makes of them; test_gpt2.c reads some.
test_published() {
    works $small --steps 0 --dump dump
    refused 2 "--init-from: expected --model gpt2" $small --init-from dump
    refused 2 "--init-from and --load" $small --model gpt2 --init-from dump --load dump
    refused 3 "dump: has no tensor wte.weight" $small --model gpt2 --init-from dump
    refused 3 "absent.*No such file" $small --model gpt2 --init-from absent
    refused 3 "wte.weight: expected shape \(29,8\), got \(11,12\)" $small --model gpt2 \
        --init-from "$here/dev/ref/gpt2_transformers/model.safetensors"
    refused 2 "--channels 50.*--heads 3" $(but --channels 50 --heads 3)
    refused 2 "--heads.*got 0" $(but --heads 0)
    refused 2 "--channels 8.*--heads 9" $(but --heads 9)
}

# What no model changes is tested with the first. The runs that a test leaves go after it: every
# `refused` reads all files.
tests="help every_option refused_options text texts refused_texts images state_tasks steps_0 dump
    resume bad_files nan_evaluation seeds memory"
case $arch in
causalrn)
    tests="$tests resume_killed interrupt kills directories failed_save sync nan hostile log"
    ;;
gpt2) tests="$tests published" ;;
deltanet | gateloop) tests="$tests interrupted_sample" ;;
esac
for name in $tests; do
    test_$name
    find "$tmp/work" -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
