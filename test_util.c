// test_util.c: tests of util/: check.h, rng.h, options.h, log.h. The others: test_tensors.c,
// test_safetensors.c.
//
//     gcc -O2 -Wall -Wextra test_util.c -o build/test_util -lm && build/test_util
//
// [check]    the comparator
// [rng]      fixed values, uniformity, streams
// [options]  the command line: what is refused and how, presets
// [log]      run directories, log.csv, its lock
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "data/tasks.h"
#include "dev/testing.h"
#include "util/training.h"

// ------------------------------------------------------------------------------------------------
// [check]

// test_check_comparator: what agrees and what does not; NaN and Inf on either side never do.
static void test_check_comparator(void)
{
    enum { N = 1000 };
    float ref[N], got[N], bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < N; i++)
        ref[i] = got[i] = 1e-12f * (float)sin(i + 1);
    CHECK(compare(got, 4, ref, 4, N, BOUND_FORWARD_FP32, 0).ok, "equal arrays agree");
    for (int i = 0; i < N; i++)
        got[i] = ref[i] * 1.001f;
    CHECK(!compare(got, 4, ref, 4, N, BOUND_GRAD_FP32, 0).ok, "1e-3 off in a tiny tensor");
    CHECK(compare(got, 4, ref, 4, N, BOUND_GRAD_FP32, 1).ok, "noise beside a gradient of norm 1");
    CHECK(!compare(got, 4, ref, 4, N, BOUND_GRAD_FP32, 1e-11).ok, "no noise beside one of 1e-11");
    for (int i = 0; i < N; i++) { // a sum of 512 terms in two orders
        float up = 0, down = 0;
        for (int t = 0; t < 512; t++) {
            up += (float)sin(i + 0.7 * t) + 0.5f;
            down += (float)sin(i + 0.7 * (511 - t)) + 0.5f;
        }
        ref[i] = up;
        got[i] = down;
    }
    CHECK(memcmp(ref, got, sizeof ref), "the two orders round differently");
    CHECK(compare(got, 4, ref, 4, N, BOUND_FORWARD_FP32, 0).ok, "another order is no error");
    for (int where = 0; where < N; where += N - 1)
        for (int kind = 0; kind < 3; kind++)
            for (int side = 0; side < 3; side++) { // one side, the other, both
                memcpy(got, ref, sizeof ref);
                float old = ref[where];
                if (side != 1)
                    got[where] = bad[kind];
                if (side != 0)
                    ref[where] = bad[kind];
                Comparison c = compare(got, 4, ref, 4, N, 1e9, 0);
                CHECK(!c.ok && !c.finite && c.worst == (size_t)where,
                      "%g at %d, side %d: ok %d, worst %zu", (double)bad[kind], where, side, c.ok,
                      c.worst);
                ref[where] = old;
            }
}

// test_check_outliers: all zeros, one bad value among a million, float against double.
static void test_check_outliers(void)
{
    enum { N = 1000000 };
    float *ref = (float *)alloc_zero(N, 4, "ref"), *got = (float *)alloc_zero(N, 4, "got");
    CHECK(compare(got, 4, ref, 4, N, 1e-5, 0).ok, "zeros agree with zeros");
    got[7] = 1e-30f;
    Comparison c = compare(got, 4, ref, 4, N, 1e-5, 0);
    CHECK(!c.ok && c.worst == 7, "anything differs from all zeros, worst %zu", c.worst);
    for (int i = 0; i < N; i++)
        ref[i] = got[i] = 1;
    got[N - 2] = 1.009f; // hidden from the L2 norm
    c = compare(got, 4, ref, 4, N, 1e-5, 0);
    CHECK(c.rel_l2 < 1e-5 && !c.ok && c.worst == N - 2, "one outlier among %d is caught", N);
    double x = 0.1; // float against double
    float y = 0.1f;
    CHECK(compare(&y, 4, &x, 8, 1, 1e-6, 0).ok && !compare(&y, 4, &x, 8, 1, 1e-9, 0).ok,
          "float against double");
    free(ref);
    free(got);
}

// ------------------------------------------------------------------------------------------------
// [rng]

