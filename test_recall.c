// test_recall.c: tests of data/tasks_recall.h: every answer derived again by functions that share
// no line with those that make them, what is drawn how often, sizes that are refused. The rest of
// the tasks: test_data.c.
//
//     gcc -O2 -fopenmp -Wall -Wextra test_recall.c -o build/test_recall -lm && build/test_recall
//
// F11 is a row of the list of cases that this project keeps: failures of other programs.
//
// [layouts]  mqar, in-context, noisy, fuzzy, selective
// [draws]    slots of mqar, values of memorization, needles, --examples, fixed seeds
// [scores]   accuracy by token; sizes that are refused; how many targets there are
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "data/tasks.h"
#include "dev/testing.h"
#include "util/safetensors.h"

enum { MQAR = 9, IN_CONTEXT, NOISY, FUZZY, MEMORIZATION, SELECTIVE, NEEDLE, RECALL_END };

// checksum: 16 hexadecimal digits for n tokens, by the formula of util/safetensors.h; in `text`.
static const char *checksum(const int *tokens, size_t n, char *text)
{
    StSum sum = {0, 0, {0}, 0};
    st_sum_add(&sum, tokens, n * sizeof *tokens);
    st_sum_hex(&sum, text);
    return text;
}

// options_of: the defaults, with lengths.
static TaskOptions options_of(int min, int max, int eval_min, int eval_max)
{
    TaskOptions o = {.min_length = min, .max_length = max, .eval_min_length = eval_min,
                     .eval_max_length = eval_max, .noise = 0.2, .copies = 16, .eval_depth = 2};
    return o;
}

// recall_batch: B sequences of a task; free with batch_free.
static Batch recall_batch(int task, const TaskOptions *o, uint64_t seed, uint64_t stream, size_t B)
{
    Batch batch;
    batch_alloc(&batch, B, TASKS[task].shape(o).T);
    task_batch(&TASKS[task], o, seed, stream, 0, &batch);
    return batch;
}

// A task to be opened with its sizes.
typedef struct {
    int task;
    TaskOptions options;
} Opening;

// open_recall: task_open of an Opening with batches of 4, in a child.
static void open_recall(void *opening)
{
    static Options line;
    const Training t = {.batch_size = 4};
    Opening *o = opening;
    task_open(&TASKS[o->task], &o->options, &t, &line, 0);
}

// ------------------------------------------------------------------------------------------------
// [layouts]

// mqar_wrong: what is wrong with a sequence of MQAR, NULL if nothing: n pairs of different keys and
// values, then every key once at an even place, with its value as target, and fillers.
static const char *mqar_wrong(const int *inputs, const int *targets, int T, int V, int n)
{
    for (int j = 0; j < 2 * n; j++) {
        const int low = j % 2 ? V / 2 : 1, high = j % 2 ? V - 1 : V / 2 - 1;
        int times = 0;
        if (inputs[j] < low || inputs[j] > high || targets[j] != -1)
            return "not pairs of a key and a value";
        for (int t = 0; t < T; t++)
            times += inputs[t] == inputs[j];
        if (times != 2 - j % 2)
            return "a key does not come twice, or a value does";
    }
    for (int t = 2 * n; t < T; t++) {
        int j = 0;
        while (j < n && inputs[2 * j] != inputs[t])
            j++;
        if (inputs[t] ? t % 2 || j == n || targets[t] != inputs[2 * j + 1] : targets[t] != -1)
            return "a place after the pairs is neither filler nor a key with its value";
    }
    return NULL;
}

// shifted_wrong: tokens (T+1) = the sequence whose inputs and last target are given; in training
// targets are the next tokens.
static const char *shifted_wrong(const int *inputs, const int *targets, int T, int evaluate,
                                 int *tokens)
{
    memcpy(tokens, inputs, (size_t)T * sizeof *tokens);
    tokens[T] = targets[T - 1];
    for (int t = 0; t < T; t++)
        if (targets[t] != tokens[t + 1] && !(evaluate && targets[t] == -1))
            return "a target is not the next token";
    return NULL;
}

