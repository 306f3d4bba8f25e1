// tasks_recall.h: tasks that ask for what was said before: multi-query associative recall (MQAR)
// [Zoology, arXiv 2312.04927], five tasks of MAD [arXiv 2403.17844], and a needle in filler. The
// task with the name recall, which asks at every token, is in tasks_state.h.
//
// T is --max-length, but for in-context and noisy, whose length counts the last token, which is
// asked for and not read. --vocab-size V is 0 for the papers'. Evaluations may have another length,
// --eval-max-length. Sequences are fresh, or with --examples N of N, drawn at random, so that a
// training set of N is what it is in the papers. A target is a token; the score is the share that
// is predicted. MAD's number is the mean of that over tokens, `macro` in RESULT.
#ifndef SEQ_DATA_TASKS_RECALL_H
#define SEQ_DATA_TASKS_RECALL_H

#include "tasks_state.h"

// own_shape: of tasks with V symbols and `length` tokens, unless they are told; T is `less` less.
static inline TaskShape own_shape(const TaskOptions *o, int V, int length, size_t less, int causal)
{
    TaskShape shape = stream_shape(o, (size_t)(o->vocab_size ? o->vocab_size : V), length);
    shape.T -= less;
    shape.eval_T -= less;
    shape.prompt = shape.T + shape.eval_T; // none: the answers are no continuation
    shape.causal = causal;
    return shape;
}

// example: the draws of a sequence, or with --examples of the one it repeats.
static inline Draws example(const TaskOptions *o, uint64_t seed, uint64_t stream)
{
    Draws d = {seed, stream, 0};
    if (o->examples && stream < STREAM_EVAL)
        d.stream = STREAM_TRAIN + rand_below(seed, stream, UINT64_MAX, (uint32_t)o->examples);
    return d;
}

// draw_real: the next draw, uniform in [0, 1).
static inline double draw_real(Draws *d)
{
    return rand_uniform(d->seed, d->stream, d->n++);
}

// draw_other: a number from low to high that is none of taken[0], taken[stride], ... (n).
static inline int draw_other(Draws *d, int low, int high, const int *taken, int n, int stride)
{
    for (;;) {
        const int x = draw(d, low, high);
        int i = 0;
        while (i < n && taken[i * stride] != x)
            i++;
        if (i == n)
            return x;
    }
}

// no_targets: T times IGNORE, and inputs of one token.
static inline void no_targets(int *inputs, int *targets, size_t T, int token)
{
    for (size_t t = 0; t < T; t++) {
        inputs[t] = token;
        targets[t] = IGNORE;
    }
}

// ---- mqar: pairs, and then their keys again, at places far more often near than far

// pairs_of: --pairs, by default 4.
static inline int pairs_of(const TaskOptions *o)
{
    return o->pairs ? o->pairs : 4;
}

// mqar_shape: T = --max-length, or 64; V = 8192; as many are asked for as there are pairs.
static inline TaskShape mqar_shape(const TaskOptions *o)
{
    TaskShape shape = own_shape(o, 8192, 64, 0, 0);
    shape.asked = (size_t)pairs_of(o);
    return shape;
}

// mqar_fill: inputs (T) = key, value of n pairs, then filler 0, in which every key comes once more,
// with its value as the target. Keys are different ones of 1..V/2-1, values of V/2..V-1. Slot i of
// 1..(T-2n)/2 is at 2n + 2 (i - 1). Slots are drawn one after another without replacement, with
// probabilities like i^-0.99: each has a clock that rings at such a rate, and the n that ring first
// are taken, in their order.
static inline void mqar_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                             int *targets)
{
    const TaskShape shape = mqar_shape(o);
    const int n = pairs_of(o), V = (int)shape.V, evaluate = stream >= STREAM_EVAL;
    const int T = (int)(evaluate ? shape.eval_T : shape.T), slots = (T - 2 * n) / 2;
    double *rings = (double *)alloc_zero((size_t)slots, sizeof *rings, "mqar");
    Draws d = example(o, seed, stream);
    no_targets(inputs, targets, (size_t)T, 0);
    for (int i = 0; i < slots; i++)
        rings[i] = -log(1 - draw_real(&d)) * pow(i + 1, 0.99);
    for (int j = 0; j < n; j++) {
        inputs[2 * j] = draw_other(&d, 1, V / 2 - 1, inputs, j, 2);
        inputs[2 * j + 1] = draw_other(&d, V / 2, V - 1, inputs + 1, j, 2);
    }
    for (int j = 0; j < n; j++) {
        int first = 0;
        for (int i = 1; i < slots; i++)
            first = rings[i] < rings[first] ? i : first;
        rings[first] = INFINITY;
        inputs[2 * n + 2 * first] = inputs[2 * j];
        targets[2 * n + 2 * first] = inputs[2 * j + 1];
    }
    free(rings);
}