// test_rng_values: the numbers of 2026, from a Python program: a change of them would silently
// change every initialisation and every data set.
static void test_rng_values(void)
{
    static const struct {
        uint64_t seed, stream, i, u64;
        double uniform, normal;
    } rows[] = {
        {0u, 0, 0, 0x8bc6f83783b9465eu, 0.5460047851117666, -0.4602705716609816},
        {0u, STREAM_INIT, 0, 0xd85f844ff46582e1u, 0.845207471389946, 1.9218230921571604},
        {1u, STREAM_INIT, 0, 0x492eb552bd0c434au, 0.28586896200163014, 0.3562663480651531},
        {1u, STREAM_INIT, 1, 0xd24c4a81f4e9fe8fu, 0.8214766089703643, -0.255187430233956},
        {1u, STREAM_INIT + 7, 0, 0x0a0bd08e771f0b3eu, 0.039242777616092295, 0.2694444980654034},
        {2u, STREAM_TRAIN, 0, 0xc3985aa563197c34u, 0.7640434888627164, 1.059585213419178},
        {UINT64_MAX, STREAM_TRAIN + 5, 3, 0x717b0c6237f4db15u, 0.44328381917871995,
         -1.4163138189227495},
        {1u, STREAM_EVAL, 0, 0x43231092eddfb6efu, 0.2622537955011228, 0.15669086931214588},
        {1u, STREAM_SAMPLE + 9, (uint64_t)1 << 40, 0xa8dc6d5365a0c26cu, 0.659613449917404,
         -0.5707021287923867},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        uint64_t seed = rows[k].seed, stream = rows[k].stream, i = rows[k].i;
        uint64_t got = rand_u64(seed, stream, i);
        CHECK(got == rows[k].u64, "row %zu: expected %016llx, got %016llx", k,
              (unsigned long long)rows[k].u64, (unsigned long long)got);
        CHECK(rand_u32(seed, stream, i) == got >> 32, "row %zu: u32 is the upper half", k);
        CHECK(rand_uniform(seed, stream, i) == rows[k].uniform, "row %zu: uniform %.17g", k,
              rand_uniform(seed, stream, i));
        CHECK(fabs(rand_normal(seed, stream, i) - rows[k].normal) < 1e-14, "row %zu: normal %.17g",
              k, rand_normal(seed, stream, i)); // log and cos may differ in the last bit
    }
}

// test_rng_uniform: 256 buckets, filled along i, along streams and along seeds: chi-square of 255
// degrees of freedom, 255 +- 23. Every bit is 1 half the time, also in neighbours' differences.
static void test_rng_uniform(void)
{
    enum { N = 1 << 18 };
    static const char *along[] = {"i", "streams", "seeds"};
    for (uint64_t k = 0; k < 3; k++) {
        double count[2][256] = {{0}}, ones[2][64] = {{0}}, chi = 0, worst = 0;
        uint64_t last = 0;
        for (uint64_t n = 0; n < N; n++) {
            uint64_t u = rand_u64(k == 2 ? n : 1, STREAM_TRAIN + (k == 1 ? n : 0), k == 0 ? n : 0);
            count[0][u >> 56]++;
            count[1][u & 255]++;
            for (int bit = 0; bit < 64; bit++) {
                ones[0][bit] += u >> bit & 1;
                ones[1][bit] += (u ^ last) >> bit & 1;
            }
            last = u;
        }
        for (int half = 0; half < 2; half++) {
            chi = 0;
            for (int j = 0; j < 256; j++)
                chi += (count[half][j] - N / 256) * (count[half][j] - N / 256) / (N / 256);
            CHECK(chi > 150 && chi < 370, "along %s: chi-square %.1f", along[k], chi);
        }
        for (int j = 0; j < 64; j++) // in standard deviations
            for (int kind = 0; kind < 2; kind++)
                worst = fmax(worst, fabs(ones[kind][j] - N / 2) / sqrt(N / 4.0));
        CHECK(worst < 5, "along %s: a bit is %.1f deviations from half", along[k], worst);
    }
}

// test_rng_moments: of uniforms and normals, within 5 standard errors; rand_below stays below n and
// is uniform.
static void test_rng_moments(void)
{
    enum { N = 1000000 };
    double u1 = 0, u2 = 0, z1 = 0, z2 = 0, z3 = 0, z4 = 0, lag = 0, last = 0, chi = 0;
    double count[26] = {0}, low = 1, high = 0, far = 0;
    for (uint64_t i = 0; i < N; i++) {
        double u = rand_uniform(1, STREAM_SAMPLE, i), z = rand_normal(1, STREAM_INIT, i);
        low = fmin(low, u);
        high = fmax(high, u);
        u1 += u / N;
        u2 += u * u / N;
        z1 += z / N;
        z2 += z * z / N;
        z3 += z * z * z / N;
        z4 += z * z * z * z / N;
        far += fabs(z) > 3;
        lag += z * last / N;
        last = z;
        count[rand_below(1, STREAM_EVAL, i, 26)]++;
    }
    CHECK(low >= 0 && low < 1e-4 && high < 1 && high > 1 - 1e-4, "uniforms %g to %g", low, high);
    CHECK(fabs(u1 - 1 / 2.0) < 0.0015 && fabs(u2 - 1 / 3.0) < 0.0015, "uniform: %g %g", u1, u2);
    CHECK(fabs(z1) < 0.005 && fabs(z2 - 1) < 0.0071, "normal: mean %g, square %g", z1, z2);
    CHECK(fabs(z3) < 0.02 && fabs(z4 - 3) < 0.05, "normal: third %g, fourth %g", z3, z4);
    CHECK(fabs(far - 2700) < 260, "normal: %g of a million beyond 3, expected 2700", far);
    CHECK(fabs(lag) < 0.005, "normal: neighbours correlate %g", lag);
    for (int a = 0; a < 26; a++)
        chi += (count[a] - N / 26.0) * (count[a] - N / 26.0) / (N / 26.0);
    CHECK(chi < 65, "below 26: chi-square %.1f, expected about 25", chi);
    for (uint64_t i = 0; i < 1000; i++)
        if (rand_below(1, 0, i, 1) != 0 || rand_below(1, 0, i, UINT32_MAX) == UINT32_MAX)
            CHECK(0, "number %d is not below 1 or 2^32 - 1", (int)i);
}

