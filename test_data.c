// test_data.c: tests of data/tasks.h: what the tasks look like, and that nothing but the seed and
// the number of a sequence decides what it holds. Recall: test_recall.c, text: test_text.c.
//
//     gcc -O2 -fopenmp -Wall -Wextra test_data.c -o build/test_data -lm && build/test_data
//
// [copying]  layout, letters, score, against a second reading of specs/causalrn.md, section 2
// [state]    parity, arithmetic, words of groups, sums since a reset, recall: every answer derived
//            again, lengths, scores
// [batch]    the same sequences in batches of any size, made by any number of threads
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "data/tasks.h"
#include "dev/testing.h"
#include "util/safetensors.h"
#include "util/threads.h"

// copying_batch: sequences number * B to number * B + B - 1 of copying; free with batch_free.
static Batch copying_batch(int string_size, uint64_t seed, uint64_t stream, long number, size_t B)
{
    Batch batch;
    const TaskOptions options = {.string_size = string_size};
    batch_alloc(&batch, B, TASKS[0].shape(&options).T);
    task_batch(&TASKS[0], &options, seed, stream, number, &batch);
    return batch;
}

// checksum: 16 hexadecimal digits for n tokens, by the formula of util/safetensors.h; in `text`.
static const char *checksum(const int *tokens, size_t n, char *text)
{
    StSum sum = {0, 0, {0}, 0};
    st_sum_add(&sum, tokens, n * sizeof *tokens);
    st_sum_hex(&sum, text);
    return text;
}

// ------------------------------------------------------------------------------------------------
// [copying]

// copying_wrong: what is wrong with one sequence, NULL if nothing: the targets follow from the
// inputs, and both have the layout of the paper. It shares no line with copying_fill.
static const char *copying_wrong(const int *inputs, const int *targets, int S)
{
    for (int t = 0; t < 2 * (S + 1); t++) {
        int letter = inputs[t] >= 3 && inputs[t] <= 28;
        int next = t == 2 * S + 1 ? 2 : inputs[t + 1]; // the end of the string is EOS
        if (t == 0 ? inputs[t] != 0 : t == S + 1 ? inputs[t] != 1 : !letter)
            return "inputs are not BOS, letters, SEP, letters";
        if (t > S + 1 && inputs[t] != inputs[t - S - 1])
            return "the second string is not the first";
        if (targets[t] != (t <= S ? -1 : next))
            return "a target is not the next input, or is one before SEP";
    }
    return NULL;
}

// test_copying_layout: shape and layout, for strings of one letter and more.
static void test_copying_layout(void)
{
    const int sizes[] = {1, 2, 3, 16, 128};
    CHECK(!strcmp(TASKS[0].name, "copying"), "the first task is %s", TASKS[0].name);
    for (int k = 0; k < 5; k++) {
        int S = sizes[k];
        TaskOptions options = {.string_size = S};
        TaskShape shape = TASKS[0].shape(&options);
        CHECK(shape.T == 2 * (size_t)S + 2 && shape.V == 29 && shape.prompt == (size_t)S + 2 &&
                  shape.causal && shape.size == S && !strcmp(shape.size_name, "string_size"),
              "S=%d: T %zu, V %zu, prompt %zu, causal %d", S, shape.T, shape.V, shape.prompt,
              shape.causal);
        CHECK(strlen(TASKS[0].symbols) == shape.V, "%zu symbols", strlen(TASKS[0].symbols));
        Batch batch = copying_batch(S, 1, STREAM_TRAIN, 0, 50);
        size_t supervised = 0;
        for (size_t i = 0; i < 50 * shape.T; i++)
            supervised += batch.targets[i] != IGNORE;
        CHECK(supervised == 50 * ((size_t)S + 1), "S=%d: %zu targets in 50 rows", S, supervised);
        for (size_t b = 0; b < 50; b++) {
            const char *wrong =
                copying_wrong(batch.inputs + b * shape.T, batch.targets + b * shape.T, S);
            CHECK(!wrong, "S=%d, sequence %zu: %s", S, b, wrong);
        }
        batch_free(&batch);
    }
}

// test_copying_golden: fixed seed, fixed sequences (F11): checksums from a Python program that
// shares no code with this one.
static void test_copying_golden(void)
{
    static const struct {
        int string_size;
        uint64_t seed, stream;
        long number;
        size_t B;
        const char *inputs, *targets;
    } rows[] = {
        {1, 1, STREAM_TRAIN, 0, 4, "faefef8e969edfdf", "72772306a6010dc4"},
        {16, 1, STREAM_TRAIN, 0, 32, "9a3ace761099bc39", "f8f08056d8220aa0"},
        {16, 1, STREAM_EVAL, 0, 32, "32470a8efe5e1b88", "36d2d676d6c5bf1c"},
        {16, 0, STREAM_TRAIN, 3, 7, "d94bd98670fd2cfd", "c013bf3c46f1c224"},
        {128, UINT64_MAX, STREAM_TRAIN, 1000, 5, "e2d72a892147086b", "ec6fb6f1f01054a2"},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        char inputs[17], targets[17];
        Batch batch = copying_batch(rows[k].string_size, rows[k].seed, rows[k].stream,
                                    rows[k].number, rows[k].B);
        checksum(batch.inputs, batch.B * batch.T, inputs);
        checksum(batch.targets, batch.B * batch.T, targets);
        CHECK(!strcmp(inputs, rows[k].inputs) && !strcmp(targets, rows[k].targets),
              "row %zu: expected %s and %s, got %s and %s", k, rows[k].inputs, rows[k].targets,
              inputs, targets);
        batch_free(&batch);
    }
}

