// tasks_state.h: tasks that ask for a state to be tracked: parity, arithmetic modulo 5 without and
// with brackets, products in the groups S5 and Z60 [arXiv 2411.12537]; sums since a reset, and what
// followed a symbol last (GateLoop).
//
// Answers. parity, modular and brackets have one target in a sequence: the model says the answer at
// the last bit (parity) or at `=`. Sequences have lengths --min-length to --max-length, drawn
// uniformly; a length counts the answer, whose place in the inputs holds token 0, and what follows
// is padding. T = --max-length - 1. The score is 1 or 0, the mean of it the accuracy; scaled
// accuracy is 0 for a guess and 1 for all right.
//
// Words. s5 and z60: after BOS come elements x_1..x_n of a group, n = --max-length, and the target
// at each is the product of those so far; at BOS it is BOS. T = n + 1. With --tokens-per-element k
// each element is followed by k - 1 fillers, and its product is asked for at the last of them;
// before the first it is the identity. The score of a sequence is 1 if every target is predicted.
//
// Streams. horizon and recall: T = --max-length, a target at every position; the score is the share
// that is predicted.
//
// Evaluations have lengths of their own, --eval-min-length to --eval-max-length.
#ifndef SEQ_DATA_TASKS_STATE_H
#define SEQ_DATA_TASKS_STATE_H

#include "task.h"

enum { STATE_ANSWER, STATE_WORD };

typedef struct {
    int low, high;
} Range;

// state_range: the lengths of training or of evaluation sequences: what the options say, or the
// paper's: answers 3 to 40 and 40 to 256, words 32 (64 with fillers) and 500.
static inline Range state_range(const TaskOptions *o, int kind, int evaluate)
{
    const int word = kind == STATE_WORD, train_word = o->tokens_per_element > 1 ? 64 : 32;
    Range train = {word ? train_word : 3, word ? train_word : 40};
    Range eval = {word ? 500 : 40, word ? 500 : 256};
    train.low = o->min_length ? o->min_length : train.low;
    train.high = o->max_length ? o->max_length : train.high;
    eval.low = o->eval_min_length ? o->eval_min_length : eval.low;
    eval.high = o->eval_max_length ? o->eval_max_length : eval.high;
    return evaluate ? eval : train;
}

// Draws: the random numbers of one sequence, in order.
typedef struct {
    uint64_t seed, stream, n;
} Draws;

// draw: the next one, uniform from low to high.
static inline int draw(Draws *d, int low, int high)
{
    return low + (int)rand_below(d->seed, d->stream, d->n++, (uint32_t)(high - low + 1));
}

// answer_shape: of tasks with V symbols and one answer, whose lengths are at least `least`.
static inline TaskShape answer_shape(const TaskOptions *o, size_t V, int least)
{
    const int train = state_range(o, STATE_ANSWER, 0).high;
    const int eval = state_range(o, STATE_ANSWER, 1).high;
    const size_t T = (size_t)(train > least ? train : least) - 1;
    const size_t eval_T = (size_t)(eval > least ? eval : least) - 1;
    TaskShape shape = {T, V, T + eval_T, 0, "max_length", train, eval_T, 0};
    return shape;
}

// answer_begin: the draws of a sequence; inputs (T) = padding, targets (T) = none; *range = the
// lengths of training or of evaluation.
static inline Draws answer_begin(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                 int *targets, TaskShape shape, int padding, Range *range)
{
    const int evaluate = stream >= STREAM_EVAL;
    Draws d = {seed, stream, 0};
    *range = state_range(o, STATE_ANSWER, evaluate);
    for (size_t t = 0; t < (evaluate ? shape.eval_T : shape.T); t++) {
        inputs[t] = padding;
        targets[t] = IGNORE;
    }
    return d;
}

// ---- parity: is the number of ones odd?

enum { PARITY_PAD, PARITY_ZERO, PARITY_ONE, PARITY_VOCAB };

// parity_shape: T = --max-length - 1, V = 3.
static inline TaskShape parity_shape(const TaskOptions *o)
{
    return answer_shape(o, PARITY_VOCAB, 3);
}