// context_wrong: the same of in-context and noisy; *noisy += pairs that are noise, of *pairs.
static const char *context_wrong(const int *inputs, const int *targets, int T, int V, int noise,
                                 int evaluate, int *noisy, int *pairs)
{
    int tokens[1024], value[128], n_noisy = 0;
    const char *wrong = shifted_wrong(inputs, targets, T, evaluate, tokens);
    for (int i = 0; i < 128; i++)
        value[i] = -1;
    for (int t = 0; t < T && !wrong; t += 2) {
        const int a = tokens[t], b = tokens[t + 1], keys = (V - noise) / 2;
        const int known = a < keys && value[a] >= 0;
        if (a >= V - noise && b >= V - noise && t + 2 < T)
            n_noisy++;
        else if (a >= keys || b < keys || b >= V - noise || (known && value[a] != b))
            wrong = "not a key and its value";
        else
            value[a] = b;
        if (evaluate && (targets[t] != (known ? b : -1) || (t && targets[t - 1] != -1)))
            wrong = "not asked for what was there before";
        if (t + 2 > T && !known)
            wrong = "the last key is not one that was there";
    }
    *noisy += n_noisy;
    *pairs += T / 2;
    return wrong ? wrong : 2 * n_noisy < T - 1 ? NULL : "nothing but noise";
}

// fuzzy_wrong: the same of fuzzy: padding, then runs of one to three different key tokens and of as
// many value tokens; *unknown += 1 if the last key has not come before.
static const char *fuzzy_wrong(const int *inputs, const int *targets, int T, int V, int evaluate,
                               int *unknown)
{
    int tokens[1024], starts[1024], n = 0, t = 0, keys = (V - 1) / 2;
    const char *wrong = shifted_wrong(inputs, targets, T, evaluate, tokens);
    while (t <= T && tokens[t] == V - 1)
        t++;
    if (t < 2 || wrong)
        return wrong ? wrong : "no padding";
    for (; t <= T; t++) // a run starts where keys and values meet
        if (tokens[t] == V - 1)
            return "padding in the middle";
        else if (!n || (tokens[t] < keys) != (tokens[t - 1] < keys))
            starts[n++] = t;
    starts[n] = T + 1;
    if (n % 2 || tokens[starts[0]] >= keys)
        return "not keys and values in turn";
    for (int i = 0; i < n; i++) {
        const int *run = tokens + starts[i], length = starts[i + 1] - starts[i];
        if (length > 3 || (evaluate && i % 2 == 0 && length != 3))
            return "a run is too long or too short";
        for (int j = 0; j < length; j++)
            for (int k = 0; k < j; k++)
                if (run[j] == run[k])
                    return "a token comes twice in a run";
    }
    for (int i = 0; i < n; i += 2) {
        int before = -1;
        const int key = starts[i + 1] - starts[i], value = starts[i + 2] - starts[i + 1];
        for (int j = 0; j < i && before < 0; j += 2)
            if (starts[j + 1] - starts[j] == key &&
                !memcmp(tokens + starts[j], tokens + starts[i], (size_t)key * sizeof *tokens))
                before = j;
        if (before >= 0 && (starts[before + 2] - starts[before + 1] != value ||
                            memcmp(tokens + starts[before + 1], tokens + starts[i + 1],
                                   (size_t)value * sizeof *tokens)))
            return "a key has two values";
        *unknown += i == n - 2 && before < 0;
        for (int j = starts[i]; j < starts[i + 2] && evaluate; j++)
            if ((targets[j - 1] != -1) != (j >= starts[i + 1] && (before >= 0 || i == n - 2)))
                return "not asked for what was there before";
    }
    return NULL;
}

// selective_wrong: the same of selective.
static const char *selective_wrong(const int *inputs, const int *targets, int T, int V, int n)
{
    int at = 0;
    for (int t = 0; t < T; t++) {
        const int after = t >= T - n;
        if (t == T - n - 1 ? inputs[t] != V - 1 : after && inputs[t] != V - 2)
            return "no token that asks, or no blank after it";
        if (t < T - n - 1 && inputs[t] != V - 2) {
            if (inputs[t] < 0 || at == n || targets[T - n + at++] != inputs[t])
                return "not the tokens in their order";
        }
        if (!after && targets[t] != -1)
            return "a target too early";
    }
    return at != n                    ? "a token is missing"
           : inputs[T - n - 2] == V - 2 ? "a blank at the end"
                                        : NULL;
}