// test_copying_letters: every letter is as frequent at every position, and after every letter:
// chi-square of 26 counts (25 degrees of freedom: 25 +- 7), and of 676 pairs (675 +- 37).
static void test_copying_letters(void)
{
    enum { S = 8, N = 100000 };
    static double count[S][26], pairs[26][26];
    double worst = 0, chi_pairs = 0;
    Batch batch = copying_batch(S, 1, STREAM_TRAIN, 0, N);
    for (size_t b = 0; b < N; b++)
        for (int i = 0; i < S; i++) {
            int letter = batch.inputs[b * batch.T + 1 + (size_t)i] - 3;
            count[i][letter]++;
            if (i)
                pairs[batch.inputs[b * batch.T + (size_t)i] - 3][letter]++;
        }
    for (int i = 0; i < S; i++) {
        double chi = 0, expected = N / 26.0;
        for (int a = 0; a < 26; a++)
            chi += (count[i][a] - expected) * (count[i][a] - expected) / expected;
        worst = chi > worst ? chi : worst;
    }
    for (int a = 0; a < 26 * 26; a++) {
        double expected = N * (S - 1) / 676.0, d = pairs[a / 26][a % 26] - expected;
        chi_pairs += d * d / expected;
    }
    CHECK(worst < 65, "letters: chi-square up to %.1f, expected about 25, below 65", worst);
    CHECK(chi_pairs < 860, "pairs: chi-square %.1f, expected about 675, below 860", chi_pairs);
    batch_free(&batch);
}

// score: copying_score of predictions written as text, like "ab$"; '.' is a position before SEP.
static double score(const char *targets, const char *predictions)
{
    static const char symbols[] = "^|$abcdefghijklmnopqrstuvwxyz";
    int target[32], prediction[32];
    size_t T = strlen(targets);
    for (size_t t = 0; t < T; t++) {
        target[t] = targets[t] == '.' ? -1 : (int)(strchr(symbols, targets[t]) - symbols);
        prediction[t] = (int)(strchr(symbols, predictions[t]) - symbols);
    }
    return TASKS[0].score(target, prediction, T);
}

// test_copying_score: the accuracy of the paper, by hand.
static void test_copying_score(void)
{
    static const struct {
        const char *targets, *predictions;
        double score;
        const char *why;
    } rows[] = {
        {"....abc$", "zzzzabc$", 1, "all right"},
        {"....abc$", "$$$$abc$", 1, "what is said before SEP does not count, EOS neither"},
        {"....abc$", "zzzzabx$", 2 / 3.0, "one letter wrong"},
        {"....abc$", "zzzzbca$", 0, "every letter wrong"},
        {"....abc$", "zzzz|^c$", 1 / 3.0, "BOS and SEP are wrong letters"},
        {"....abc$", "zzzza$c$", 0, "EOS too early"},
        {"....abc$", "zzzz$bc$", 0, "EOS at once"},
        {"....abc$", "zzzzabcd", 0, "no EOS"},
        {"....abc$", "zzzzab$c", 0, "EOS before the last letter, not after"},
        {"....aaa$", "zzzzaaa$", 1, "equal letters"},
        {"..a$", "zza$", 1, "one letter, right"},
        {"..a$", "zzb$", 0, "one letter, wrong"},
        {"..a$", "zz$$", 0, "one letter, EOS"},
        {"..a$", "zzaa", 0, "one letter, no EOS"},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        double got = score(rows[k].targets, rows[k].predictions);
        CHECK(got == rows[k].score, "%s: expected %g, got %g", rows[k].why, rows[k].score, got);
    }
    Batch batch = copying_batch(4, 1, STREAM_TRAIN, 0, 4); // the mean over sequences
    memcpy(batch.predictions, batch.targets, 4 * batch.T * sizeof(int));
    CHECK(task_score(&TASKS[0], &batch, 4) == 1, "predictions = targets score 1");
    batch.predictions[2 * batch.T - 1] = COPY_BOS; // sequence 1: no EOS
    batch.predictions[2 * batch.T + 5] = COPY_SEP; // sequence 2: 3 of 4
    batch.predictions[4 * batch.T - 2] = COPY_EOS; // sequence 3: early EOS
    CHECK(task_score(&TASKS[0], &batch, 4) == 1.75 / 4, "1, 0, 3/4, 0: the mean is %g",
          task_score(&TASKS[0], &batch, 4));
    CHECK(task_score(&TASKS[0], &batch, 1) == 1, "of the first sequence only");
    batch_free(&batch);
}

// ------------------------------------------------------------------------------------------------
// [state]

enum { PARITY = 2, MODULAR, BRACKETS, S5, Z60, HORIZON, RECALL, STATE_END }; // rows of TASKS

// state_batch: B sequences of a state task; free with batch_free.
static Batch state_batch(int task, const TaskOptions *o, uint64_t seed, uint64_t stream, size_t B)
{
    Batch batch;
    batch_alloc(&batch, B, TASKS[task].shape(o).T);
    task_batch(&TASKS[task], o, seed, stream, 0, &batch);
    return batch;
}

// state_options_of: the defaults, with lengths.
static TaskOptions state_options_of(int min, int max, int eval_min, int eval_max)
{
    TaskOptions o = {.min_length = min, .max_length = max, .eval_min_length = eval_min,
                     .eval_max_length = eval_max, .multiply = 1, .tokens_per_element = 1,
                     .modulus = 10, .resets = 3};
    return o;
}