// parity_fill: inputs (T) = length - 1 bits, padding; the target at the last bit is the sum of the
// bits modulo 2, as a bit.
static inline void parity_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                               int *targets)
{
    Range range;
    Draws d = answer_begin(o, seed, stream, inputs, targets, parity_shape(o), PARITY_PAD, &range);
    const int bits = draw(&d, range.low, range.high) - 1;
    int ones = 0;
    for (int t = 0; t < bits; t++) {
        const int bit = draw(&d, 0, 1);
        ones += bit;
        inputs[t] = PARITY_ZERO + bit;
    }
    targets[bits - 1] = PARITY_ZERO + ones % 2;
}

// ---- modular: digits with + - * between them, modulo 5, * before + and -

enum { MOD = 5 };
enum { MODULAR_PAD, MODULAR_PLUS, MODULAR_MINUS, MODULAR_TIMES, MODULAR_EQUALS, MODULAR_DIGIT,
       MODULAR_VOCAB = MODULAR_DIGIT + MOD };

// modular_shape: T = --max-length - 1, V = 10.
static inline TaskShape modular_shape(const TaskOptions *o)
{
    return answer_shape(o, MODULAR_VOCAB, 3);
}

// modular_fill: inputs (T) = r - 1 digits with r - 2 operators between them, =, padding; the target
// at = is the value. r is uniform, half the range's lengths, rounded up; the length is 2 r - 1.
static inline void modular_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                int *targets)
{
    Range range;
    Draws d = answer_begin(o, seed, stream, inputs, targets, modular_shape(o), MODULAR_PAD, &range);
    const int equals = 2 * draw(&d, (range.low + 1) / 2, (range.high + 1) / 2) - 3;
    int sum = 0, sign = 1, product = 1; // the value so far is sum + sign product
    for (int t = 0; t < equals; t++) {
        if (t % 2 == 0) {
            const int digit = draw(&d, 0, MOD - 1);
            inputs[t] = MODULAR_DIGIT + digit;
            product = product * digit % MOD;
            continue;
        }
        inputs[t] = draw(&d, MODULAR_PLUS, MODULAR_TIMES);
        if (inputs[t] == MODULAR_TIMES)
            continue;
        sum = (sum + sign * product + MOD) % MOD;
        sign = inputs[t] == MODULAR_PLUS ? 1 : -1;
        product = 1;
    }
    inputs[equals] = MODULAR_EQUALS;
    targets[equals] = MODULAR_DIGIT + (sum + sign * product + MOD) % MOD;
}

// ---- brackets: the same with brackets around every operation, and negative numbers

enum { BRACKETS_PLUS = MOD, BRACKETS_MINUS, BRACKETS_TIMES, BRACKETS_OPEN, BRACKETS_CLOSE,
       BRACKETS_EQUALS, BRACKETS_PAD, BRACKETS_VOCAB };

// brackets_shape: T = --max-length - 1, V = 12.
static inline TaskShape brackets_shape(const TaskOptions *o)
{
    return answer_shape(o, BRACKETS_VOCAB, 5);
}

// brackets_expression: write an expression of m >= 1 tokens to `to`; returns its value, 0 to 4.
static inline int brackets_expression(Draws *d, int *to, int m, int multiply)
{
    if (m < 5) { // d, -d, (d), (-d)
        const int digit = draw(d, 0, MOD - 1), open = m > 2, minus = m % 2 == 0;
        if (open) {
            to[0] = BRACKETS_OPEN;
            to[m - 1] = BRACKETS_CLOSE;
        }
        if (minus)
            to[open] = BRACKETS_MINUS;
        to[open + minus] = digit;
        return minus ? (MOD - digit) % MOD : digit;
    }
    const int left = draw(d, 1, m - 4);
    to[0] = BRACKETS_OPEN;
    to[m - 1] = BRACKETS_CLOSE;
    const int a = brackets_expression(d, to + 1, left, multiply);
    const int sign = to[1 + left] = draw(d, BRACKETS_PLUS, multiply ? BRACKETS_TIMES
                                                                    : BRACKETS_MINUS);
    const int b = brackets_expression(d, to + 2 + left, m - 3 - left, multiply);
    return sign == BRACKETS_TIMES ? a * b % MOD
                                  : (sign == BRACKETS_PLUS ? a + b : a + MOD - b) % MOD;
}