// by_value: order of 64-bit values, for qsort.
static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// test_rng_streams: no number twice in the beginnings of all families, neighbouring streams and the
// seeds 0, 1, 2 and 2^64 - 1 (D07): a million numbers of 64 bits repeat with probability 3e-8.
static void test_rng_streams(void)
{
    enum { N = 20000 };
    const uint64_t seeds[] = {0, 1, 2, UINT64_MAX};
    const uint64_t streams[] = {0, 1, STREAM_INIT, STREAM_INIT + 1, STREAM_INIT + 2, STREAM_TRAIN,
                                STREAM_TRAIN + 1, STREAM_EVAL, STREAM_EVAL + 1, STREAM_SAMPLE};
    const size_t all = 4 * 10 * (size_t)N;
    uint64_t *seen = (uint64_t *)alloc_zero(all, sizeof *seen, "numbers");
    size_t n = 0, twice = 0;
    for (int s = 0; s < 4; s++)
        for (int t = 0; t < 10; t++)
            for (uint64_t i = 0; i < N; i++)
                seen[n++] = rand_u64(seeds[s], streams[t], i);
    qsort(seen, n, sizeof *seen, by_value);
    for (size_t i = 1; i < n; i++)
        twice += seen[i] == seen[i - 1];
    CHECK(twice == 0, "%zu of %zu numbers came twice", twice, n);
    free(seen);
}

// ------------------------------------------------------------------------------------------------
// [options]

// A command line with every type of option, and the trainers' own.
static struct {
    int size, count, kind, force, help;
    uint64_t seed;
    double rate, balance;
    const char *out, *task, *preset;
} typed;

static const Preset good_presets[] = {
    {"tiny", "--size 8 --rate 0.5", "a tiny one"},
    {"large", "--size 512 --kind blue", "a large one"},
    {NULL, NULL, NULL},
};
static const Preset small_presets[] = {
    {"large", "--size 512", "a large one"},
    {"small", "--size 2 --rate 0.5", "what runs without --task and --preset"},
    {NULL, NULL, NULL},
};
static const Preset bad_presets[] = {
    {"bad-twice", "--size 8 --size 9", "a preset with a mistake"},
    {"bad-value", "--size x", "another"},
    {"bad-unknown", "--sise 8", "another"},
    {NULL, NULL, NULL},
};

// typed_options: the table of `typed`.
static void typed_options(Options *options)
{
    const Option rows[] = {
        {"size", OPT_INT, &typed.size, "16", 1, 1 << 20, "things", DEFINES_MODEL, "how many"},
        {"count", OPT_INT, &typed.count, "7", -5, 1e9, "things", RUNTIME, "how often"},
        {"rate", OPT_REAL, &typed.rate, "1e-3", 0, 1e30, "rate", DEFINES_TRAINING, "how fast"},
        {"balance", OPT_REAL, &typed.balance, "0", -1, 1, "-1..1", RUNTIME, "left or right"},
        {"seed", OPT_U64, &typed.seed, "1", 0, 0, "number", DEFINES_TRAINING, "of everything"},
        {"kind", OPT_CHOICE, &typed.kind, "green", 0, 0, "red|green|blue", DEFINES_DATA, "colour"},
        {"out", OPT_STRING, &typed.out, NULL, 0, 0, "DIR", RUNTIME, "where"},
        {"force", OPT_FLAG, &typed.force, NULL, 0, 0, "", RUNTIME, "at any price"},
        {"task", OPT_STRING, &typed.task, NULL, 0, 0, "TASK", DEFINES_DATA, "what for"},
        {"preset", OPT_STRING, &typed.preset, NULL, 0, 0, "NAME", RUNTIME, "see below"},
        {"help", OPT_FLAG, &typed.help, NULL, 0, 0, "", RUNTIME, "print this"},
    };
    memset(&typed, 0, sizeof typed);
    memset(options, 0, sizeof *options);
    options_add(options, rows, sizeof rows / sizeof *rows);
}

// words: split `text` at blanks into argv after a program name; `copy` holds the words.
static int words(const char *text, char *copy, size_t size, char **argv, int most)
{
    int n = 1;
    argv[0] = (char *)"program";
    snprintf(copy, size, "%s", text);
    for (char *w = strtok(copy, " "); w && n < most; w = strtok(NULL, " "))
        argv[n++] = w;
    argv[n] = NULL;
    return n;
}

// parse_with: parse the command line `text`, print the configuration as typed.
static void parse_with(const char *text, const Preset *presets)
{
    Options options;
    char copy[512], *argv[32], value[OPTION_VALUE_MAX];
    typed_options(&options);
    options_parse(&options, presets, words(text, copy, sizeof copy, argv, 31), argv,
                  "program: a program", NULL);
    for (int i = 0; i < options.n; i++) {
        option_format(&options.rows[i], value, sizeof value);
        printf("%s=%s ", options.rows[i].name, value);
    }
}