// parsed: the value modulo 5 of a sum, at level 1 of a product, at level 2 of a digit, -digit or
// what stands in brackets; *at moves past it.
static int parsed(const char **at, int level)
{
    if (level == 2) {
        int minus = **at == '-', value;
        *at += minus;
        if (*(*at)++ == '(') {
            value = parsed(at, 0);
            *at += **at == ')';
        } else
            value = (*at)[-1] - '0';
        return minus ? (5 - value) % 5 : value;
    }
    int value = parsed(at, level + 1);
    while (**at && strchr(level ? "*" : "+-", **at)) {
        const char op = *(*at)++;
        const int other = parsed(at, level + 1);
        value = (op == '*' ? value * other : op == '+' ? value + other : value - other + 5) % 5;
    }
    return value;
}

// answer_wrong: what is wrong with a sequence of one answer, NULL if nothing; *length = its length.
// It shares no line with the functions that make it.
static const char *answer_wrong(int task, const int *inputs, const int *targets, int T, int *length)
{
    const char *symbols = TASKS[task].symbols, *at;
    char text[512] = "";
    int last = -1, ones = 0;
    for (int t = 0; t < T; t++) {
        if (targets[t] != -1 && last >= 0)
            return "two targets";
        last = targets[t] != -1 ? t : last;
        text[t] = symbols[inputs[t]];
    }
    if (last < 0)
        return "no target";
    *length = last + 2 + (task == BRACKETS);
    const char answer = symbols[targets[last]];
    for (int t = last + 1; t < T; t++) // the answer's place holds token 0
        if (text[t] != (task == BRACKETS && t > last + 1 ? '_' : symbols[0]))
            return "not padding after the answer";
    text[last + (task == PARITY)] = 0;
    if (task == PARITY) {
        for (at = text; *at; at++)
            ones += *at == '1';
        if (strspn(text, "01") != strlen(text))
            return "not bits";
        return answer == '0' + ones % 2 ? NULL : "not the parity";
    }
    if (inputs[last] != strchr(symbols, '=') - symbols)
        return "the target is not at =";
    if (task == MODULAR)
        for (int t = 0; text[t]; t++)
            if (!strchr(t % 2 ? "+-*" : "01234", text[t]))
                return "not digits and operators";
    at = text;
    const int value = parsed(&at, 0);
    return *at ? "not an expression" : answer == '0' + value ? NULL : "not the value";
}

// test_answers: layouts and answers of parity, modular and brackets, trained and beyond; every
// length of the range comes, no other.
static void test_answers(void)
{
    static const int ranges[][4] = {{0, 0, 0, 0}, {3, 3, 3, 5}, {4, 9, 2000, 3}, {7, 40, 40, 256}};
    enum { B = 3000 };
    for (int k = 0; k < 4 * 3 * 2 * 2; k++) {
        const int task = PARITY + k / 2 % 3, evaluate = k & 1, *r = ranges[k / 12];
        if (k / 12 == 2 && evaluate) // that range is refused, see test_state_refused
            continue;
        TaskOptions o = state_options_of(r[0], r[1], r[2], r[3]);
        o.multiply = k / 6 & 1;
        const int low = evaluate ? (r[2] ? r[2] : 40) : r[0] ? r[0] : 3;
        const int high = evaluate ? (r[3] ? r[3] : 256) : r[1] ? r[1] : 40;
        Batch batch = state_batch(task, &o, 1, evaluate ? STREAM_EVAL : STREAM_TRAIN, B);
        const char *wrong = NULL;
        int seen[512] = {0}, length = 0, times = 0, missing = 0, outside = 0;
        for (size_t b = 0; b < batch.B && !wrong; b++) {
            const int *inputs = batch.inputs + b * batch.T;
            wrong = answer_wrong(task, inputs, batch.targets + b * batch.T, (int)batch.T, &length);
            seen[length]++;
            for (size_t t = 0; t < batch.T; t++)
                times += task == BRACKETS && inputs[t] == 7;
        }
        for (int i = 0; i < 512; i++) {
            const int least = task == BRACKETS ? (low > 5 ? low : 5) : low;
            const int most = task == BRACKETS && high < 5 ? 5 : high;
            const int may = i >= least && i <= most && (task != MODULAR || i % 2);
            const int odd = task == MODULAR && low % 2 == 0 && i == low - 1; // 2 r - 1, r = low / 2
            missing += may && !seen[i] && batch.B == B;
            outside += !may && !odd && seen[i];
        }
        CHECK(!wrong, "%s, %d to %d: %s", TASKS[task].name, low, high, wrong ? wrong : "");
        CHECK(!missing && !outside, "%s, %d to %d: %d lengths missing, %d outside",
              TASKS[task].name, low, high, missing, outside);
        CHECK(task != BRACKETS || high < 8 || !times == !o.multiply, "brackets: %d times *", times);
        CHECK(batch.T == (size_t)(task == BRACKETS && high < 5 ? 5 : high) - 1, "T = %zu", batch.T);
        batch_free(&batch);
    }
}

// word_wrong: what is wrong with a word: its products derived by moving five points, or by adding.
static const char *word_wrong(const int *inputs, const int *targets, int n, int order, int every,
                              int moved)
{
    static int points[120][5];
    int bos = order + (every > 1) + 1, place[5] = {0, 1, 2, 3, 4}, sum = 0, rank = 0;
    for (int code = 1234; code <= 43210; code++) { // five different digits, in rising order
        int d[5], digits = 0;
        for (int i = 4, rest = code; i >= 0; i--, rest /= 10)
            digits |= 1 << (d[i] = rest % 10);
        if (digits == 31)
            memcpy(points[rank++], d, sizeof d);
    }
    if (rank != 120 || inputs[0] != bos || targets[0] != bos)
        return "no BOS";
    for (int i = 1, x = 0; i <= n; i++) {
        int off = 0;
        if ((i - 1) % every ? inputs[i] != order : inputs[i] < 0 || inputs[i] >= order)
            return "an element or a filler is out of place";
        x = inputs[i] < order ? inputs[i] : x;
        for (int j = 0; j < 5 && order == 120; j++)
            off += points[x][j] != j;
        if (off > moved)
            return "an element moves too many points";
        if (i % every == 0) {
            sum = (sum + x) % 60;
            for (int j = 0; j < 5; j++)
                place[j] = points[x % 120][place[j]];
        }
        if (order == 60 ? targets[i] != sum : memcmp(points[targets[i]], place, sizeof place) != 0)
            return "a target is not the product so far";
    }
    return NULL;
}