// brackets_fill: inputs (T) = an expression of length - 3 tokens, =, padding; the target at = is
// the value. Lengths below 5 become 5.
static inline void brackets_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                 int *targets)
{
    Range range;
    Draws d = answer_begin(o, seed, stream, inputs, targets, brackets_shape(o), BRACKETS_PAD,
                           &range);
    const int drawn = draw(&d, range.low, range.high), equals = (drawn > 5 ? drawn : 5) - 3;
    targets[equals] = brackets_expression(&d, inputs, equals, o->multiply);
    inputs[equals] = BRACKETS_EQUALS;
    inputs[equals + 1] = 0; // the answer's place
}

// ---- s5: products of permutations of five points, z60: sums modulo 60

enum { S5_POINTS = 5, S5_ORDER = 120, Z60_ORDER = 60, S5_SWAPS = 11, S5_TRIPLES = 31 };
enum { ELEMENTS_ALL, ELEMENTS_SWAPS, ELEMENTS_TRIPLES };
enum { WORD_PAD, WORD_BOS, WORD_UNK, WORD_EOS, WORD_SEP, WORD_CLS, WORD_MASK, WORD_SPECIALS };

// The permutations that move at most two points, and then those that move three.
static const unsigned char S5_FEW[S5_TRIPLES] = {0,  1,  2,  5,  6,  14, 21, 24, 54, 80, 105,
                                                 3,  4,  8,  11, 12, 15, 19, 20, 30, 38, 45,
                                                 48, 56, 59, 74, 78, 81, 99, 103, 104};

// s5_points: the images of 0..4 under the permutation of this rank in lexicographic order.
static inline void s5_points(int rank, int points[S5_POINTS])
{
    int left[S5_POINTS] = {0, 1, 2, 3, 4};
    for (int i = 0, block = S5_ORDER; i < S5_POINTS; i++) {
        block /= S5_POINTS - i;
        const int k = rank / block;
        rank %= block;
        points[i] = left[k];
        for (int j = k; j + 1 < S5_POINTS; j++)
            left[j] = left[j + 1];
    }
}

// s5_product: the rank of the permutation y and then x: the point j goes to x(y(j)).
static inline int s5_product(int y, int x)
{
    int y_points[S5_POINTS], x_points[S5_POINTS], rank = 0;
    s5_points(y, y_points);
    s5_points(x, x_points);
    for (int i = 0; i < S5_POINTS; i++) { // each digit: how many of the points after it are smaller
        int smaller = 0;
        for (int j = i + 1; j < S5_POINTS; j++)
            smaller += x_points[y_points[j]] < x_points[y_points[i]];
        rank = rank * (S5_POINTS - i) + smaller;
    }
    return rank;
}

// word_shape: T = --max-length + 1; V = the elements, a filler if there is one, and special tokens.
static inline TaskShape word_shape(const TaskOptions *o, int order)
{
    const Range train = state_range(o, STATE_WORD, 0), eval = state_range(o, STATE_WORD, 1);
    const size_t T = (size_t)train.high + 1, eval_T = (size_t)eval.high + 1;
    TaskShape shape = {T, (size_t)(order + (o->tokens_per_element > 1) + WORD_SPECIALS), T + eval_T,
                       0, "max_length", train.high, eval_T, 0};
    return shape;
}

// s5_shape: V = 127, with fillers 128.
static inline TaskShape s5_shape(const TaskOptions *o)
{
    return word_shape(o, S5_ORDER);
}

// z60_shape: V = 67, with fillers 68.
static inline TaskShape z60_shape(const TaskOptions *o)
{
    return word_shape(o, Z60_ORDER);
}

// word_fill: inputs (T) = BOS and a word of the group with so many elements; targets (T) = BOS and
// the products.
static inline void word_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                             int *targets, int order)
{
    const int n = state_range(o, STATE_WORD, stream >= STREAM_EVAL).high;
    const int every = o->tokens_per_element, s5 = order == S5_ORDER;
    const int few = !s5 || o->elements == ELEMENTS_ALL       ? 0
                    : o->elements == ELEMENTS_SWAPS ? S5_SWAPS
                                                    : S5_TRIPLES;
    Draws d = {seed, stream, 0};
    int product = 0, x = 0;
    inputs[0] = targets[0] = order + (every > 1) + WORD_BOS;
    for (int i = 0; i < n; i++) {
        if (i % every == 0) {
            x = draw(&d, 0, few ? few - 1 : order - 1);
            x = few ? S5_FEW[x] : x;
        }
        if (i % every == every - 1)
            product = s5 ? s5_product(product, x) : (product + x) % Z60_ORDER;
        inputs[i + 1] = i % every ? order : x;
        targets[i + 1] = product;
    }
}