// parse, parse_small: in a child: the same; the second with a preset of the name small.
static void parse(void *text)
{
    parse_with(text, strstr((const char *)text, "preset bad-") ? bad_presets : good_presets);
}

static void parse_small(void *text)
{
    parse_with(text, small_presets);
}

// refused: one check that the command line ends with exit code 2 and a message that holds `part`.
static void refused(const char *text, const char *part)
{
    expect_die(parse, (void *)text, EXIT_USAGE, part);
}

// accepted_by, accepted: one check that a command line is fine and its configuration holds `part`.
static void accepted_by(void (*parser)(void *), const char *text, const char *part)
{
    Outcome out = run_child(parser, (void *)text);
    CHECK(out.code == 0 && strstr(out.text, part), "%s: expected \"%s\", got code %d and %s", text,
          part, out.code, out.text);
}

static void accepted(const char *text, const char *part)
{
    accepted_by(parse, text, part);
}

// test_options_accepted: values, both ways to write them, presets under what the user typed.
static void test_options_accepted(void)
{
    accepted("", "size=16 count=7 rate=0.001 balance=0 seed=1 kind=green out= force=0 task= "
                 "preset= ");
    accepted("--size 5 --seed=3", "size=5 count=7 rate=0.001 balance=0 seed=3 ");
    accepted("--size=1 --count -5 --balance -1", "size=1 count=-5 rate=0.001 balance=-1 ");
    accepted("--size 1048576 --count 1000000000 --balance 1.0", "size=1048576 count=1000000000 ");
    accepted("--size 007 --rate .5e-3", "size=7 count=7 rate=0.0005 ");
    accepted("--rate=0", "rate=0 ");
    accepted("--rate 1e30", "rate=1e+30 ");
    accepted("--rate 0.1234567890123456", "rate=0.12345678901234559 "); // the same number
    accepted("--seed 0", "seed=0 ");
    accepted("--seed 18446744073709551615", "seed=18446744073709551615 ");
    accepted("--kind red --force", "kind=red out= force=1 ");
    accepted("--kind=blue --out a=b/c-d", "kind=blue out=a=b/c-d ");
    accepted("--out -x", "out=-x ");
    accepted("--preset tiny", "size=8 count=7 rate=0.5 ");
    accepted("--preset tiny --size 9", "size=9 count=7 rate=0.5 ");
    accepted("--size 9 --preset=tiny --seed 4", "size=9 count=7 rate=0.5 balance=0 seed=4 ");
    accepted("--size 16 --preset tiny", "size=16 count=7 rate=0.5 "); // 16 is the default too
    accepted_by(parse_small, "", "size=2 count=7 rate=0.5 ");
    accepted_by(parse_small, "--rate 1 --count 3", "size=2 count=3 rate=1 ");
    accepted_by(parse_small, "--task one", "size=16 count=7 rate=0.001 ");
    accepted_by(parse_small, "--task=one --size 3", "size=3 count=7 rate=0.001 ");
    accepted_by(parse_small, "--preset large", "size=512 count=7 rate=0.001 ");
    accepted("--preset large --kind red", "size=512 count=7 rate=0.001 balance=0 seed=1 kind=red ");
}