// test_words: s5 of all elements, swaps, triples, with fillers, and z60; T and V; every element
// that may come does.
static void test_words(void)
{
    static const struct {
        int task, elements, every, moved, kinds, V, T, eval_T;
    } rows[] = {{S5, ELEMENTS_ALL, 1, 5, 120, 127, 33, 501},
                {S5, ELEMENTS_SWAPS, 1, 2, 11, 127, 33, 501},
                {S5, ELEMENTS_TRIPLES, 1, 3, 31, 127, 33, 501},
                {S5, ELEMENTS_ALL, 4, 5, 120, 128, 65, 501},
                {Z60, ELEMENTS_ALL, 1, 0, 60, 67, 33, 501},
                {Z60, ELEMENTS_ALL, 2, 0, 60, 68, 65, 501}};
    for (size_t k = 0; k < 2 * sizeof rows / sizeof *rows; k++) {
        TaskOptions o = state_options_of(0, 0, 0, 0);
        const int evaluate = k & 1, order = rows[k / 2].task == S5 ? 120 : 60;
        const char *wrong = NULL;
        int seen[256] = {0}, kinds = 0;
        o.elements = rows[k / 2].elements;
        o.tokens_per_element = rows[k / 2].every;
        const TaskShape shape = TASKS[rows[k / 2].task].shape(&o);
        CHECK(shape.V == (size_t)rows[k / 2].V && shape.T == (size_t)rows[k / 2].T &&
                  shape.eval_T == (size_t)rows[k / 2].eval_T,
              "word %zu: V %zu, T %zu, %zu", k, shape.V, shape.T, shape.eval_T);
        Batch batch = state_batch(rows[k / 2].task, &o, 3, evaluate ? STREAM_EVAL : STREAM_TRAIN,
                                  200);
        for (size_t b = 0; b < batch.B && !wrong; b++)
            wrong = word_wrong(batch.inputs + b * batch.T, batch.targets + b * batch.T,
                               (int)batch.T - 1, order, rows[k / 2].every, rows[k / 2].moved);
        for (size_t i = 0; i < batch.B * batch.T; i++)
            seen[batch.inputs[i]]++;
        for (int x = 0; x < order; x++)
            kinds += seen[x] > 0;
        CHECK(!wrong, "word %zu: %s", k, wrong ? wrong : "");
        CHECK(kinds == rows[k / 2].kinds, "word %zu: %d elements", k, kinds);
        batch_free(&batch);
    }
}

// stream_wrong: what is wrong with a sequence of horizon or recall, NULL if nothing: every target
// derived by going back from its position; *resets = how many there are.
static const char *stream_wrong(int task, const TaskOptions *o, const int *inputs,
                                const int *targets, int T, int *resets)
{
    *resets = 0;
    for (int t = 0; t < T; t++) {
        int want = 0, at = t;
        if (task == HORIZON) {
            for (; at >= 0 && inputs[at] != 5; at--)
                want += inputs[at];
            want %= o->modulus;
            *resets += inputs[t] == 5;
        } else {
            while (--at >= 0 && inputs[at] != inputs[t])
                ;
            want = at < 0 ? 30 : inputs[at + 1];
        }
        if (inputs[t] < 0 || inputs[t] >= (task == HORIZON ? 6 : 30) || (t == 0 && *resets))
            return "a token that may not stand there";
        if (targets[t] != want)
            return "not what comes of the tokens before";
    }
    return NULL;
}

// test_streams: horizon and recall: targets, sizes, numbers of resets; the lengths of evaluations.
static void test_streams(void)
{
    static const struct {
        int task, T, eval_T, modulus, resets, V, number;
    } rows[] = {{HORIZON, 0, 0, 10, 3, 10, 3},     {HORIZON, 1, 0, 10, 3, 10, 0},
                {HORIZON, 9, 30, 2, 0, 6, 0},      {HORIZON, 5, 5, 6, 9, 6, 4},
                {HORIZON, 1024, 0, 50, 3, 50, 3},  {HORIZON, 20, 40, 256, 19, 256, 19},
                {RECALL, 0, 0, 10, 3, 32, 0},      {RECALL, 300, 400, 10, 3, 32, 0},
                {RECALL, 1, 2, 10, 3, 32, 0}};
    for (size_t k = 0; k < 2 * sizeof rows / sizeof *rows; k++) {
        TaskOptions o = state_options_of(0, rows[k / 2].T, 0, rows[k / 2].eval_T);
        const int task = rows[k / 2].task, evaluate = k & 1;
        const int train_T = rows[k / 2].T ? rows[k / 2].T : task == HORIZON ? 128 : 100;
        const int T = evaluate && rows[k / 2].eval_T ? rows[k / 2].eval_T : train_T;
        const char *wrong = NULL;
        int resets, off = 0;
        o.modulus = rows[k / 2].modulus;
        o.resets = rows[k / 2].resets;
        const TaskShape shape = TASKS[task].shape(&o);
        Batch batch = state_batch(task, &o, 5, evaluate ? STREAM_EVAL : STREAM_TRAIN, 100);
        CHECK(shape.V == (size_t)rows[k / 2].V && batch.T == (size_t)T, "stream %zu: V %zu, T %zu",
              k, shape.V, batch.T);
        for (size_t b = 0; b < batch.B && !wrong; b++) {
            wrong = stream_wrong(task, &o, batch.inputs + b * batch.T, batch.targets + b * batch.T,
                                 T, &resets);
            off += !evaluate && resets != rows[k / 2].number;
        }
        CHECK(!wrong && !off, "stream %zu: %s, %d numbers of resets", k, wrong ? wrong : "", off);
        batch_free(&batch);
    }
}

