#!/usr/bin/env bash
# models.sh: the architectures beside each other, for mqar.sh, mqar_hard.sh, mad.sh and
# throughput.sh, which source it in place of common.sh; what that says of the environment holds, but
# for TRAINER and GPT2: the trainers are ./train_X$SUFFIX, SUFFIX=_gpu. --full, for larger cells,
# sets FULL.
#
# Two blocks of [mixer, MLP], C channels wide; the head has its own matrix; embeddings start as
# N(0,0.02), like Zoology's. The mixer, its norms, other first weights and MLP are each
# architecture's own: a GELU MLP of 4 C where it has one, a SwiGLU MLP of H = 8/3 C, as many
# weights, where it has that, and four layers of H = 2 C in place of two blocks where it has none.
# Weights besides embeddings and head, thousands at C = 64 and 128; numbers of a sequence's memory,
# all layers, without windows of convolutions:
#
#   model               mixer, MLP                                      weights   memory
#   transformer         heads of 64, positions, GELU                    99   394  4 T C
#   linear-transformer  the same                                        99   394  128 C
#   causalrn            four layers, positions, no MLP                  99   395  8 T C
#   linear-causalrn     the same                                        99   395  8 C
#   deltanet            two heads, eigenvalues in [0,1], SwiGLU         99   400  C^2
#   gateloop            four heads, complex numbers, GELU              133   504  C^2
#   metala              two heads, DK = DV, convolution of 2, SwiGLU   106   429  C^2
#   gla                 the same with keys of its own                  110   437  C^2
#   mamba               four layers, 16 states, in [0,1], no MLP       131   466  128 C
#
# Heads of 64 channels are those that are fast on the GPU, and at C = 64 one head is what Zoology's
# Transformer has. It first guesses among the values of a sequence, then learns the task at once: on
# 4 pairs in 64 tokens of 64 symbols, C = 64, batches of 128 at 2.15e-3 on the CPU, seed 1, a model
# of one head had 28% of a batch right at step 2499 and 99% at 2616, one of four heads 99% at 1168.
# Batches of 32, 2500 of them, were too few for one, two and eight heads: 24 to 29%.
# With embeddings of N(0,1), as in CausalRN's paper, what attention adds is small beside them: 16
# pairs in 128 tokens of 1024 symbols, C = 64, 600 batches of 128 at 2.15e-3 on the CPU, seed 1,
# leave the loss at 6.26, ln 512 being 6.24; with 0.02 it is 5.5, with --model gpt2 5.3. 80 in 512
# of 8192 symbols need more still: mqar_hard.sh.
#
# Decay is on what each trainer decays: all of DeltaNet's and MetaLA's weights, Mamba's but three,
# no gains or biases of the others, nor embeddings of Transformers and CausalRN. A head reads every
# position, though those without a target have no loss: the same gradient, more time. But on the GPU
# MQAR's reads only those that have one (util/asked.cuh).
#
# From the environment, besides common.sh's: MODELS="metala mamba", CHANNELS="64 128".
FULL=
for arg; do
    [ "$arg" = --full ] && FULL=1 || { echo "error: $arg: expected --full" >&2 && exit 2; }
done
SEEDS=${SEEDS:-1} SUFFIX=${SUFFIX-_gpu}
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
all_models="transformer linear-transformer causalrn linear-causalrn deltanet gateloop metala gla
    mamba"
MODELS=${MODELS:-$all_models}
for model in $MODELS; do
    [[ " "$all_models" " =~ [[:space:]]$model[[:space:]] ]] ||
        { echo "error: MODELS: expected some of" $all_models", got \"$model\"" >&2 && exit 2; }
done
for width in ${CHANNELS:-64}; do number CHANNELS "$width" 1; done
once MODELS $MODELS && once CHANNELS ${CHANNELS-} && once RATES ${RATES-} && once SIZES ${SIZES-}
once TASKS ${TASKS-}

# model NAME C HS: trainer, shape = its trainer and options at this width; HS: the size of a head,
# of which GateLoop has one channel each; 0: as in the table. CausalRN's fast kernels have H to 384.
model() {
    local C=$2 HS=$3 glu=$(((8 * $2 / 3 + 4) / 8 * 8)) H=$((2 * $2 > 384 ? $2 : 2 * $2))
    case $1 in
    transformer | linear-transformer)
        trainer=gpt2
        HS=$((HS ? HS : 64))
        shape=(--model $1 --layers 2 --heads $((C > HS ? C / HS : 1)))
        ;;
    causalrn | linear-causalrn)
        trainer=causalrn
        shape=(--model linear --layers $((8 * C / H)) --hidden $H)
        [ $1 = linear-causalrn ] || shape[1]=quadratic
        ;;
    deltanet)
        trainer=deltanet
        shape=(--layers 2 --heads $((HS ? C / HS : 2)) --hidden $glu --eigenvalues nonneg)
        ;;
    gateloop)
        trainer=gateloop
        shape=(--layers 2 --head-size $((HS ? 1 : C / 4)) --hidden $((4 * C)))
        ;;
    metala | gla)
        trainer=metala
        shape=(--layers 2 --heads $((HS ? C / HS : 2)) --key-channels $C --hidden $glu --conv 2)
        [ $1 = metala ] || shape+=(--key free --augment no)
        ;;
    mamba)
        trainer=mamba
        shape=(--layers 4 --eigenvalues nonneg)
        ;;
    esac
    trainer=./train_$trainer$SUFFIX
    shape+=(--channels "$C" --embed-std 0.02)
}

# recall PROBLEM C LR OPTIONS...: the curve MODEL.PROBLEM.C.LR of each of MODELS: at most STEPS
# steps, 5% of them warm-up, then a cosine to 0; it stops where a training batch is 99% right.
recall() {
    local problem=$1 C=$2 lr=$3 name
    shift 3
    for name in $MODELS; do
        model "$name" "$C" 0
        curve "$name.$problem.$(printf c%04d "$C").$lr" "$trainer" "${shape[@]}" --lr "$lr" \
            --steps "$STEPS" --warmup $((STEPS / 20)) --schedule cosine --lr-min 0 \
            --weight-decay 0.1 --beta1 0.9 --beta2 0.999 --adam-eps 1e-8 --grad-clip 1 \
            --min-length 0 --eval-min-length 0 --stop-at 0.99 "$@"
    done
}

# recalled X Y TITLE [CHECK]: the table of each model's better rate, data/FIGURE.tsv, and the
# picture of what dev/recall.py calls X and Y, from data/FIGURE.csv; CHECK, a function; exit.
recalled() {
    ended
    compgen -G "$FIGURES/data/$FIGURE-*-seed*.csv" >/dev/null ||
        { echo "$FIGURE: no data, nothing to draw" && exit 1; }
    python3 dev/recall.py "$FIGURES/data/$FIGURE-"*-seed*.csv --x "$1" --y "$2" \
        --tsv "$FIGURES/data/$FIGURE.tsv" --csv "$FIGURES/data/$FIGURE.csv" &&
        python3 dev/plot.py "$FIGURES/data/$FIGURE.csv" --columns --svg --optional \
            --out "$FIGURES/$FIGURE.png" --ylim -0.02 1.02 --title "$3" || failed=$((failed + 1))
    [ -z "${4-}" ] || "$4" || failed=$((failed + 1))
    over
}