// test_options_refused: D01 to D06, each with the option's name and what was given.
static void test_options_refused(void)
{
    static const char *const rows[][2] = {
        {"--size 0", "--size: expected a whole number from 1 to 1048576, got 0"},
        {"--size 1048577", "from 1 to 1048576, got 1048577"},
        {"--count -6", "--count: expected a whole number from -5"},
        {"--size=", "--size: expected"},
        {"--size +5", "got \"+5\""},
        {"--size -", "got \"-\""},
        {"--size 5,000", "got \"5,000\""},
        {"--rate", "--rate needs a value (rate)"},
        {"--rate --size 5", "--rate needs a value (rate), got the option --size"},
        {"--rate=", "--rate: expected a number"},
        {"--rate +1", "--rate: expected a number"},
        {"--rate 1e31", "--rate: expected a number from 0 to 1e+30, got 1e31"},
        {"--balance -1.0001", "from -1 to 1, got -1.0001"},
        {"--seed -1", "--seed: expected a whole number from 0 to 18446744073709551615, got -1"},
        {"--seed 18446744073709551616", "from 0 to 18446744073709551615"},
        {"--seed 1.5", "--seed: expected a whole number, got \"1.5\""},
        {"--seed 0x10", "got \"0x10\""},
        {"--kind purple", "--kind: expected one of red|green|blue, got \"purple\""},
        {"--kind gre", "got \"gre\""},
        {"--kind red|green", "got \"red|green\""},
        {"--kind=", "got \"\""},
        {"--out=", "--out: expected DIR, got an empty string"},
        {"--out", "--out needs a value (DIR)"},
        {"--out --force", "--out needs a value (DIR), got the option --force"},
        {"--force=1", "--force takes no value"},
        {"--bogus", "unknown option \"--bogus\""},
        {"--sise 5", "unknown option \"--sise\": the nearest is --size"},
        {"--sise=5", "unknown option \"--sise=5\": the nearest is --size"},
        {"--Rate 1", "the nearest is --rate"},
        {"--balnce 1", "the nearest is --balance"},
        {"--learning_rate 1 --size 5", "unknown option \"--learning_rate\""},
        {"-seed 5", "unknown option \"-seed\": the nearest is --seed"},
        {"-s 5", "unknown option \"-s\""},
        {"--s 5", "unknown option \"--s\""}, // --size or --seed?
        {"word", "unexpected word \"word\""},
        {"--size 5 16", "unexpected word \"16\""},
        {"--force yes", "unexpected word \"yes\""},
        {"word --size 5", "unexpected word \"word\""},
        {"--size 5 -- word", "unexpected word \"word\""},
        {"-", "unexpected word \"-\""},
        {"--size 5 --size 5", "--size is given twice"},
        {"--size=5 --rate 1 --size=6", "--size is given twice"},
        {"--force --force", "--force is given twice"},
        {"--preset tiny --preset tiny", "--preset is given twice"},
        {"--preset tin", "there is no preset \"tin\""},
        {"--preset bad-twice", "--size is given twice in bad-twice"},
        {"--preset bad-value", "--size: expected a whole number, got \"x\""},
        {"--preset bad-unknown", "unknown option \"--sise\": the nearest is --size"},
        {"--preset tiny --rate nan", "--rate: expected a number"},
        {"--rate nan --help", "--rate: expected a number"},
    };
    char longest[400] = "--size 5 --";
    memset(longest + strlen(longest), 'x', 300);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        refused(rows[k][0], rows[k][1]);
    refused(longest, "unknown option \"--xxx");
}

// trainer_options: every option that is not a model's, as the trainers have them.
static void trainer_options(Options *options, Training *t)
{
    static int task;
    static TaskOptions task_values;
    memset(options, 0, sizeof *options);
    memset(t, 0, sizeof *t);
    task_options(options, &task, &task_values);
    training_options(options, t);
}

// parse_trainer: in a child: parse a command line of a trainer.
static void parse_trainer(void *text)
{
    static Options options;
    static Training training;
    static const Preset no_presets[] = {{NULL, NULL, NULL}};
    char copy[512], *argv[32];
    trainer_options(&options, &training);
    options_parse(&options, no_presets,
                  words((const char *)text, copy, sizeof copy, argv, 31), argv, "trainer", NULL);
    training_check(&training);
}

// test_options_numbers: D01 to D04 for every number a trainer takes: refused by name.
static void test_options_numbers(void)
{
    static const char *const bad_ints[] = {"abc", "8x", "3.5", "1e3", "0x10", "99999999999",
                                           "2147483648", "-1", "nan", "inf", "5 5", "1e400"};
    static const char *const bad_reals[] = {"abc", "8x", "nan", "-nan", "NaN", "nan(1)", "inf",
                                            "-inf", "infinity", "1e400", "-1e400", "1e-400",
                                            "0x10", "0x1p3", "1e", "1,5", "1..2", "-1", "-1e-9"};
    static Options options;
    static Training training;
    char text[128], name[64];
    int numbers = 0;
    trainer_options(&options, &training);
    for (int i = 0; i < options.n; i++) {
        const Option *o = &options.rows[i];
        int is_real = o->type == OPT_REAL;
        if (!is_real && o->type != OPT_INT)
            continue;
        numbers++;
        for (int k = 0; k < (is_real ? 19 : 12); k++) {
            snprintf(name, sizeof name, "--%s", o->name);
            snprintf(text, sizeof text, "%s %s", name, is_real ? bad_reals[k] : bad_ints[k]);
            if (!strcmp(bad_ints[k % 12], "5 5") && !is_real)
                strcpy(name, "unexpected word \"5\"");
            expect_die(parse_trainer, text, EXIT_USAGE, name);
        }
    }
    CHECK(numbers >= 15, "only %d options are numbers", numbers);
    expect_die(parse_trainer, (void *)"--batch-size 0", EXIT_USAGE, "--batch-size");
    expect_die(parse_trainer, (void *)"--string-size 0", EXIT_USAGE, "--string-size");
    CHECK(run_child(parse_trainer, (void *)"--steps 0").code == 0, "--steps 0 is fine");
}

// test_options_trainer: defaults parse back to themselves; combinations that make no sense (D06).
static void test_options_trainer(void)
{
    static Options options;
    static Training training;
    char value[OPTION_VALUE_MAX], again[OPTION_VALUE_MAX];
    trainer_options(&options, &training);
    for (int i = 0; i < options.n; i++) {
        const Option *o = &options.rows[i];
        if (!o->def)
            continue;
        option_set(o, o->def);
        option_format(o, value, sizeof value);
        option_set(o, value);
        option_format(o, again, sizeof again);
        CHECK(!strcmp(value, again), "--%s %s is printed as %s", o->name, value, again);
    }
    expect_die(parse_trainer, (void *)"--out x --resume --force", EXIT_USAGE, "--force");
    expect_die(parse_trainer, (void *)"--out x --resume --load y", EXIT_USAGE, "--load");
    expect_die(parse_trainer, (void *)"--resume", EXIT_USAGE, "--out");
    expect_die(parse_trainer, (void *)"--accumulate 2 --dump d", EXIT_USAGE, "--accumulate 2");
    expect_die(parse_trainer, (void *)"--lr 1e-3 --lr-min 2e-3", EXIT_USAGE, "--lr-min");
}