// test_stream_uniform: resets are as frequent at every place but the first, digits and symbols
// uniform: all counts within 5 standard deviations.
static void test_stream_uniform(void)
{
    enum { N = 20000, T = 12 };
    const TaskOptions o = state_options_of(0, T, 0, 0);
    double places[T] = {0}, digits[6] = {0}, symbols[30] = {0}, worst = 0;
    Batch batch = state_batch(HORIZON, &o, 2, STREAM_TRAIN, N);
    for (size_t i = 0; i < N * T; i++) {
        places[i % T] += batch.inputs[i] == 5;
        digits[batch.inputs[i]]++;
    }
    batch_free(&batch);
    batch = state_batch(RECALL, &o, 2, STREAM_TRAIN, N);
    for (size_t i = 0; i < N * T; i++)
        symbols[batch.inputs[i]]++;
    batch_free(&batch);
    const double place = N * 3.0 / (T - 1), digit = N * (T - 3) / 5.0, symbol = N * T / 30.0;
    for (int i = 0; i < 30; i++) {
        worst = fmax(worst, fabs(symbols[i] - symbol) / sqrt(symbol));
        if (i && i < T)
            worst = fmax(worst, fabs(places[i] - place) / sqrt(place));
        if (i < 5)
            worst = fmax(worst, fabs(digits[i] - digit) / sqrt(digit));
    }
    CHECK(places[0] == 0 && digits[5] == 3 * N && worst < 5, "streams: a count is %.1f deviations "
          "off", worst);
}

// test_restart: the curve of horizon is the accuracy by tokens since a reset, of each target by
// itself; other tasks count from the start, while all is right.
static void test_restart(void)
{
    TaskOptions o = state_options_of(0, 6, 0, 0);
    Evaluation e = {0};
    Batch batch;
    size_t n;
    o.curve = in_dir("curve");
    batch_alloc(&batch, 1, 6);
    memcpy(batch.inputs, (int[]){1, 5, 2, 3, 5, 4}, 6 * sizeof(int));
    memcpy(batch.targets, (int[]){1, 0, 2, 5, 0, 4}, 6 * sizeof(int));
    memcpy(batch.predictions, (int[]){1, 0, 9, 5, 9, 4}, 6 * sizeof(int));
    evaluation_add(&e, &TASKS[HORIZON], &o, &batch, 1);
    LogRow row = evaluation_row(&e, 1);
    char *curve = (char *)get_file(o.curve, &n);
    CHECK(fabs(row.acc - 4 / 6.0) < 1e-12 && row.scaled == row.acc, "horizon: %g", row.acc);
    CHECK(!strcmp(curve, "tokens,sequences,accuracy\n1,3,0.666666667\n2,2,0.5\n3,1,1\n"),
          "horizon: curve\n%s", curve);
    free(curve);
    evaluation_add(&e, &TASKS[RECALL], &o, &batch, 1);
    evaluation_row(&e, 1);
    curve = (char *)get_file(o.curve, &n);
    CHECK(strstr(curve, "\n2,1,1\n3,1,0\n4,1,0\n"), "recall: curve\n%s", curve);
    free(curve);
    batch_free(&batch);
    empty_dir("");
}

// test_state_golden: fixed seed, fixed sequences (F11), whose answers the tests above derive
// again; training and evaluation.
static void test_state_golden(void)
{
    static const char *const sums[][4] = {
        {"cb8910d30bcb1e13", "d491f0ee568b4e5a",
         "da30da3b00db9068", "d1454eb4dc8aab4f"},
        {"610ce1e0a97d2890", "e0a666be0f410b62",
         "c370b26f9b60f929", "49b12f875ad14202"},
        {"bc211cfd6101f504", "d2244847ba6c7cd3",
         "04bac2a0964f7fc7", "9ba654af2196684e"},
        {"2927d8080f62b01d", "5bcfe9277be05733",
         "03b72dcad79dfcf3", "dc36145f2b6e36a2"},
        {"fc213c50085974b4", "bc14adb0f729c8ee",
         "b4ed8127a582ea88", "b304f6f3ceb203ab"},
        {"c7c7a43554715a7e", "708419ff518d6de0",
         "782b40506c9afca5", "b8bb3d46ed6c60f6"},
        {"ff7002cacfb78a95", "b6001229d838ddda",
         "781a631732270dd1", "c9f5a4221fa06f7d"}};
    for (int task = PARITY; task < STATE_END; task++) {
        const TaskOptions o = state_options_of(0, 0, 0, 0);
        char got[4][17];
        for (int evaluate = 0; evaluate < 2; evaluate++) {
            Batch batch = state_batch(task, &o, 1, evaluate ? STREAM_EVAL : STREAM_TRAIN, 64);
            checksum(batch.inputs, batch.B * batch.T, got[2 * evaluate]);
            checksum(batch.targets, batch.B * batch.T, got[2 * evaluate + 1]);
            batch_free(&batch);
        }
        for (int i = 0; i < 4; i++)
            CHECK(!strcmp(got[i], sums[task - PARITY][i]), "%s: checksum %d: expected %s, got %s",
                  TASKS[task].name, i, sums[task - PARITY][i], got[i]);
    }
}