// test_recall_layouts: layouts, answers and sizes of MQAR and of MAD's tasks, of their own sizes
// and others, in training and evaluation; how much noise there is, how often a probe stays unknown.
static void test_recall_layouts(void)
{
    static const struct {
        int task, length, eval_length, vocab, number, T, V; // number: of pairs, of copies
    } rows[] = {{MQAR, 0, 0, 0, 0, 64, 8192},       {MQAR, 256, 512, 0, 16, 256, 8192},
                {MQAR, 16, 16, 10, 4, 16, 10},      {MQAR, 512, 320, 1000, 80, 512, 1000},
                {IN_CONTEXT, 0, 0, 0, 0, 127, 16},  {IN_CONTEXT, 4, 1000, 3, 0, 3, 3},
                {NOISY, 0, 0, 0, 0, 127, 32},       {NOISY, 64, 256, 80, 0, 63, 80},
                {FUZZY, 0, 0, 0, 0, 128, 16},       {FUZZY, 13, 200, 33, 0, 13, 33},
                {SELECTIVE, 0, 0, 0, 16, 256, 16},  {SELECTIVE, 9, 40, 5, 4, 9, 5}};
    for (size_t k = 0; k < 2 * sizeof rows / sizeof *rows; k++) {
        const int task = rows[k / 2].task, evaluate = k & 1, n = rows[k / 2].number;
        TaskOptions o = options_of(0, rows[k / 2].length, 0, rows[k / 2].eval_length);
        o.vocab_size = rows[k / 2].vocab;
        o.pairs = n;
        o.copies = n ? n : 16;
        const TaskShape shape = TASKS[task].shape(&o);
        const int V = (int)shape.V;
        Batch batch = recall_batch(task, &o, 1, evaluate ? STREAM_EVAL : STREAM_TRAIN, 400);
        const int T = (int)batch.T;
        const char *wrong = NULL;
        int noisy = 0, pairs = 0, unknown = 0;
        CHECK(shape.T == (size_t)rows[k / 2].T && V == rows[k / 2].V, "%s: T %zu, V %d",
              TASKS[task].name, shape.T, V);
        for (size_t b = 0; b < batch.B && !wrong; b++) {
            const int *x = batch.inputs + b * batch.T, *y = batch.targets + b * batch.T;
            wrong = task == MQAR        ? mqar_wrong(x, y, T, V, n ? n : 4)
                    : task == FUZZY     ? fuzzy_wrong(x, y, T, V, evaluate, &unknown)
                    : task == SELECTIVE ? selective_wrong(x, y, T, V, n)
                                        : context_wrong(x, y, T, V, task == NOISY ? 16 : 0,
                                                        evaluate, &noisy, &pairs);
        }
        CHECK(!wrong, "%s, T = %d: %s", TASKS[task].name, T, wrong);
        if (task == NOISY)
            CHECK(fabs(noisy / (double)pairs - 0.2) < 0.02, "noisy: %d of %d pairs", noisy, pairs);
        if (task == FUZZY && T > 100)
            CHECK(unknown * 20 < (int)batch.B, "fuzzy: %d of %zu probes are unknown", unknown,
                  batch.B);
        batch_free(&batch);
    }
}

// ------------------------------------------------------------------------------------------------
// [draws]