// ---- in-context: pairs of a key and its value in this sequence; noisy: with noise between them

enum { NOISE_TOKENS = 16 };

// Writer: where the next token of a sequence goes. Inputs (T) are the sequence without its last
// token, targets what follows: in training every token, in evaluations what is asked for.
typedef struct {
    int *inputs, *targets, every;
    size_t T, at;
} Writer;

// writer: at the start of a sequence of this shape; all targets IGNORE.
static inline Writer writer(TaskShape shape, uint64_t stream, int *inputs, int *targets)
{
    const int evaluate = stream >= STREAM_EVAL;
    Writer w = {inputs, targets, !evaluate, evaluate ? shape.eval_T : shape.T, 0};
    no_targets(inputs, targets, w.T, 0);
    return w;
}

// put: the next token; `asked`: evaluations ask for it.
static inline void put(Writer *w, int token, int asked)
{
    if (w->at < w->T)
        w->inputs[w->at] = token;
    if (w->at > 0 && (w->every || asked))
        w->targets[w->at - 1] = token;
    w->at++;
}

// in_context_shape: T = --max-length - 1, or 127; V = 16.
static inline TaskShape in_context_shape(const TaskOptions *o)
{
    return own_shape(o, 16, 128, 1, 1);
}

// noisy_shape: the same, V = 32, of which 16 are noise.
static inline TaskShape noisy_shape(const TaskOptions *o)
{
    return own_shape(o, 32, 128, 1, 1);
}

// context_fill: inputs (T) and targets (T) of in-context and noisy: (T+1)/2 pairs of a key and its
// value, which is drawn where the key first comes; the last key has come before. Every other pair,
// but for one that is drawn and always stays, becomes with probability --noise two of `noise`
// tokens. Asked for: values of keys that have come before.
static inline void context_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                int *targets, TaskShape shape, int noise)
{
    Writer w = writer(shape, stream, inputs, targets);
    Draws d = example(o, seed, stream);
    const int V = (int)shape.V - noise, keys = V / 2, pairs = ((int)w.T + 1) / 2;
    const int kept = draw(&d, 0, pairs - 2);
    int *value = (int *)alloc_zero((size_t)keys, sizeof *value, "in-context"), seen = 0, key = 0;
    for (int i = 0; i + 1 < pairs; i++) {
        if (noise && i != kept && draw_real(&d) < o->noise) {
            put(&w, draw(&d, V, V + noise - 1), 0);
            put(&w, draw(&d, V, V + noise - 1), 0);
            continue;
        }
        key = draw(&d, 0, keys - 1);
        const int again = value[key] > 0;
        value[key] = again ? value[key] : draw(&d, keys, V - 1);
        seen += !again;
        put(&w, key, 0);
        put(&w, value[key], again);
    }
    for (int left = draw(&d, 1, seen), i = 0; left; i++) // the left-th of the keys that were there
        if (value[i] > 0 && !--left)
            key = i;
    put(&w, key, 0);
    put(&w, value[key], 1);
    free(value);
}

// in_context_fill: see context_fill.
static inline void in_context_fill(const TaskOptions *o, uint64_t seed, uint64_t stream,
                                   int *inputs, int *targets)
{
    context_fill(o, seed, stream, inputs, targets, in_context_shape(o), 0);
}

// noisy_fill: see context_fill.
static inline void noisy_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                              int *targets)
{
    context_fill(o, seed, stream, inputs, targets, noisy_shape(o), NOISE_TOKENS);
}

// ---- fuzzy: keys and values of one to three tokens

enum { MOTIF = 3 };
typedef struct {
    int n, token[MOTIF];
} Motif;

// motif: n different tokens from low to high.
static inline Motif motif(Draws *d, int n, int low, int high)
{
    Motif x = {n, {0, 0, 0}};
    for (int i = 0; i < n; i++)
        x.token[i] = draw_other(d, low, high, x.token, i, 1);
    return x;
}

// motif_put: append a motif to tokens and asked (n of each); returns how many there are then.
static inline int motif_put(int *tokens, int *asked, int n, Motif x, int ask)
{
    for (int i = 0; i < x.n; i++) {
        tokens[n + i] = x.token[i];
        asked[n + i] = ask;
    }
    return n + x.n;
}