// s5_fill: a word of permutations: all, those that move at most two points, or at most three.
static inline void s5_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                           int *targets)
{
    word_fill(o, seed, stream, inputs, targets, S5_ORDER);
}

// z60_fill: a word of numbers modulo 60.
static inline void z60_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                            int *targets)
{
    word_fill(o, seed, stream, inputs, targets, Z60_ORDER);
}

// word_score: 1 if every target (T) is predicted.
static inline double word_score(const int *targets, const int *predictions, size_t T)
{
    return fraction_right(targets, predictions, T) == 1;
}

// ---- horizon: the sum of the digits since the last reset, modulo --modulus; recall: the symbol
// that followed this one when it came last

enum { HORIZON_DIGITS = 5, HORIZON_RESET = HORIZON_DIGITS, HORIZON_INPUTS };
enum { RECALL_SYMBOLS = 30, RECALL_UNKNOWN = RECALL_SYMBOLS, RECALL_PAD, RECALL_VOCAB };

// stream_shape: of tasks with V symbols; T = --max-length, or `length`; in evaluations what they
// are told, or the same.
static inline TaskShape stream_shape(const TaskOptions *o, size_t V, int length)
{
    const int train = o->max_length ? o->max_length : length;
    const int eval = o->eval_max_length ? o->eval_max_length : train;
    TaskShape shape = {(size_t)train, V, (size_t)(train + eval), 0, "max_length", train,
                       (size_t)eval, 0};
    return shape;
}

// horizon_shape: V = --modulus, but at least the five digits and the reset.
static inline TaskShape horizon_shape(const TaskOptions *o)
{
    const int V = o->modulus > HORIZON_INPUTS ? o->modulus : HORIZON_INPUTS;
    return stream_shape(o, (size_t)V, 128);
}

// horizon_fill: inputs (T) = digits 0 to 4, and resets at --resets places of 1..T-1 (all, where
// there are fewer); targets (T) = the sum of the digits from the last reset, or the start, to here.
static inline void horizon_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                int *targets)
{
    const TaskShape shape = horizon_shape(o);
    const int T = (int)(stream >= STREAM_EVAL ? shape.eval_T : shape.T);
    Draws d = {seed, stream, 0};
    int resets = o->resets, sum = 0;
    for (int t = 0; t < T; t++) { // each place is a reset with the chance that is left to it
        const int reset = t > 0 && draw(&d, 1, T - t) <= resets;
        inputs[t] = reset ? HORIZON_RESET : draw(&d, 0, HORIZON_DIGITS - 1);
        sum = reset ? 0 : (sum + inputs[t]) % o->modulus;
        targets[t] = sum;
        resets -= reset;
    }
}

// recall_shape: V = 32: 30 symbols, unknown, padding (never seen).
static inline TaskShape recall_shape(const TaskOptions *o)
{
    return stream_shape(o, RECALL_VOCAB, 100);
}

// recall_fill: inputs (T) = symbols; targets (T) = the symbol after the last earlier place of the
// same symbol, or unknown. Its author's test sets were parts of the training set; these are not.
static inline void recall_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                               int *targets)
{
    const TaskShape shape = recall_shape(o);
    const size_t T = stream >= STREAM_EVAL ? shape.eval_T : shape.T;
    Draws d = {seed, stream, 0};
    int after[RECALL_SYMBOLS];
    for (int i = 0; i < RECALL_SYMBOLS; i++)
        after[i] = RECALL_UNKNOWN;
    for (size_t t = 0; t < T; t++) {
        inputs[t] = draw(&d, 0, RECALL_SYMBOLS - 1);
        if (t)
            after[inputs[t - 1]] = inputs[t];
        targets[t] = after[inputs[t]];
    }
}

// answer_check: die over lengths of a task with one answer that make no sense.
static inline void answer_check(const TaskOptions *o, const char *name)
{
    for (int evaluate = 0; evaluate < 2; evaluate++) {
        const Range r = state_range(o, STATE_ANSWER, evaluate);
        const char *eval = evaluate ? "eval-" : "";
        if (r.low < 3)
            die(EXIT_USAGE, "--%smin-length: expected at least 3 for --task %s, got %d", eval, name,
                r.low);
        if (r.low > r.high)
            die(EXIT_USAGE, "--%smin-length and --%smax-length: expected a range, got %d to %d",
                eval, eval, r.low, r.high);
    }
}