// test_mqar_slots: the first two keys stand in each slot as often as the law says, slots with
// probabilities like i^-0.99 without replacement; section 4.1: 0.251 in slot 0 of (64, 4).
static void test_mqar_slots(void)
{
    enum { N = 40000, SLOTS = 28 };
    const TaskOptions o = options_of(0, 0, 0, 0);
    double p[SLOTS], total = 0, count[2][SLOTS] = {{0}}, worst = 0;
    Batch batch = recall_batch(MQAR, &o, 1, STREAM_TRAIN, N);
    for (int i = 0; i < SLOTS; i++)
        total += p[i] = pow(i + 1, -0.99);
    for (size_t b = 0; b < N; b++)
        for (int i = 0; i < SLOTS; i++)
            for (int j = 0; j < 2; j++)
                count[j][i] += batch.inputs[b * 64 + 8 + 2 * (size_t)i] ==
                               batch.inputs[b * 64 + 2 * (size_t)j];
    for (int i = 0; i < SLOTS; i++) {
        double second = 0;
        for (int j = 0; j < SLOTS; j++)
            second += j == i ? 0 : p[j] / total * p[i] / (total - p[j]);
        worst = fmax(worst, fabs(count[0][i] - N * p[i] / total) / sqrt(N * p[i] / total));
        worst = fmax(worst, fabs(count[1][i] - N * second) / sqrt(N * second));
    }
    CHECK(fabs(p[0] / total - 0.251) < 5e-4, "slot 0 of 28: %.4f", p[0] / total);
    CHECK(worst < 5, "slots: a count is %.1f deviations off", worst);
    batch_free(&batch);
}

// test_blanks: each of the 223 blanks of selective stands before any of the 16 tokens as likely.
static void test_blanks(void)
{
    enum { N = 2000 };
    const TaskOptions o = options_of(0, 0, 0, 0);
    double blanks[16] = {0}, worst = 0;
    Batch batch = recall_batch(SELECTIVE, &o, 1, STREAM_TRAIN, N);
    for (size_t b = 0; b < N; b++)
        for (size_t t = 0, i = 0; t < 239; t++)
            if (batch.inputs[b * 256 + t] == 14)
                blanks[i]++;
            else
                i++;
    for (int i = 0; i < 16; i++)
        worst = fmax(worst, fabs(blanks[i] - N * 223 / 16.0) / sqrt(N * 223 / 16.0));
    CHECK(worst < 5, "selective: blanks before a token are %.1f deviations off", worst);
    batch_free(&batch);
}

// test_memorization: a key has one value in all sequences, of any seed, trained on or not; no two
// keys have the same, all keys come, and values have no order.
static void test_memorization(void)
{
    int value[128], keys = 0, bad = 0, in_order = 0;
    char taken[257] = "";
    for (int i = 0; i < 128; i++)
        value[i] = -1;
    for (int k = 0; k < 4; k++) {
        const TaskOptions o = options_of(0, 0, 0, 0);
        Batch batch = recall_batch(MEMORIZATION, &o, (uint64_t)k % 2, k / 2 ? STREAM_EVAL
                                                                        : STREAM_TRAIN, 200);
        for (size_t i = 0; i < 200 * 32; i += 2) {
            const int key = batch.inputs[i], v = batch.targets[i + 1];
            bad += batch.targets[i] != -1 || batch.inputs[i + 1] != 255 || key < 0 || key > 126 ||
                   v < 127 || v > 254;
            if (bad)
                break;
            bad += value[key] >= 0 ? value[key] != v : taken[v];
            value[key] = v;
            taken[v] = 1;
        }
        CHECK(batch.T == 32, "memorization: T = %zu", batch.T);
        batch_free(&batch);
    }
    for (int i = 0; i < 127; i++) {
        keys += value[i] >= 0;
        in_order += i && value[i] > value[i - 1];
    }
    CHECK(!bad && keys == 127, "memorization: %d wrong, %d keys", bad, keys);
    CHECK(in_order > 40 && in_order < 86, "memorization: %d of 126 in order", in_order);
}