// fuzzy_shape: T = --max-length, or 128; V = 16: 7 keys, 8 values, padding.
static inline TaskShape fuzzy_shape(const TaskOptions *o)
{
    return own_shape(o, 16, 128, 0, 1);
}

// fuzzy_tokens: tokens, asked = a sequence of at most T - 1 without its padding; returns its
// length. A probe, a key and its value, is drawn first. Pairs follow while there are 6 tokens of
// room before the probe is said again; it comes at a place that is drawn, or where its key is
// drawn; one that is drawn late does not come, and its last value cannot be known. In evaluations a
// key has three tokens. Asked for: values of keys that were there before, and the last.
static inline int fuzzy_tokens(Draws *d, int *tokens, int *asked, int T, int V, int evaluate)
{
    const int least = evaluate ? MOTIF : 1, keys = (V - 1) / 2;
    const Motif key = motif(d, draw(d, least, MOTIF), 0, keys - 1);
    const Motif value = motif(d, draw(d, 1, MOTIF), keys, V - 2);
    const int size = key.n + value.n, start = draw(d, 0, T - 2 * size - 1);
    Motif *known = (Motif *)alloc_zero((size_t)T, sizeof *known, "fuzzy"); // keys and their values
    int n = 0, pairs = 0, added = 0;
    while (n < T - size - 2 * MOTIF) {
        const int probe = n >= start && !added;
        const Motif x = probe ? key : motif(d, draw(d, least, MOTIF), 0, keys - 1);
        int i = 0, same = !memcmp(&x, &key, sizeof x);
        while (i < pairs && memcmp(&known[2 * i], &x, sizeof x))
            i++;
        if (i == pairs) {
            known[2 * i] = x;
            known[2 * i + 1] = same ? value : motif(d, draw(d, 1, MOTIF), keys, V - 2);
        }
        added |= same;
        n = motif_put(tokens, asked, n, x, 0);
        n = motif_put(tokens, asked, n, known[2 * i + 1], i < pairs);
        pairs += i == pairs;
    }
    free(known);
    n = motif_put(tokens, asked, n, key, 0);
    return motif_put(tokens, asked, n, value, 1);
}

// fuzzy_fill: inputs (T) and targets (T) of fuzzy_tokens after padding V - 1.
static inline void fuzzy_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                              int *targets)
{
    const TaskShape shape = fuzzy_shape(o);
    Writer w = writer(shape, stream, inputs, targets);
    Draws d = example(o, seed, stream);
    int *tokens = (int *)alloc_zero(2 * w.T, sizeof *tokens, "fuzzy");
    const int n = fuzzy_tokens(&d, tokens, tokens + w.T, (int)w.T, (int)shape.V, !w.every);
    while (w.at + (size_t)n < w.T + 1)
        put(&w, (int)shape.V - 1, 0);
    for (int i = 0; i < n; i++)
        put(&w, tokens[i], tokens[w.T + (size_t)i]);
    free(tokens);
}

// ---- memorization: the value of a key is the same in all sequences, and never shown

// memorization_shape: T = --max-length, or 32; V = 256: 127 keys, 128 values, one that asks.
static inline TaskShape memorization_shape(const TaskOptions *o)
{
    return own_shape(o, 256, 32, 0, 0);
}

// memorization_fill: inputs (T) = key, V - 1, key, V - 1, ...; the target at V - 1 is the value of
// the key: one of (V-1)/2 .. V-2, which a seed of their own shuffles; no two keys have the same.
static inline void memorization_fill(const TaskOptions *o, uint64_t seed, uint64_t stream,
                                     int *inputs, int *targets)
{
    const TaskShape shape = memorization_shape(o);
    const size_t T = stream >= STREAM_EVAL ? shape.eval_T : shape.T;
    const int V = (int)shape.V, keys = (V - 1) / 2, values = V - 1 - keys;
    int *value = (int *)alloc_zero((size_t)values, sizeof *value, "memorization");
    Draws shuffle = {12345, 0, 0}, d = example(o, seed, stream);
    no_targets(inputs, targets, T, V - 1);
    for (int i = 0; i < values; i++) {
        const int j = draw(&shuffle, 0, i);
        value[i] = value[j];
        value[j] = keys + i;
    }
    for (size_t t = 0; t + 1 < T; t += 2) {
        inputs[t] = draw(&d, 0, keys - 1);
        targets[t + 1] = value[inputs[t]];
    }
    free(value);
}