// by_value: order of 64-bit values, for qsort.
static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// test_state_disjoint: no training sequence of 40 bits or more comes again, and none of the
// evaluation is among them: 2 x 20000 of 60 bits each.
static void test_state_disjoint(void)
{
    enum { N = 20000, BITS = 60 };
    uint64_t *seen = (uint64_t *)alloc_zero(2 * N, sizeof *seen, "sequences");
    const TaskOptions o = state_options_of(BITS + 1, BITS + 1, BITS + 1, BITS + 1);
    size_t twice = 0;
    for (int k = 0; k < 2; k++) {
        Batch batch = state_batch(PARITY, &o, 1, k ? STREAM_EVAL : STREAM_TRAIN, N);
        for (size_t i = 0; i < N * BITS; i++)
            seen[k * N + i / BITS] = 2 * seen[k * N + i / BITS] + (batch.inputs[i] == 2);
        batch_free(&batch);
    }
    qsort(seen, 2 * N, sizeof *seen, by_value);
    for (size_t i = 1; i < 2 * N; i++)
        twice += seen[i] == seen[i - 1];
    CHECK(twice == 0, "%zu of %d sequences came twice", twice, 2 * N);
    free(seen);
}

// test_label_prior: the share of the answer 0 that the paper's range has: brackets 0.27 at trained
// lengths and 0.30 beyond with *, 0.2 without, the others flat; 30000 sequences each.
static void test_label_prior(void)
{
    static const struct {
        int task, multiply, evaluate;
        double share;
    } rows[] = {{BRACKETS, 1, 0, 0.27}, {BRACKETS, 1, 1, 0.30}, {BRACKETS, 0, 1, 0.2},
                {MODULAR, 1, 1, 0.2},   {PARITY, 1, 1, 0.5}};
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        TaskOptions o = state_options_of(0, 0, 0, 0);
        const int zero = rows[k].task == BRACKETS ? 0 : rows[k].task == MODULAR ? 5 : 1;
        double count = 0, zeros = 0;
        o.multiply = rows[k].multiply;
        Batch batch = state_batch(rows[k].task, &o, 1, rows[k].evaluate ? STREAM_EVAL
                                                                      : STREAM_TRAIN,
                                  rows[k].evaluate ? 200000 : 30000);
        for (size_t i = 0; i < batch.B * batch.T; i++) {
            count += batch.targets[i] != IGNORE;
            zeros += batch.targets[i] == zero;
        }
        printf("%s, multiply %d: answer 0 in %.4f of %.0f\n", TASKS[rows[k].task].name,
               rows[k].multiply, zeros / count, count);
        CHECK(count >= 30000 && fabs(zeros / count - rows[k].share) < 0.015,
              "%s: answer 0 in %.4f of %.0f", TASKS[rows[k].task].name, zeros / count, count);
        batch_free(&batch);
    }
}

// test_state_scores: one answer is right or wrong; a word only as a whole; an evaluation counts
// answers by length, words up to each length, the most frequent answer, and scales accuracy.
static void test_state_scores(void)
{
    TaskOptions o = state_options_of(0, 0, 10, 10);
    Evaluation e = {0};
    char *path = in_dir("curve"), text[256] = "";
    o.curve = path;
    Batch batch = state_batch(S5, &o, 1, STREAM_TRAIN, 4);
    memcpy(batch.predictions, batch.targets, 4 * batch.T * sizeof(int));
    CHECK(task_score(&TASKS[S5], &batch, 4) == 1, "a word is right");
    batch.predictions[2 * batch.T - 1] = 126;
    CHECK(task_score(&TASKS[S5], &batch, 4) == 0.75, "one element of one of four words is wrong");
    batch_free(&batch);

    batch_alloc(&batch, 2, 3);
    memcpy(batch.targets, (int[]){8, 1, 2, 8, 1, 1}, 6 * sizeof(int));
    memcpy(batch.predictions, (int[]){8, 1, 2, 8, 0, 1}, 6 * sizeof(int));
    evaluation_add(&e, &TASKS[S5], &o, &batch, 1);
    LogRow row = evaluation_row(&e, 7);
    CHECK(row.acc == 0.5 && row.scaled == 0.5 && row.constant == 0.5 && row.step == 7,
          "words: accuracy %g, scaled %g, constant %g", row.acc, row.scaled, row.constant);
    size_t n;
    char *curve = (char *)get_file(path, &n);
    CHECK(!strcmp(curve, "tokens,sequences,accuracy\n1,2,1\n2,2,0.5\n3,2,0.5\n"), "curve\n%s",
          curve);
    free(curve);
    memcpy(batch.targets, (int[]){-1, 2, -1, 1, -1, -1}, 6 * sizeof(int));
    memcpy(batch.predictions, (int[]){0, 2, 0, 2, 2, 2}, 6 * sizeof(int));
    evaluation_add(&e, &TASKS[PARITY], &o, &batch, 1);
    evaluation_add(&e, &TASKS[PARITY], &o, &batch, 2);
    row = evaluation_row(&e, 8);
    CHECK(row.acc == 0.5 && row.scaled == 0 && row.constant == 0.5 && row.loss == 1.5,
          "parity: accuracy %g, scaled %g, constant %g", row.acc, row.scaled, row.constant);
    curve = (char *)get_file(path, &n);
    snprintf(text, sizeof text, "tokens,sequences,accuracy\n1,2,0\n2,2,1\n");
    CHECK(!strcmp(curve, text), "curve\n%s", curve);
    free(curve);
    batch_free(&batch);
    empty_dir("");
}