// test_needle: every sequence ends with the key of one of its 1 to 4 pairs and asks for its value;
// lengths fill their range; where the pair stands: anywhere, or at the depth that is asked for.
static void test_needle(void)
{
    for (int k = 0; k < 5; k++) {
        TaskOptions o = options_of(0, k < 2 ? 0 : 60, k == 3 ? 40 : 0, k < 2 ? 0 : 100);
        const int evaluate = k > 0, low = k == 0 ? 16 : k == 1 ? 2048 : k == 3 ? 40 : 100;
        const int high = k == 0 ? 512 : k == 1 ? 2048 : 100;
        o.eval_depth = k == 2 ? 0 : k == 3 ? 0.5 : k == 4 ? 1 : 2;
        int pairs_seen[5] = {0}, shortest = 1 << 20, longest = 0, bad = 0, tenths[10] = {0};
        Batch batch = recall_batch(NEEDLE, &o, 1, evaluate ? STREAM_EVAL : STREAM_TRAIN, 4000);
        for (size_t b = 0; b < batch.B; b++) {
            const int *x = batch.inputs + b * batch.T, *y = batch.targets + b * batch.T;
            int n = 0, at = -1, pairs = 0, T = (int)batch.T;
            while (n < T && x[n])
                n++;
            for (int t = 0; t < T; t++) {
                const int key = x[t] >= 1 && x[t] <= 64, value = x[t] >= 65 && x[t] <= 128;
                bad += (t < n ? x[t] < 1 || x[t] > 256 : x[t] != 0) || (y[t] != -1) != (t == n - 1);
                if (t < n - 1) {
                    pairs += key;
                    at = key && x[t] == x[n - 1] ? t : at;
                    bad += key ? x[t + 1] < 65 || x[t + 1] > 128
                               : value && (t == 0 || x[t - 1] < 1 || x[t - 1] > 64);
                    for (int s = 0; s < t; s++)
                        bad += key && x[s] == x[t];
                }
            }
            bad += at < 0 || pairs < 1 || pairs > 4 || y[n - 1] != x[at + 1];
            bad += k > 1 && at != (int)(o.eval_depth * (n - 3) + 0.5);
            if (bad)
                break;
            pairs_seen[pairs]++;
            shortest = n < shortest ? n : shortest;
            longest = n > longest ? n : longest;
            tenths[10 * at / (n - 2)]++;
        }
        CHECK(!bad, "needle %d: a sequence is wrong", k);
        CHECK(shortest == low && longest == high, "needle %d: %d to %d tokens", k, shortest,
              longest);
        for (int i = 1; i <= 4 && !k; i++)
            CHECK(abs(pairs_seen[i] - 1000) < 150, "needle: %d pairs in %d of 4000", i,
                  pairs_seen[i]);
        for (int i = 0; i < 10 && !k; i++)
            CHECK(abs(tenths[i] - 400) < 110, "needle: at tenth %d in %d of 4000", i, tenths[i]);
        batch_free(&batch);
    }
}

// test_examples: with --examples 7 training has 7 sequences, all of them, and evaluations as many
// as they ask for; the 7 are the first of those without the option.
static void test_examples(void)
{
    for (int task = MQAR; task < RECALL_END; task++) {
        TaskOptions o = options_of(0, task == NEEDLE ? 64 : 0, 0, task == NEEDLE ? 64 : 0);
        Batch fresh = recall_batch(task, &o, 1, STREAM_TRAIN, 7);
        o.examples = 7;
        Batch few = recall_batch(task, &o, 1, STREAM_TRAIN, 200);
        Batch eval = recall_batch(task, &o, 1, STREAM_EVAL, 200);
        const size_t bytes = few.T * sizeof(int);
        int times[8] = {0}, repeated = 0;
        for (size_t b = 0; b < 200; b++) {
            size_t i = 0;
            while (i < 7 && (memcmp(fresh.inputs + i * few.T, few.inputs + b * few.T, bytes) ||
                             memcmp(fresh.targets + i * few.T, few.targets + b * few.T, bytes)))
                i++;
            times[i]++;
            repeated += b && !memcmp(eval.inputs, eval.inputs + b * few.T, bytes);
        }
        CHECK(!times[7] && !repeated, "%s: %d sequences are none of 7, %d evaluations repeat",
              TASKS[task].name, times[7], repeated);
        for (int i = 0; i < 7; i++)
            CHECK(times[i] > 10, "%s: example %d comes %d times", TASKS[task].name, i, times[i]);
        batch_free(&fresh);
        batch_free(&few);
        batch_free(&eval);
    }
}

