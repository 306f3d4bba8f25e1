// test_data.c: tests of data/tasks.h: what the tasks look like, and that nothing but the seed and
// the number of a sequence decides what it holds. Text: test_text.c.
//
//     gcc -O2 -fopenmp -Wall -Wextra test_data.c -o build/test_data -lm && build/test_data
//
// [copying]  layout, letters, score, against a second reading of specs/causalrn.md, section 2
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
// [batch]

// by_value: order of 64-bit values, for qsort.
static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

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
    test_batch_disjoint();
    test_batch_sizes();
    test_batch_check();
    test_batch_text();
    return test_report();
}