// add_past_end: one row more than a table holds.
static void add_past_end(void *arg)
{
    static Options options;
    const Option row = {"x", OPT_FLAG, &typed.force, NULL, 0, 0, "", RUNTIME, ""};
    (void)arg;
    for (int i = 0; i <= OPTIONS_MAX; i++)
        options_add(&options, &row, 1);
}

// test_options_help: --help wins, exits 0 and shows every option, default and preset.
static void test_options_help(void)
{
    static const char *const parts[] = {
        "program: a program\n", "--size things", "how many [16]\n", "--kind red|green|blue",
        "[green]", "--force", "tiny", "a tiny one", "--size 8 --rate 0.5", "large", "--help"};
    Outcome out = run_child(parse, (void *)"--size 3 --preset nowhere --help");
    CHECK(out.code == 0, "--help: exit code %d", out.code);
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)
        CHECK(strstr(out.text, parts[k]), "--help lacks \"%s\":\n%s", parts[k], out.text);
    out = run_child(parse_trainer, (void *)"--help");
    CHECK(out.code == 0 && strstr(out.text, "--batch-size sequences"), "a trainer's: %s", out.text);
    expect_die(add_past_end, NULL, EXIT_FAIL, "OPTIONS_MAX");
}

// test_options_edit_distance: by hand, and symmetric; names of 64 characters are far from all.
static void test_options_edit_distance(void)
{
    static const struct {
        const char *a, *b;
        int distance;
    } rows[] = {{"", "", 0},           {"", "abc", 3},         {"a", "a", 0},
                {"a", "b", 1},         {"kitten", "sitting", 3}, {"flaw", "lawn", 2},
                {"abcd", "acbd", 2},   {"lr", "lr-min", 4},    {"sise", "size", 1},
                {"intention", "execution", 5}};
    char x63[64] = "", x64[65] = "";
    memset(x63, 'x', 63);
    memset(x64, 'x', 64);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        int there = edit_distance(rows[k].a, rows[k].b), back = edit_distance(rows[k].b, rows[k].a);
        CHECK(there == rows[k].distance && back == there, "\"%s\" to \"%s\": %d, back %d, not %d",
              rows[k].a, rows[k].b, there, back, rows[k].distance);
    }
    CHECK(edit_distance(x63, x63) == 0 && edit_distance(x63, "") == 63, "63 characters");
    CHECK(edit_distance(x64, x64) == 64 && edit_distance("a", x64) == 64, "64 characters");
}

// ------------------------------------------------------------------------------------------------
// [log]

// Rows of a run up to step 11, with an evaluation at 5 and 10, and a line that was being written
// when the run died.
static const char old_log[] =
    "# task=copying lr=0.001\n# git=abc\n" LOG_COLUMNS "\n"
    "0,train,3.5,0,0.001,1,10,1000\n1,train,3.4,0.5,0.001,1,10,1000\n"
    "2,train,3.3,0.99,0.001,1,10,1000\n3,train,3.2,1,0.001,1,10,1000\n"
    "4,train,3.1,1,0.001,1,10,1000\n5,val,3,1,0,0,0,0\n5,train,3,1,0.001,1,10,1000\n"
    "6,train,2.9,1,0.001,1,10,1000\n10,val,2,1,0,0,0,0\n10,train,2,1,0.001,1,10,1000\n"
    "11,train,1.9,1,0.0";

// log_in: a log whose directory is `name` in the temporary one, made if need be.
static Log log_in(const char *name)
{
    Log log = log_none();
    snprintf(log.dir, sizeof log.dir, "%s", in_dir(name));
    dir_make(log.dir);
    return log;
}

// start_log: log_open, then log_start.
static int start_log(Log *log, long step)
{
    log_open(log);
    return log_start(log, step);
}

// open_log: open the log `arg` from step 0 and write a row, in a child.
static void open_log(void *arg)
{
    Log log = *(const Log *)arg;
    LogRow row = {0, "train", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0};
    if (start_log(&log, -1))
        log_header(&log, "CPU");
    log_row(&log, &row);
    log_close(&log);
}