// test_recall_golden: fixed seed, fixed sequences (F11), whose answers the tests above derive
// again.
static void test_recall_golden(void)
{
    static const char *const sums[][4] = {
        {"09a90325eb841185", "8a689f99daff184e",
         "414ccea2fe766e70", "6646db855e56c056"},
        {"429ea11c3703420a", "e590828fcfe8c092",
         "05666f67120f687f", "380b658324a5978d"},
        {"f78e2336168fddfa", "5a5fd22bff4164cb",
         "aaa916135fdd9ac5", "92c75c5d5089b202"},
        {"ea7dfe0ca8cc1beb", "c5374e1a696ee3d1",
         "d88dd8e3db7f9c62", "7c9525d4073cf8b2"},
        {"f1b5313d4ee99937", "5d1cc142b71f4a76",
         "638467d0fefe0058", "669085b55d331c60"},
        {"55da3b6b462313cd", "21825ee7ad22d090",
         "4c283c010d814a41", "2a07a18e055b659c"},
        {"36696fee42daaba5", "260033a89f331350",
         "674ef7c614eedaeb", "fa9768e72c48194e"}};
    for (int task = MQAR; task < RECALL_END; task++) {
        const TaskOptions o = options_of(0, 0, 0, 0);
        char got[4][17];
        for (int evaluate = 0; evaluate < 2; evaluate++) {
            Batch batch = recall_batch(task, &o, 1, evaluate ? STREAM_EVAL : STREAM_TRAIN, 64);
            checksum(batch.inputs, batch.B * batch.T, got[2 * evaluate]);
            checksum(batch.targets, batch.B * batch.T, got[2 * evaluate + 1]);
            batch_free(&batch);
        }
        for (int i = 0; i < 4; i++)
            CHECK(!strcmp(got[i], sums[task - MQAR][i]), "%s: checksum %d: expected %s, got %s",
                  TASKS[task].name, i, sums[task - MQAR][i], got[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// [scores]

// test_macro: accuracy by token: wanted 1 1 1 2 5, said 1 1 3 2 1: of the tokens 1, 2, 3 and 5 that
// are wanted or said 2/3, 1, 0 and 0 are right; micro 3/5; tokens beyond 255 count.
static void test_macro(void)
{
    const TaskOptions o = options_of(0, 8, 0, 0);
    Evaluation e = {0};
    Batch batch;
    batch_alloc(&batch, 1, 8);
    memcpy(batch.targets, (int[]){1, -1, 1, 1, -1, 2, 5, -1}, 8 * sizeof(int));
    memcpy(batch.predictions, (int[]){1, 7, 1, 3, 7, 2, 1, 7}, 8 * sizeof(int));
    evaluation_add(&e, &TASKS[MQAR], &o, &batch, 1);
    LogRow row = evaluation_row(&e, 1);
    CHECK(fabs(row.macro - (2 / 3.0 + 1) / 4) < 1e-12 && fabs(row.micro - 0.6) < 1e-12 &&
              fabs(row.acc - 0.6) < 1e-12 && row.constant == 0.6,
          "macro %g, micro %g, accuracy %g", row.macro, row.micro, row.acc);
    batch.targets[0] = batch.predictions[0] = 8191;
    evaluation_add(&e, &TASKS[MQAR], &o, &batch, 1);
    evaluation_add(&e, &TASKS[MQAR], &o, &batch, 1);
    row = evaluation_row(&e, 1);
    CHECK(fabs(row.macro - (1 + 1 / 2.0 + 1) / 5) < 1e-12 && fabs(row.micro - 0.6) < 1e-12,
          "twice: macro %g, micro %g", row.macro, row.micro);
    batch_free(&batch);
}

// test_recall_refused: sizes that do not hold what is asked for, each by the option that says it.
static void test_recall_refused(void)
{
    static const struct {
        int task, length, eval_length, vocab, pairs;
        const char *message; // NULL: it is fine
    } rows[] = {
        {MQAR, 64, 0, 0, 17, "--max-length: expected an even number of at least 68"},
        {MQAR, 65, 0, 0, 4, "--max-length: expected an even number of at least 16"},
        {MQAR, 64, 12, 0, 4, "--eval-max-length: expected an even number of at least 16"},
        {MQAR, 64, 0, 9, 4, "--vocab-size: expected at least 10 for --task mqar, got 9"},
        {MQAR, 64, 0, 10, 4, NULL},
        {IN_CONTEXT, 127, 0, 0, 0, "--max-length: expected an even number of at least 4"},
        {NOISY, 0, 0, 17, 0, "--vocab-size: expected at least 18"},
        {FUZZY, 12, 0, 0, 0, "--max-length: expected at least 13"},
        {FUZZY, 13, 0, 6, 0, "--vocab-size: expected at least 7"},
        {MEMORIZATION, 3, 0, 0, 0, "--max-length: expected at least 4"},
        {SELECTIVE, 32, 0, 0, 0, "--max-length: expected at least 33"},
        {SELECTIVE, 33, 0, 3, 0, NULL},
        {NEEDLE, 15, 15, 0, 0, "--max-length: expected at least 16"},
        {NEEDLE, 300, 300, 0, 65, "--pairs: expected at most 64"},
        {NEEDLE, 16, 16, 0, 0, NULL},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        Opening o = {rows[k].task, options_of(0, rows[k].length, 0, rows[k].eval_length)};
        o.options.vocab_size = rows[k].vocab;
        o.options.pairs = rows[k].pairs;
        if (rows[k].message)
            expect_die(open_recall, &o, EXIT_USAGE, rows[k].message);
        else
            CHECK(run_child(open_recall, &o).code == 0, "row %zu is fine", k);
    }
    Opening o = {NEEDLE, options_of(15, 64, 70, 64)};
    expect_die(open_recall, &o, EXIT_USAGE, "--min-length: expected 16 to 64");
    o.options.min_length = 16;
    expect_die(open_recall, &o, EXIT_USAGE, "--eval-min-length: expected 16 to 64");
}

// fill_more: as mqar_fill, and one target more than the shape says.
static void fill_more(const TaskOptions *o, uint64_t seed, uint64_t stream, int *inputs,
                      int *targets)
{
    mqar_fill(o, seed, stream, inputs, targets);
    targets[0] = 1;
}

// batch_more: in a child: a batch of such sequences.
static void batch_more(void *options)
{
    Task task = TASKS[MQAR];
    Batch batch;
    batch_alloc(&batch, 3, 64);
    task.fill = fill_more;
    task_batch(&task, options, 1, STREAM_TRAIN, 0, &batch);
}

// test_asked: mqar and needle ask as often as their shapes say, and who asks more is refused.
static void test_asked(void)
{
    for (int task = MQAR; task <= NEEDLE; task += NEEDLE - MQAR)
        for (int pairs = 0; pairs < 8; pairs += 7) {
            TaskOptions o = options_of(0, 64, 0, 80);
            o.pairs = pairs;
            const size_t asked = task == NEEDLE ? 1 : pairs ? 7 : 4;
            Batch batch = recall_batch(task, &o, 1, STREAM_TRAIN, 5);
            CHECK(TASKS[task].shape(&o).asked == asked && batch_targets(&batch) == 5.0 * asked,
                  "task %d, --pairs %d: %g targets in 5 sequences", task, pairs,
                  batch_targets(&batch));
            batch_free(&batch);
        }
    TaskOptions o = options_of(0, 0, 0, 0);
    expect_die(batch_more, &o, EXIT_FAIL, "a sequence has 5 targets, its shape says at most 4");
}

int main(void)
{
    make_dir();
    CHECK(TASKS[MQAR].fill == mqar_fill && TASKS[NEEDLE].fill == needle_fill &&
              sizeof TASKS / sizeof *TASKS == RECALL_END,
          "rows of TASKS");
    test_recall_layouts();
    test_mqar_slots();
    test_blanks();
    test_memorization();
    test_needle();
    test_examples();
    test_recall_golden();
    test_macro();
    test_recall_refused();
    test_asked();
    return test_report();
}