// ---- selective: say the tokens that stand between blanks

// selective_shape: T = --max-length, or 256; V = 16: 14 tokens, blank, one that asks.
static inline TaskShape selective_shape(const TaskOptions *o)
{
    return own_shape(o, 16, 256, 0, 0);
}

// selective_fill: inputs (T) = n = --copies tokens with T - 2n - 1 blanks V - 2, each before one of
// them that is drawn, V - 1, n blanks; targets (T) = the tokens, over those last blanks.
static inline void selective_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                                  int *targets)
{
    const TaskShape shape = selective_shape(o);
    const int T = (int)(stream >= STREAM_EVAL ? shape.eval_T : shape.T), n = o->copies;
    const int V = (int)shape.V;
    int *blanks = (int *)alloc_zero((size_t)n, sizeof *blanks, "selective"); // before each
    Draws d = example(o, seed, stream);
    no_targets(inputs, targets, (size_t)T, V - 2);
    for (int i = 0; i < T - 2 * n - 1; i++)
        blanks[draw(&d, 0, n - 1)]++;
    for (int i = 0, t = 0; i < n; i++, t++) {
        t += blanks[i];
        inputs[t] = targets[T - n + i] = draw(&d, 0, V - 3);
    }
    inputs[T - n - 1] = V - 1;
    free(blanks);
}

// ---- needle: one to four pairs in filler, the key of one at the end

enum { NEEDLE_PAD, NEEDLE_KEY, NEEDLE_KEYS = 64, NEEDLE_VALUE = NEEDLE_KEY + NEEDLE_KEYS,
       NEEDLE_FILLER = NEEDLE_VALUE + NEEDLE_KEYS, NEEDLE_FILLERS = 128,
       NEEDLE_VOCAB = NEEDLE_FILLER + NEEDLE_FILLERS };

// needle_range: lengths: up to 512 in training, from as few as hold the pairs; 2048 in evaluations,
// unless they are told.
static inline Range needle_range(const TaskOptions *o, int evaluate)
{
    Range train = {o->min_length, o->max_length}, eval = {o->eval_min_length, o->eval_max_length};
    train.high = train.high ? train.high : 512;
    train.low = train.low ? train.low : 4 * pairs_of(o);
    eval.high = eval.high ? eval.high : 2048;
    eval.low = eval.low ? eval.low : eval.high;
    return evaluate ? eval : train;
}

// needle_shape: T = the longest; V = 257.
static inline TaskShape needle_shape(const TaskOptions *o)
{
    const Range train = needle_range(o, 0), eval = needle_range(o, 1);
    TaskShape shape = {(size_t)train.high, NEEDLE_VOCAB, (size_t)train.high + (size_t)eval.high, 0,
                       "max_length", train.high, (size_t)eval.high, 1};
    return shape;
}

// needle_fill: inputs (T) = a sequence and padding; its last token is the key of one of 1 to
// --pairs pairs (key, value) that stand in it among fillers, and its target the value. That pair
// stands at a place that is uniform, or in evaluations at --eval-depth of the way; no two share a
// key.
static inline void needle_fill(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                               int *targets)
{
    const TaskShape shape = needle_shape(o);
    const int evaluate = stream >= STREAM_EVAL;
    const Range range = needle_range(o, evaluate);
    Draws d = example(o, seed, stream);
    no_targets(inputs, targets, evaluate ? shape.eval_T : shape.T, NEEDLE_PAD);
    const int n = draw(&d, range.low, range.high), pairs = draw(&d, 1, pairs_of(o)), last = n - 3;
    for (int t = 0; t < n - 1; t++)
        inputs[t] = draw(&d, NEEDLE_FILLER, NEEDLE_VOCAB - 1);
    for (int i = 0; i < pairs; i++) {
        int at = draw(&d, 0, last), key = draw(&d, NEEDLE_KEY, NEEDLE_VALUE - 1);
        if (i == 0 && evaluate && o->eval_depth <= 1)
            at = (int)(o->eval_depth * last + 0.5);
        for (int t = 0; t < n - 1; t++)
            if (inputs[t] == key || (inputs[t] < NEEDLE_FILLER && (t == at || t == at + 1))) {
                at = draw(&d, 0, last); // taken: try another
                key = draw(&d, NEEDLE_KEY, NEEDLE_VALUE - 1);
                t = -1;
            }
        inputs[at] = key;
        inputs[at + 1] = draw(&d, NEEDLE_VALUE, NEEDLE_FILLER - 1);
        if (i == 0) {
            inputs[n - 1] = key;
            targets[n - 1] = inputs[at + 1];
        }
    }
}