// test_log_fresh: a new log.csv: `#` lines, columns, rows at once on the disk, floats of 9 digits.
static void test_log_fresh(void)
{
    Log log = log_in("run");
    char path[LOG_PATH];
    size_t n;
    LogRow rows[] = {
        {0, "train", 3.3672958299864741, 0.25, 2e-5, 1 / 3.0, 12.5, 1e6, 0, 0, 0, 0, 0, 0},
        {1000000, "val", 1e-12, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
        {1000001, "train", 1, 0.99, 1e-3, 1, 1, 1, 0, 0, 0, 0, 0, 0}};
    log_path(&log, "log.csv", path);
    put_file(path, "old\n", 4); // as --force finds it
    CHECK(start_log(&log, -1) == 1, "a log from step 0 starts empty");
    fprintf(log.csv, "# lr=1\n");
    log_header(&log, "CPU");
    for (int k = 0; k < 3; k++)
        log_row(&log, &rows[k]);
    char *text = (char *)get_file(path, &n), *columns = strstr(text, "\n" LOG_COLUMNS "\n");
    CHECK(!strncmp(text, "# lr=1\n# git=", 13) && columns, "the beginning of log.csv: %s", text);
    CHECK(columns && !strcmp(columns + strlen(LOG_COLUMNS) + 2,
                             "0,train,3.36729583,0.25,2e-05,0.333333333,12.5,1000000\n"
                             "1000000,val,1e-12,1,0,0,0,0\n1000001,train,1,0.99,0.001,1,1,1\n"),
          "rows, flushed: %s", text);
    CHECK(log.first_99 == 1000001, "99%% first at %ld, evaluation does not count", log.first_99);
    free(text);
    log_close(&log);
    CHECK(!log.csv, "log_close forgets the file");
    log_row(&log, &rows[0]); // a closed log takes no row
    empty_dir("");
}

// test_log_resume: a log resumed at a step keeps the rows before it, whole lines only, and goes on.
static void test_log_resume(void)
{
    static const struct {
        long step, first_99;
        const char *last; // the last line kept
    } rows[] = {{0, -1, LOG_COLUMNS "\n"},
                {1, -1, "0,train,3.5,0,0.001,1,10,1000\n"},
                {3, 2, "2,train,3.3,0.99,0.001,1,10,1000\n"},
                {5, 2, "4,train,3.1,1,0.001,1,10,1000\n"},
                {6, 2, "5,train,3,1,0.001,1,10,1000\n"},
                {7, 2, "6,train,2.9,1,0.001,1,10,1000\n"},
                {10, 2, "6,train,2.9,1,0.001,1,10,1000\n"},
                {11, 2, "10,train,2,1,0.001,1,10,1000\n"},
                {12, 2, "10,train,2,1,0.001,1,10,1000\n"},
                {99, 2, "10,train,2,1,0.001,1,10,1000\n"}};
    const LogRow next = {7, "train", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0};
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        Log log = log_in("run");
        char path[LOG_PATH], expected[2048];
        size_t n, keep = (size_t)(strstr(old_log, rows[k].last) - old_log) + strlen(rows[k].last);
        put_file(log_path(&log, "log.csv", path), old_log, sizeof old_log - 1);
        CHECK(start_log(&log, rows[k].step) == 0, "a resumed log is not empty");
        log_row(&log, &next);
        log_close(&log);
        snprintf(expected, sizeof expected, "%.*s7,train,1,1,1,1,1,1\n", (int)keep, old_log);
        char *text = (char *)get_file(path, &n);
        CHECK(!strcmp(text, expected), "resumed at %ld: expected\n%sgot\n%s", rows[k].step,
              expected, text);
        CHECK(log.first_99 == (rows[k].first_99 < 0 ? 7 : rows[k].first_99), "99%% first at %ld",
              log.first_99);
        free(text);
    }
    for (size_t cut = 0; cut < sizeof old_log; cut++) { // wherever the run died
        Log log = log_in("run");
        char path[LOG_PATH];
        size_t n, whole = cut;
        while (whole && old_log[whole - 1] != '\n')
            whole--;
        if (whole < (size_t)(strstr(old_log, LOG_COLUMNS) + sizeof LOG_COLUMNS - old_log))
            whole = 0; // no header yet: as good as new
        put_file(log_path(&log, "log.csv", path), old_log, cut);
        CHECK(start_log(&log, 99) == (whole == 0), "cut at %zu", cut);
        log_close(&log);
        free(get_file(path, &n));
        CHECK(n == whole, "cut at %zu: %zu bytes stay, expected %zu", cut, n, whole);
    }
    empty_dir("");
}

// test_log_lock: a second writer is refused and changes nothing (C21); a closed log is free again.
static void test_log_lock(void)
{
    Log log = log_in("run");
    LogRow row = {0, "train", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0};
    char path[LOG_PATH];
    size_t n, m;
    start_log(&log, -1);
    log_header(&log, "CPU");
    log_row(&log, &row);
    unsigned char *before = get_file(log_path(&log, "log.csv", path), &n);
    expect_die(open_log, &log, EXIT_DATA, "another run is writing it");
    expect_die(open_log, &log, EXIT_DATA, path);
    unsigned char *after = get_file(path, &m);
    CHECK(n == m && !memcmp(before, after, n), "the first writer's rows are untouched");
    log_close(&log);
    CHECK(run_child(open_log, &log).code == 0, "then another run may write");
    free(before);
    free(after);
    mkdir(in_dir("bad"), 0777);
    mkdir(in_dir("bad/log.csv"), 0777);
    log = log_in("bad");
    expect_die(open_log, &log, EXIT_DATA, "bad/log.csv: cannot write: Is a directory");
    empty_dir("");
}