// open_state: task_open of the lengths of `options` with batches of 4, in a child.
static void open_state(void *options)
{
    static Options line;
    const Training t = {.batch_size = 4};
    const int task = *(int *)options; // string_size, which these tasks do not read
    task_open(&TASKS[task], (TaskOptions *)options, &t, &line, 0);
}

// stream_refused: sequences of horizon and recall have room for what is in them.
static void stream_refused(void)
{
    static const struct {
        int task, lengths[4], resets;
        const char *error;
    } rows[] = {{HORIZON, {0, 1, 0, 0}, 0, "--max-length: expected at least 2 for --task horizon"},
                {RECALL, {0, 0, 0, 1}, 3, "--eval-max-length: expected at least 2 for"},
                {HORIZON, {0, 0, 0, 0}, 128, "--resets 128: expected at most 127"},
                {HORIZON, {0, 9, 0, 5}, 5, "--resets 5: expected at most 4"},
                {HORIZON, {0, 9, 0, 9}, 8, NULL},
                {RECALL, {0, 2, 0, 0}, 9, NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int *n = rows[i].lengths;
        TaskOptions o = state_options_of(n[0], n[1], n[2], n[3]);
        o.string_size = rows[i].task;
        o.resets = rows[i].resets;
        if (rows[i].error)
            expect_die(open_state, &o, EXIT_USAGE, rows[i].error);
        else
            CHECK(run_child(open_state, &o).code == 0, "stream %zu is refused", i);
    }
}

// test_state_refused: lengths that make no sense, and evaluations longer than a batch has room for;
// a batch that fits has as many sequences of the evaluation as fit.
static void test_state_refused(void)
{
    TaskOptions o = state_options_of(2, 0, 0, 0);
    o.string_size = PARITY;
    expect_die(open_state, &o, EXIT_USAGE, "--min-length: expected at least 3");
    o = state_options_of(9, 8, 0, 0);
    o.string_size = MODULAR;
    expect_die(open_state, &o, EXIT_USAGE, "--min-length and --max-length: expected a range");
    o = state_options_of(0, 0, 0, 30);
    o.string_size = BRACKETS;
    expect_die(open_state, &o, EXIT_USAGE, "got 40 to 30");
    o = state_options_of(0, 0, 0, 0);
    o.string_size = PARITY;
    expect_die(open_state, &o, EXIT_USAGE, "--batch-size 7");
    o = state_options_of(0, 0, 40, 150);
    o.string_size = PARITY;
    CHECK(run_child(open_state, &o).code == 0, "4 x 39 tokens hold one sequence of 149");
    stream_refused();
    o = state_options_of(0, 0, 40, 150);
    Batch batch = state_batch(PARITY, &o, 1, STREAM_EVAL, 13);
    CHECK(batch.B == 3 && batch.T == 149 && batch.rows == 13, "B %zu, T %zu", batch.B, batch.T);
    CHECK(task_eval_batches(&TASKS[PARITY], &o, 13) == 5, "13 sequences in batches of 3");
    task_batch(&TASKS[PARITY], &o, 1, STREAM_TRAIN, 0, &batch);
    CHECK(batch.B == 13 && batch.T == 39, "B %zu, T %zu", batch.B, batch.T);
    batch_free(&batch);
    o = state_options_of(0, 0, 10, 20);
    batch = state_batch(PARITY, &o, 1, STREAM_EVAL, 3);
    CHECK(batch.B == 3 && batch.T == 19, "shorter ones: B %zu, T %zu", batch.B, batch.T);
    batch_free(&batch);
}

// ------------------------------------------------------------------------------------------------
// [batch]

// test_batch_disjoint: the first 10^5 training and the first 10^5 evaluation sequences are 2 * 10^5
// different ones, and so are those of another seed. Thirteen letters fit 64 bits (26^13 < 2^62).
static void test_batch_disjoint(void)
{
    enum { N = 100000, S = 13, KINDS = 3 };
    const uint64_t seeds[KINDS] = {1, 1, 0};
    const uint64_t streams[KINDS] = {STREAM_TRAIN, STREAM_EVAL, STREAM_TRAIN};
    uint64_t *seen = (uint64_t *)alloc_zero(KINDS * N, sizeof *seen, "sequences");
    size_t twice = 0;
    for (int k = 0; k < KINDS; k++) {
        Batch batch = copying_batch(S, seeds[k], streams[k], 0, N);
        for (size_t b = 0; b < N; b++)
            for (size_t i = 0; i < S; i++)
                seen[(size_t)k * N + b] = 26 * seen[(size_t)k * N + b] +
                                          (uint64_t)(batch.inputs[b * batch.T + 1 + i] - 3);
        batch_free(&batch);
    }
    qsort(seen, KINDS * N, sizeof *seen, by_value);
    for (size_t i = 1; i < KINDS * N; i++)
        twice += seen[i] == seen[i - 1];
    CHECK(twice == 0, "%zu of %d sequences came twice", twice, KINDS * N);
    free(seen);
}

// test_batch_sizes: sequence n is the same in batches of every size and by any number of threads:
// it depends on (seed, family, number * B + b) only. So training with batch size 64 sees the
// sequences that batch size 32 sees, in the same order.
static void test_batch_sizes(void)
{
    enum { N = 60 };
    const size_t sizes[] = {1, 2, 3, 4, 5, 20, 30};
    const int threads = (int)threads_count();
    Batch all = copying_batch(9, 7, STREAM_TRAIN, 0, N);
    size_t T = all.T;
    for (int k = 0; k < 7; k++)
        for (int n_threads = 1; n_threads <= 8; n_threads = n_threads * 3 - 1) { // 1, 2, 5
            size_t B = sizes[k], different = 0;
            threads_set(n_threads);
            for (size_t n = 0; n < N / B; n++) {
                Batch batch = copying_batch(9, 7, STREAM_TRAIN, (long)n, B);
                for (size_t i = 0; i < B * T; i++)
                    different += batch.inputs[i] != all.inputs[n * B * T + i] ||
                                 batch.targets[i] != all.targets[n * B * T + i];
                batch_free(&batch);
            }
            CHECK(!different, "B=%zu, %d threads: %zu tokens differ", B, n_threads, different);
        }
    threads_set(threads);
    Batch late = copying_batch(9, 7, STREAM_TRAIN, 1000000000000, 2); // a step past 2^32
    CHECK(memcmp(late.inputs, all.inputs, 2 * T * sizeof(int)), "step 10^12 has its own batch");
    batch_free(&all);
    batch_free(&late);
}

// check_batch: batch_check in a child. (A child must not run OpenMP code: the parent already did.)
static void check_batch(void *batch)
{
    batch_check((const Batch *)batch, 29);
}

// test_batch_check: tokens outside the vocabulary are refused, with their place (A16).
static void test_batch_check(void)
{
    const int bad[] = {29, 30, -2, INT32_MIN, INT32_MAX};
    Batch batch = copying_batch(3, 1, STREAM_TRAIN, 0, 3);
    int *input = &batch.inputs[batch.T + 2], *target = &batch.targets[batch.T + 2];
    char place[64];
    *input = 28;
    *target = IGNORE;
    CHECK(run_child(check_batch, &batch).code == 0, "token 28 and target -1 are fine");
    *input = IGNORE;
    expect_die(check_batch, &batch, EXIT_DATA, "row 1, position 2");
    for (int k = 0; k < 5; k++) {
        char got[32];
        snprintf(got, sizeof got, "got %d", bad[k]);
        *input = bad[k];
        *target = 0;
        expect_die(check_batch, &batch, EXIT_DATA, "row 1, position 2");
        expect_die(check_batch, &batch, EXIT_DATA, got);
        *input = 0;
        *target = bad[k];
        expect_die(check_batch, &batch, EXIT_DATA, "row 1, position 2");
        expect_die(check_batch, &batch, EXIT_DATA, got);
    }
    const size_t last = batch.B * batch.T - 1;
    for (size_t i = 0; i <= last; i++)
        batch.targets[i] = i == last ? 28 : IGNORE;
    CHECK(batch_targets(&batch) == 1, "the last target counts: %g", batch_targets(&batch));
    batch.inputs[last] = 29;
    snprintf(place, sizeof place, "row 2, position %zu", batch.T - 1);
    expect_die(check_batch, &batch, EXIT_DATA, place);
    batch_free(&batch);
}

// show: task_show of a batch, in a child.
static void show(void *batch)
{
    const TaskOptions options = {.string_size = 16};
    const Batch *b = (const Batch *)batch;
    task_show(&TASKS[0], &options, b->inputs, b->predictions);
}

// print_tokens: task_print of tokens that are and that are none, in a child.
static void print_tokens(void *unused)
{
    const int tokens[] = {0, 3, 28, 1, 2, -1, 29, INT32_MIN, INT32_MAX};
    (void)unused;
    task_print(&TASKS[0], NULL, "say ", tokens, 9);
    task_print(&TASKS[0], NULL, ".", tokens, 0);
}

// test_batch_text: tokens as text; what is no token is '?'.
static void test_batch_text(void)
{
    Outcome out = run_child(print_tokens, NULL);
    CHECK(!strcmp(out.text, "say ^az|$????."), "text %s", out.text);
    Batch batch = copying_batch(16, 1, STREAM_TRAIN, 0, 1);
    memcpy(batch.predictions, batch.targets, batch.T * sizeof(int));
    out = run_child(show, &batch);
    const char *shown = "prompt  ^cxiynmyhmzczhszx|\ndecoded cxiynmyhmzczhszx$\n";
    CHECK(!strcmp(out.text, shown), "expected\n%sgot\n%s", shown, out.text);
    batch_free(&batch);
}

// check_ignored: in a child: two batches without a target.
static void check_ignored(void *unused)
{
    Batch batch;
    (void)unused;
    batch_alloc(&batch, 1, 4);
    for (int t = 0; t < 4; t++)
        batch.targets[t] = IGNORE;
    batch_check(&batch, COPY_VOCAB);
    batch_check(&batch, COPY_VOCAB);
}

// test_ignored: a batch without a target is no error; it is warned of, once (A15).
static void test_ignored(void)
{
    Outcome out = run_child(check_ignored, NULL);
    const char *first = strstr(out.text, "warning: every target");
    CHECK(out.code == 0 && first && !strstr(first + 1, "warning"), "one warning, got %d and %s",
          out.code, out.text);
}

int main(void)
{
    make_dir();
    test_ignored();
    test_copying_layout();
    test_copying_golden();
    test_copying_letters();
    test_copying_score();
    test_answers();
    test_words();
    test_streams();
    test_stream_uniform();
    test_restart();
    test_state_golden();
    test_state_disjoint();
    test_label_prior();
    test_state_scores();
    test_state_refused();
    test_batch_disjoint();
    test_batch_sizes();
    test_batch_check();
    test_batch_text();
    return test_report();
}