// ---- rows of the table of tasks, their words in --task, their options

#define RECALL_TASKS                                                                               \
    {"mqar", "values of keys that were given", "", mqar_shape, mqar_fill, fraction_right, 0, 0},   \
    {"in-context", "the same, all the time", "", in_context_shape, in_context_fill,                \
     fraction_right, 0, 0},                                                                        \
    {"noisy", "the same with noise", "", noisy_shape, noisy_fill, fraction_right, 0, 0},           \
    {"fuzzy", "keys and values of several tokens", "", fuzzy_shape, fuzzy_fill, fraction_right, 0, \
     0},                                                                                           \
    {"memorization", "values that are never shown", "", memorization_shape, memorization_fill,     \
     fraction_right, 0, 0},                                                                        \
    {"selective", "tokens between blanks", "", selective_shape, selective_fill, fraction_right, 0, \
     0},                                                                                           \
    {"needle", "a pair in filler", "", needle_shape, needle_fill, fraction_right, 0, 0}
#define RECALL_WORDS "mqar|in-context|noisy|fuzzy|memorization|selective|needle"

// recall_check: die over sizes that make no sense for the task of this row of TASKS.
static inline void recall_check(const TaskOptions *o, const Task *task)
{
    const int n = pairs_of(o), needle = task->fill == needle_fill;
    const int context = task->fill == in_context_fill || task->fill == noisy_fill; // T is one less
    const int mqar = task->fill == mqar_fill, selective = task->fill == selective_fill;
    const int fuzzy = task->fill == fuzzy_fill, even = mqar || context;
    const int V = mqar ? 2 * n + 2 : task->fill == noisy_fill ? NOISE_TOKENS + 2 : fuzzy ? 7 : 3;
    const int T = mqar || needle ? 4 * n : selective ? 2 * o->copies + 1 : fuzzy ? 13 : 4;
    if (task->fill != memorization_fill && !even && !fuzzy && !selective && !needle)
        return;
    for (int evaluate = 0; evaluate < 2; evaluate++) {
        const TaskShape shape = task->shape(o);
        const int got = (int)(evaluate ? shape.eval_T : shape.T) + context;
        const Range range = needle_range(o, evaluate);
        const char *eval = evaluate ? "eval-" : "";
        if (got < T || (even && got % 2))
            die(EXIT_USAGE, "--%smax-length: expected %sat least %d for --task %s, got %d", eval,
                even ? "an even number of " : "", T, task->name, got);
        if ((int)shape.V < V)
            die(EXIT_USAGE, "--vocab-size: expected at least %d for --task %s, got %d", V,
                task->name, (int)shape.V);
        if (needle && n > NEEDLE_KEYS)
            die(EXIT_USAGE, "--pairs: expected at most %d for --task needle, got %d", NEEDLE_KEYS,
                n);
        if (needle && (range.low < T || range.low > range.high))
            die(EXIT_USAGE, "--%smin-length: expected %d to %d for --task needle, got %d", eval, T,
                range.high, range.low);
    }
}

// recall_options: add the options of these tasks to the command line.
static inline void recall_options(Options *options, TaskOptions *o)
{
    const Option rows[] = {
        {"pairs", OPT_INT, &o->pairs, "0", 0, NEEDLE_KEYS * 64, "pairs", DEFINES_DATA,
         "mqar: in a sequence, needle: at most (up to 64); 0 = 4"},
        {"vocab-size", OPT_INT, &o->vocab_size, "0", 0, 1 << 20, "tokens", DEFINES_DATA,
         "mqar: 0 = 8192; memorization: 256; noisy: 32; in-context, fuzzy, selective: 16"},
        {"noise", OPT_REAL, &o->noise, "0.2", 0, 1, "share", DEFINES_DATA,
         "noisy: of the pairs that are noise"},
        {"copies", OPT_INT, &o->copies, "16", 1, 1 << 20, "tokens", DEFINES_DATA,
         "selective: to be said again"},
        {"examples", OPT_INT, &o->examples, "0", 0, 1e9, "sequences", DEFINES_DATA,
         "mqar to needle: to train on, 0 = every one is fresh"},
        {"eval-depth", OPT_REAL, &o->eval_depth, "2", 0, 2, "share", RUNTIME,
         "needle: where the pair that is asked for stands in evaluations, above 1 = anywhere"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

#endif