// stream_check: die over lengths, and of horizon numbers of resets, that make no sense in a stream.
static inline void stream_check(const TaskOptions *o, const Task *task)
{
    const TaskShape shape = task->shape(o);
    const size_t shorter = shape.T < shape.eval_T ? shape.T : shape.eval_T;
    const char *eval = shape.T > shorter ? "eval-" : "";
    if (shorter < 2)
        die(EXIT_USAGE, "--%smax-length: expected at least 2 for --task %s, got 1", eval,
            task->name);
    if (task->restart && (size_t)o->resets >= shorter)
        die(EXIT_USAGE, "--resets %d: expected at most %zu, one fewer than tokens in a sequence\n"
            "hint: or a larger --%smax-length", o->resets, shorter - 1, eval);
}

// state_check: die over lengths that make no sense for the task, one of STATE_TASKS.
static inline void state_check(const TaskOptions *o, const Task *task)
{
    if (task->chance > 0)
        answer_check(o, task->name);
    else if (task->fill == horizon_fill || task->fill == recall_fill)
        stream_check(o, task);
}

// ---- rows of the table of tasks, their words in --task, their options

#define STATE_TASKS                                                                                \
    {"parity", "is the number of ones odd?", "_01", parity_shape, parity_fill, fraction_right,     \
     0.5, 0},                                                                                      \
    {"modular", "digits and + - * modulo 5", "_+-*=01234", modular_shape, modular_fill,            \
     fraction_right, 0.2, 0},                                                                      \
    {"brackets", "the same with brackets", "01234+-*()=_", brackets_shape, brackets_fill,          \
     fraction_right, 0.2, 0},                                                                      \
    {"s5", "products of permutations of five", "", s5_shape, s5_fill, word_score, 0, 0},           \
    {"z60", "sums modulo 60", "", z60_shape, z60_fill, word_score, 0, 0},                          \
    {"horizon", "sums since the last reset", "", horizon_shape, horizon_fill, fraction_right, 0,   \
     HORIZON_RESET},                                                                               \
    {"recall", "what followed this symbol last", "", recall_shape, recall_fill, fraction_right, 0, \
     0}
#define STATE_WORDS "parity|modular|brackets|s5|z60|horizon|recall"

// state_options: add the options of these tasks to the command line.
static inline void state_options(Options *options, TaskOptions *o)
{
    const Option rows[] = {
        {"tokens-per-element", OPT_INT, &o->tokens_per_element, "1", 1, 64, "tokens", DEFINES_DATA,
         "s5, z60: an element and fillers"},
        {"modulus", OPT_INT, &o->modulus, "10", 2, 256, "number", DEFINES_DATA,
         "horizon: of the sums"},
        {"multiply", OPT_CHOICE, &o->multiply, "yes", 0, 0, "no|yes", DEFINES_DATA,
         "brackets: with * too"},
        {"elements", OPT_CHOICE, &o->elements, "all", 0, 0, "all|swaps|triples", DEFINES_DATA,
         "s5: all, or those that move at most 2 or 3 points"},
        {"resets", OPT_INT, &o->resets, "3", 0, 1 << 20, "resets", DEFINES_DATA,
         "horizon: in a sequence"},
        {"min-length", OPT_INT, &o->min_length, "0", 0, 1 << 20, "tokens", DEFINES_DATA,
         "parity, modular, brackets: the shortest, 0 = 3; needle: 0 = 4 a pair"},
        {"max-length", OPT_INT, &o->max_length, "0", 0, 1 << 20, "tokens", DEFINES_DATA,
         "the longest, 0 = 40; s5, z60: 32, 64 with fillers; horizon: 128; recall: 100"},
        {"eval-min-length", OPT_INT, &o->eval_min_length, "0", 0, 1 << 20, "tokens", RUNTIME,
         "of an evaluation, 0 = 40; needle: 0 = the longest"},
        {"eval-max-length", OPT_INT, &o->eval_max_length, "0", 0, 1 << 20, "tokens", RUNTIME,
         "of an evaluation, 0 = 256; s5, z60: 500; horizon, recall: as in training"},
        {"curve", OPT_STRING, &o->curve, NULL, 0, 0, "FILE", RUNTIME,
         "write the last evaluation's accuracy by tokens read [horizon: since a reset]"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

#endif