typedef struct {
    const char *out;
    int resume, force;
} Take;

// take_dir: in a child, in the temporary directory: decide the run's directory and print it.
static void take_dir(void *arg)
{
    const Take *take = (const Take *)arg;
    Log log = log_none();
    struct stat st;
    if (chdir(dir))
        exit(99);
    log_take_dir(&log, take->out, "copying", "quadratic", take->resume, take->force);
    printf("%s%s", log.dir, stat(log.dir, &st) || !S_ISDIR(st.st_mode) ? " is missing" : "");
}

// taken: one check that --out (NULL: none) with these flags gives the directory `expected`.
static void taken(const char *out, int resume, int force, const char *expected)
{
    Take take = {out, resume, force};
    Outcome got = run_child(take_dir, &take);
    CHECK(got.code == 0 && !strcmp(got.text, expected), "--out %s: expected %s, got code %d and %s",
          out ? out : "(none)", expected, got.code, got.text);
}

// not_taken: one check that --out ends with this exit code and a message that holds `part`.
static void not_taken(const char *out, int force, int code, const char *part)
{
    Take take = {out, force < 0, force > 0}; // force -1: resume
    expect_die(take_dir, &take, code, part);
}

// test_log_directories: the next free one; a given one is new, or the user says what to do (C18).
static void test_log_directories(void)
{
    char longest[LOG_DIR + 10];
    taken(NULL, 0, 0, "runs/copying-quadratic-001");
    taken(NULL, 0, 0, "runs/copying-quadratic-002");
    taken(NULL, 0, 1, "runs/copying-quadratic-003");
    rmdir(in_dir("runs/copying-quadratic-002"));
    put_file(in_dir("runs/copying-quadratic-004"), "", 0); // a file takes its number too
    taken(NULL, 0, 0, "runs/copying-quadratic-002");
    taken(NULL, 0, 0, "runs/copying-quadratic-005");
    taken("new", 0, 0, "new");
    taken("new", 0, 0, "new"); // still empty
    taken("deep/er/run/", 0, 0, "deep/er/run/");
    taken(in_dir("absolute/run"), 0, 0, in_dir("absolute/run"));
    put_file(in_dir("new/x"), "precious", 8);
    not_taken("new", 0, EXIT_USAGE, "--out new: expected a new directory");
    not_taken("new/", 0, EXIT_USAGE, "\nhint: --resume goes on with that run, --force overwrites");
    taken("new", 1, 0, "new");
    taken("new", 0, 1, "new");
    CHECK(access(in_dir("new/x"), F_OK) == 0, "nothing was deleted");
    not_taken("lost", -1, EXIT_DATA, "--out lost: expected the directory of a run to resume");
    CHECK(access(in_dir("lost"), F_OK), "a run that is not there is not made by --resume");
    put_file(in_dir("file"), "x", 1);
    for (int force = -1; force < 2; force++) {
        not_taken("file", force, EXIT_DATA, "--out file: expected a directory");
        not_taken("file/run", force, EXIT_DATA, "--out file/run: ");
        not_taken("/proc/seqc/run", force, EXIT_DATA, force < 0 ? "expected" : "cannot make the");
    }
    if (geteuid() != 0) { // root may write anywhere
        chmod(in_dir("deep"), 0500);
        not_taken("deep/other", 0, EXIT_DATA, "Permission denied");
        chmod(in_dir("deep"), 0700);
    }
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    not_taken(longest, 0, EXIT_USAGE, "--out: expected a path shorter than");
    longest[300] = 0;
    not_taken(longest, 0, EXIT_DATA, "File name too long");
    empty_dir("");
    put_file(in_dir("runs"), "", 0);
    not_taken(NULL, 0, EXIT_DATA, "runs: expected a directory");
    empty_dir("");
}

// test_log_duration: times as people read them.
static void test_log_duration(void)
{
    const double seconds[] = {-1, 0, 0.4, 59.4, 59.6, 185, 3599.4, 3600, 7620, 360000};
    const char *const texts[] = {"0s", "0s", "0s", "59s", "1m00s", "3m05s", "59m59s", "1h00m",
                                 "2h07m", "100h00m"};
    char text[32];
    for (int k = 0; k < 10; k++)
        CHECK(!strcmp(duration_text(seconds[k], text, sizeof text), texts[k]), "%g: %s, not %s",
              seconds[k], text, texts[k]);
}

int main(void)
{
    make_dir();
    test_check_comparator();
    test_check_outliers();
    test_rng_values();
    test_rng_uniform();
    test_rng_moments();
    test_rng_streams();
    test_options_accepted();
    test_options_refused();
    test_options_numbers();
    test_options_trainer();
    test_options_help();
    test_options_edit_distance();
    test_log_fresh();
    test_log_resume();
    test_log_lock();
    test_log_directories();
    test_log_duration();
    return test_report();
}
