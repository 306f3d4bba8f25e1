// test_tensors.c: tests of util/tensors.h and of the checkpoints util/training.h makes of them.
//
//     gcc -O2 -Wall -Wextra test_tensors.c -o build/test_tensors -lm && build/test_tensors
//
// [tensors]   arenas: layout, canaries, absent tensors, sizes that do not fit
// [training]  learning rate, checkpoints: bit-exact, or refused by name
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef POISON
#define POISON // new arenas hold NaN, as under `make debug`
#endif
#include "dev/testing.h"
#include "util/training.h"
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN // clang's; its allocator has its own words for too large a request
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN
#endif

// ------------------------------------------------------------------------------------------------
// [tensors]

typedef struct {
    void *wte, *w, *none, *bias, *last;
} Pointers;

// small_table: five tensors, one of which does not exist; their number.
static int small_table(Tensor *table)
{
    const Tensor rows[] = {
        {"wte", {7, 3}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Pointers, wte)},
        {"w", {2, 3, 5}, INIT_NORMAL(0.02), DECAY, 1, offsetof(Pointers, w)},
        {"none", {0, 5}, INIT_NORMAL(1), DECAY, 1, offsetof(Pointers, none)},
        {"bias", {16}, INIT_ZERO, NO_DECAY, 1, offsetof(Pointers, bias)},
        {"last", {1, 1, 1, 1}, INIT_NORMAL(3), DECAY, 1, offsetof(Pointers, last)},
    };
    memcpy(table, rows, sizeof rows);
    return 5;
}

// small_arena: those tensors, planned and allocated; p = its pointers.
static Arena small_arena(Pointers *p, size_t real_size)
{
    Tensor table[8];
    Arena a;
    int n = small_table(table);
    arena_plan(&a, "parameters", table, n, real_size);
    arena_alloc(&a, p);
    return a;
}

// check_arena: arena_check in a child.
static void check_arena(void *arena)
{
    arena_check((const Arena *)arena);
}

// test_tensors_layout: pointers, alignment, room between tensors, counts; in float and double.
static void test_tensors_layout(void)
{
    for (size_t size = 4; size <= 8; size += 4) {
        Pointers p;
        Arena a = small_arena(&p, size);
        const void *in_struct[] = {p.wte, p.w, p.none, p.bias, p.last};
        const size_t count[] = {21, 30, 0, 16, 1};
        for (int i = 0; i < 5; i++) {
            size_t room = (i < 4 ? a.start[i + 1] : a.bytes) - a.start[i];
            CHECK(tensor_size(&a.table[i]) == count[i], "%s has %zu elements", a.table[i].name,
                  tensor_size(&a.table[i]));
            CHECK(in_struct[i] == (count[i] ? arena_data(&a, i) : NULL), "pointer of %s",
                  a.table[i].name);
            CHECK(a.start[i] % 64 == 0 && room >= count[i] * size + 64,
                  "%s starts at %zu and has room for %zu bytes", a.table[i].name, a.start[i], room);
        }
        CHECK(tensor_dims(&a.table[1]) == 3 && tensor_dims(&a.table[4]) == 4 &&
                  tensor_dims(&a.table[2]) == 0, "dimensions");
        CHECK(arena_elements(&a, NULL) == 68 && arena_elements(&a, "wte") == 47 &&
                  arena_elements(&a, "wte,last") == 46 && arena_elements(&a, "none") == 68,
              "elements");
        CHECK(arena_elements(&a, "w") == 38, "w is not wte: %zu", arena_elements(&a, "w"));
        CHECK(arena_elements(&a, "wte,w") == 17, "w beside wte: %zu", arena_elements(&a, "wte,w"));
        CHECK(arena_elements(&a, "at-last") == 68, "at-last is not last");
        CHECK(run_child(check_arena, &a).code == 0, "canaries of a new arena");
        arena_free(&a);
        CHECK(!a.base, "arena_free forgets the memory");
    }
}

// test_tensors_canaries: a write past the end of any tensor is seen and named; a read past the end,
// or of what was never written, gives NaN.
static void test_tensors_canaries(void)
{
    Pointers p;
    Arena a = small_arena(&p, 4);
    size_t index = 99;
    const char *bad = arena_first_bad(&a, &index);
    CHECK(bad && !strcmp(bad, "wte") && index == 0, "a new arena is poisoned: %s[%zu]", bad, index);
    arena_fill(&a, 0);
    CHECK(!arena_first_bad(&a, &index), "zeros are finite");
    CHECK(run_child(check_arena, &a).code == 0, "arena_fill leaves the canaries");
    for (int i = 0; i < a.n; i++) {
        size_t size, n = tensor_size(&a.table[i]);
        unsigned char *canary = arena_canary(&a, i, &size);
        const size_t where[] = {0, 1, size / 2, size - 1};
        char message[64];
        CHECK(!is_finite_bits(real_at(arena_data(&a, i), n, 4)), "%s[%zu] is NaN", a.table[i].name,
              n);
        for (int k = 0; k < 4; k++) {
            snprintf(message, sizeof message, "%zu bytes past the end of %s", where[k] + 1,
                     a.table[i].name);
            canary[where[k]] = 0;
            expect_die(check_arena, &a, EXIT_FAIL, message);
            canary[where[k]] = CANARY;
        }
    }
    for (int kind = 0; kind < 3; kind++) {
        real_set(p.bias, 9, 4, kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY);
        bad = arena_first_bad(&a, &index);
        CHECK(bad && !strcmp(bad, "bias") && index == 9, "first bad: %s[%zu]", bad, index);
    }
    arena_free(&a);
    a = small_arena(&p, 8);
    CHECK(!is_finite_bits(((double *)p.w)[29]) && !is_finite_bits(((double *)p.w)[30]),
          "poison and canaries are NaN in double too");
    arena_free(&a);
}

// test_tensors_init: deviations and zeros as the table says; float is double rounded; a tensor's
// values depend on the seed, its number and nothing else.
static void test_tensors_init(void)
{
    Pointers p, q;
    Arena a = small_arena(&p, 4), b = small_arena(&q, 8);
    const Tensor alone[] = {{"x", {1}, INIT_ZERO, DECAY, 1, 0},
                            {"big", {300, 200}, INIT_NORMAL(0.02), DECAY, 1, 8},
                            {"ones", {9}, INIT_ONE, NO_DECAY, 1, 16},
                            {"counts", {2, 2, 3}, INIT_LOG_COUNT, NO_DECAY, 1, 24},
                            {"steps", {4000}, INIT_STEP(1e-3, 0.1), NO_DECAY, 1, 32}};
    Arena big;
    double sum = 0, squares = 0;
    size_t different = 0;
    arena_plan(&big, "parameters", alone, 5, 4);
    arena_alloc(&big, NULL);
    arena_init(&a, 5);
    arena_init(&b, 5);
    arena_init(&big, 5);
    for (int i = 0; i < a.n; i++)
        for (size_t k = 0; k < tensor_size(&a.table[i]); k++)
            different += (float)real_at(arena_data(&b, i), k, 8) !=
                         (float)real_at(arena_data(&a, i), k, 4);
    CHECK(!different, "float and double: %zu values differ", different);
    CHECK(!memcmp(p.w, arena_data(&big, 1), 30 * 4), "tensor 1 of another table begins the same");
    for (size_t k = 0; k < 60000; k++) {
        double x = real_at(arena_data(&big, 1), k, 4);
        sum += x / 60000;
        squares += x * x / 60000;
    }
    CHECK(fabs(sum) < 5e-4 && fabs(sqrt(squares) - 0.02) < 5e-4, "mean %g, deviation %g", sum,
          sqrt(squares));
    for (int i = 0; i < 16; i++)
        CHECK(((float *)p.bias)[i] == 0, "bias %d", i);
    for (int i = 0; i < 9; i++)
        CHECK(((float *)arena_data(&big, 2))[i] == 1, "one %d", i);
    for (int i = 0; i < 12; i++)
        CHECK(((float *)arena_data(&big, 3))[i] == (float)log(1.0 + i % 3), "ln 1, 2, 3: %d", i);
    sum = squares = 0;
    for (int i = 0; i < 4000; i++) { // log10 of steps: uniform between -3 and -1
        double x = log10(log1p(exp(real_at(arena_data(&big, 4), (size_t)i, 4))));
        CHECK(x > -3.0001 && x < -0.9999, "step %d: 10^%g", i, x);
        sum += x / 4000;
        squares += (x + 2) * (x + 2) / 4000;
    }
    CHECK(fabs(sum + 2) < 0.04 && fabs(squares - 1.0 / 3) < 0.02, "steps: mean %g, spread %g", sum,
          squares);
    CHECK(((float *)p.wte)[0] == (float)rand_normal(5, STREAM_INIT, 0), "the first number");
    arena_init(&a, 6);
    CHECK(((float *)p.wte)[0] != (float)((double *)q.wte)[0], "another seed, other numbers");
    CHECK(run_child(check_arena, &a).code == 0, "arena_init leaves the canaries");
    arena_free(&a);
    arena_free(&b);
    arena_free(&big);
}

// plan_shape: plan and allocate four tensors of the shape at `arg`, (4) sizes.
static void plan_shape(void *arg)
{
    const size_t *s = (const size_t *)arg;
    Tensor rows[4];
    Arena a;
    for (int i = 0; i < 4; i++) {
        const Tensor row = {"giant", {s[0], s[1], s[2], s[3]}, INIT_ZERO, 0, 1, 0};
        rows[i] = row;
    }
    arena_plan(&a, "activations", rows, 4, 8);
    arena_alloc(&a, NULL);
}

// plan_many: more tensors than a table holds.
static void plan_many(void *arg)
{
    Arena a;
    static Tensor rows[TENSORS_MAX + 1];
    arena_plan(&a, "activations", rows, TENSORS_MAX + 1, 4);
    (void)arg;
}

// list_many: more tensors than a file's list holds.
static void list_many(void *arg)
{
    static TensorList list;
    const size_t shape[] = {1, 0};
    float x = 0;
    for (int i = 0; i <= LIST_MAX; i++)
        list_add(&list, "", "x", ST_F32, shape, &x);
    (void)arg;
}

// test_tensors_sizes: sizes that overflow, or that no machine has, end in one line (G01, B10).
static void test_tensors_sizes(void)
{
    const size_t half = (size_t)1 << 32, most = SIZE_MAX;
    size_t shapes[][4] = {{half, half}, {most, 2}, {half, half / 2, 1}, // elements overflow
                          {most / 8 + 1}, {half, half / 8},            // their bytes do
                          {most / 8}, {most / 8 - 8},                  // room for a canary does
                          {most / 32 + 1}};                            // the sum of four does
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        expect_die(plan_shape, shapes[k], EXIT_MEMORY, "\nhint: make the model or the batch");
    expect_die(plan_shape, shapes[0], EXIT_MEMORY, "giant");
#ifndef WITH_ASAN
    size_t too_much[4] = {(size_t)1 << 44};
    expect_die(plan_shape, too_much, EXIT_MEMORY, "activations: cannot allocate 524288.00 GiB");
#endif
    expect_die(plan_many, NULL, EXIT_FAIL, "TENSORS_MAX");
    expect_die(list_many, NULL, EXIT_FAIL, "LIST_MAX");
}

// ------------------------------------------------------------------------------------------------
// [training]

// test_training_rate: the learning rate: warm-up starts above 0 (F03), empty intervals divide by
// nothing (F04), the cosine has no jump and ends at its minimum (F05).
static void test_training_rate(void)
{
    Training t = {.lr = 3, .warmup = 3, .steps = 10, .schedule = CONSTANT};
    const double table[] = {1, 2, 3, 3, 3, 3, 3, 3, 3, 3};
    const int edges[][2] = {{0, 1}, {5, 5}, {0, 0}, {7, 5}, {4, 5}, {0, 2}}; // warmup, steps
    for (int k = 0; k < 10; k++)
        CHECK(fabs(learning_rate(&t, k) - table[k]) < 1e-15, "constant, step %d: %g", k,
              learning_rate(&t, k));
    t = (Training){.lr = 3, .lr_min = 1, .warmup = 3, .steps = 8, .schedule = COSINE};
    const double cosine[] = {1, 2, 3, 3, 2.7071067811865475, 2, 1.2928932188134525, 1};
    for (int k = 0; k < 8; k++)
        CHECK(fabs(learning_rate(&t, k) - cosine[k]) < 1e-14, "cosine, step %d: %.17g", k,
              learning_rate(&t, k));
    CHECK(learning_rate(&t, 8) == 1 && learning_rate(&t, 800) == 1, "past the end: the minimum");
    t = (Training){.lr = 5e-4, .lr_min = 5e-5, .warmup = 20, .steps = 1000, .schedule = COSINE};
    double largest = 0;
    for (long k = t.warmup; k < t.steps; k++)
        largest = fmax(largest, fabs(learning_rate(&t, k) - learning_rate(&t, k - 1)));
    CHECK(largest <= 4 * t.lr / t.steps, "the largest change is %g", largest);
    CHECK(fabs(learning_rate(&t, 999) - 5e-5) < 1e-9, "the last is %g", learning_rate(&t, 999));
    for (int k = 0; k < 6; k++)
        for (int schedule = CONSTANT; schedule <= COSINE; schedule++) {
            t = (Training){.lr = 1, .schedule = schedule};
            t.warmup = edges[k][0];
            t.steps = edges[k][1];
            for (long step = 0; step < 10; step++) {
                double lr = learning_rate(&t, step);
                CHECK(is_finite_bits(lr) && lr >= 0 && lr <= 1, "warmup %d, steps %d: %g at %ld",
                      t.warmup, t.steps, lr, step);
            }
        }
}

// What a small trainer has; `load` and what follows say how check_load reads a checkpoint.
typedef struct {
    Options options;
    Training training;
    int channels, task, pairs;
    Weights weights;
    Pointers params, grads;
    const char *path, *architecture;
    int resume, schedule;
} Trainer;

// trainer_make: a trainer of five tensors (one absent) with distinct parameters and moments.
static Trainer *trainer_make(const char *path)
{
    Trainer *r = (Trainer *)alloc_zero(1, sizeof *r, "trainer");
    const Option model[] = {
        {"channels", OPT_INT, &r->channels, "3", 1, 100, "C", DEFINES_MODEL, "width"},
        {"task", OPT_CHOICE, &r->task, "copying", 0, 0, "copying|mqar", DEFINES_DATA, "what"},
        {"pairs", OPT_INT, &r->pairs, "4", 1, 100, "pairs", DEFINES_DATA, "of a task"}};
    Tensor table[8];
    int n = small_table(table);
    training_options(&r->options, &r->training);
    options_add(&r->options, model, 3);
    for (int i = 0; i < r->options.n; i++)
        if (r->options.rows[i].def)
            option_set(&r->options.rows[i], r->options.rows[i].def);
    weights_plan(&r->weights, table, n, 4);
    weights_alloc(&r->weights, &r->params, &r->grads, 1);
    arena_init(&r->weights.m, 2);
    arena_init(&r->weights.v, 3);
    r->path = path;
    r->architecture = "testmodel";
    r->resume = 1;
    return r;
}

// trainer_free: give it back.
static void trainer_free(Trainer *r)
{
    weights_free(&r->weights);
    free(r);
}

// check_load: in a child: load the checkpoint as the trainer says and print its step.
static void check_load(void *trainer)
{
    Trainer *r = (Trainer *)trainer;
    printf("step %ld", checkpoint_load(r->path, &r->weights, &r->options, r->architecture,
                                       r->resume, r->schedule));
}

// load_refused: both --resume and --load end with exit code 3, the path and `part`.
static void load_refused(Trainer *r, const char *part)
{
    for (r->resume = 0; r->resume < 2; r->resume++) {
        expect_die(check_load, r, EXIT_DATA, part);
        expect_die(check_load, r, EXIT_DATA, r->path);
    }
    r->resume = 1;
}

// load_accepted: loading prints this step.
static void load_accepted(Trainer *r, const char *step)
{
    Outcome out = run_child(check_load, r);
    CHECK(out.code == 0 && !strcmp(out.text, step), "expected \"%s\", got code %d and %s", step,
          out.code, out.text);
}

// same_values: 1 if two arenas of one table hold the same bits.
static int same_values(const Arena *a, const Arena *b)
{
    int same = 1;
    for (int i = 0; i < a->n; i++)
        same &= !memcmp(arena_data(a, i), arena_data(b, i), tensor_size(&a->table[i]) * 4);
    return same;
}

// test_training_round_trip: what is saved is loaded, bit for bit; --load leaves the moments alone;
// the file is what the formula says (C23).
static void test_training_round_trip(void)
{
    char path[2048];
    strcpy(path, in_dir("checkpoint.safetensors"));
    Trainer *a = trainer_make(path), *b = trainer_make(path), *c = trainer_make(path);
    float odd[] = {-0.0f, 1e-45f, 3.4028235e38f, -1e-38f};
    size_t n;
    memcpy(a->params.wte, odd, sizeof odd);
    arena_init(&b->weights.m, 5);
    arena_fill(&c->weights.params, 0);
    checkpoint_save(path, &a->weights, &a->options, "testmodel", 123456789);
    arena_fill(&b->weights.params, 0);
    arena_fill(&b->weights.v, 0);
    long step = checkpoint_load(path, &b->weights, &b->options, "testmodel", 1, CONSTANT);
    CHECK(step == 123456789, "step %ld", step);
    CHECK(same_values(&a->weights.params, &b->weights.params), "parameters");
    CHECK(same_values(&a->weights.m, &b->weights.m), "first moments");
    CHECK(same_values(&a->weights.v, &b->weights.v), "second moments");
    arena_fill(&a->weights.m, 0);
    arena_fill(&c->weights.m, 0);
    checkpoint_load(path, &c->weights, &c->options, "testmodel", 0, CONSTANT);
    CHECK(same_values(&a->weights.params, &c->weights.params), "--load: parameters");
    CHECK(same_values(&a->weights.m, &c->weights.m), "--load leaves the moments");
    checkpoint_save(in_dir("again"), &b->weights, &b->options, "testmodel", 123456789);
    unsigned char *first = get_file(path, &n);
    size_t size = n, header = 0;
    memcpy(&header, first, 8);
    CHECK(size == 8 + header + 3 * 68 * 4, "size %zu, header %zu", size, header);
    unsigned char *second = get_file(in_dir("again"), &n);
    CHECK(n == size && !memcmp(first, second, n), "saved again, the file is the same");
    CHECK(strstr((char *)first + 8, "\"lr\":\"0.002\"") && !strstr((char *)first + 8, "\"out\""),
          "the options that define the run are in it, its directory is not");
    free(first);
    free(second);
    trainer_free(a);
    trainer_free(b);
    trainer_free(c);
    empty_dir("");
}

// test_training_embeddings: --embed-std gives embeddings that standard deviation, by the same
// random numbers, and other tensors nothing; 0 leaves the model's own, --load has its file's.
static void test_training_embeddings(void)
{
    Trainer *r = trainer_make(NULL), *own = trainer_make(NULL);
    const Arena *got = &r->weights.params, *want = &own->weights.params;
    for (double std = 0; std < 1; std += 0.25) {
        r->training.embed_std = std;
        training_load(&r->training, &r->weights, &r->options, "testmodel");
        for (int k = 0; k < got->n; k++)
            for (size_t i = 0; i < tensor_size(&got->table[k]); i++) {
                const double x = real_at(arena_data(got, k), i, 4);
                const double y = real_at(arena_data(want, k), i, 4) * (k == 0 && std > 0 ? std : 1);
                CHECK(fabs(x - y) <= 1e-6 * fabs(y), "std %g, %s: %g, expected %g", std,
                      got->table[k].name, x, y);
            }
    }
    char path[2048];
    strcpy(path, in_dir("checkpoint.safetensors"));
    checkpoint_save(path, &own->weights, &own->options, "testmodel", 7);
    r->training.load = path;
    training_load(&r->training, &r->weights, &r->options, "testmodel");
    CHECK(!memcmp(r->params.wte, own->params.wte, 21 * sizeof(float)),
          "--embed-std drew over the weights of --load");
    trainer_free(r);
    trainer_free(own);
    empty_dir("");
}

// test_training_metadata: a checkpoint of another architecture, version or configuration is refused
// by name; --load asks for the model only, and --steps may change under a constant schedule.
static void test_training_metadata(void)
{
    char path[2048];
    strcpy(path, in_dir("checkpoint.safetensors"));
    Trainer *r = trainer_make(path);
    checkpoint_save(path, &r->weights, &r->options, "testmodel", 7);
    load_accepted(r, "step 7");
    r->architecture = "othermodel";
    load_refused(r, "expected a checkpoint of othermodel, got one of testmodel");
    r->architecture = "testmodel";
    r->channels = 4;
    load_refused(r, "was made with --channels 3, this run has 4\nhint: give --channels 3");
    r->channels = 3;
    r->training.lr = 0.5;
    expect_die(check_load, r, EXIT_DATA, "was made with --lr 0.002, this run has 0.5");
    r->resume = 0;
    load_accepted(r, "step 7");
    r->resume = 1;
    r->training.lr = 0.002;
    r->training.seed = 0;
    expect_die(check_load, r, EXIT_DATA, "was made with --seed 1, this run has 0");
    r->training.seed = 1;
    r->training.steps = 20;
    load_accepted(r, "step 7");
    r->schedule = COSINE;
    expect_die(check_load, r, EXIT_DATA, "was made with --steps 1000, this run has 20");
    r->training.steps = 1000;
    load_accepted(r, "step 7");
    r->training.threads = 3; // where and how, not what
    r->training.save_every = 1;
    r->training.out = "elsewhere";
    load_accepted(r, "step 7");
    trainer_free(r);
    empty_dir("");
}

// craft: save r's checkpoint with one metadata entry changed (value NULL: absent) and n tensors
// left; change is applied to the list first.
static void craft(Trainer *r, const char *key, const char *value, void (*change)(TensorList *))
{
    static TensorList list;
    StMeta meta[OPTIONS_MAX + 3];
    memset(&list, 0, sizeof list);
    checkpoint_save(r->path, &r->weights, &r->options, "testmodel", 7);
    StFile *f = st_open(r->path);
    size_t n = 0;
    for (size_t i = 0; i < f->header.n_meta; i++) {
        const StMeta *m = &f->header.meta[i];
        if (strcmp(m->key, "checksum") && (strcmp(m->key, key) || value))
            meta[n++] = (StMeta){m->key, strcmp(m->key, key) ? m->value : value};
    }
    list_add_arena(&list, "params.", &r->weights.params);
    list_add_arena(&list, "m.", &r->weights.m);
    list_add_arena(&list, "v.", &r->weights.v);
    if (change)
        change(&list);
    st_write(r->path, meta, n, list.tensors, list.n);
    st_close(f);
}

// Changes to a checkpoint's 12 tensors: params., m., v. of wte, w, bias, last.
static void without_bias(TensorList *list)
{
    memmove(&list->tensors[2], &list->tensors[3], (--list->n - 2) * sizeof *list->tensors);
}

static void with_more(TensorList *list)
{
    list->tensors[list->n] = list->tensors[0];
    list->tensors[list->n++].name = "params.more";
}

static void with_name(TensorList *list)
{
    list->tensors[3].name = "params.lost";
}

static void with_shape(TensorList *list)
{
    list->tensors[0].shape[0] = 3;
    list->tensors[0].shape[1] = 7;
}

static void with_dims(TensorList *list)
{
    list->tensors[1].ndim = 1;
    list->tensors[1].shape[0] = 30;
}

static void with_integers(TensorList *list)
{
    list->tensors[2].dtype = ST_I32;
}

static void as_dump(TensorList *list)
{
    list->n = 4;
}

// test_training_tensors: a file whose tensors are not those of the model is refused by name, and so
// is one with a NaN or a flipped bit.
static void test_training_tensors(void)
{
    char path[2048];
    size_t n;
    strcpy(path, in_dir("checkpoint.safetensors"));
    Trainer *r = trainer_make(path);
    craft(r, "", "", NULL);
    load_accepted(r, "step 7");
    craft(r, "", "", without_bias);
    load_refused(r, "params.bias");
    craft(r, "", "", with_more);
    load_refused(r, "expected 12 tensors, got 13");
    craft(r, "", "", with_name);
    load_refused(r, "params.last");
    craft(r, "", "", with_shape);
    load_refused(r, "params.wte: expected shape (7,3), got (3,7)");
    craft(r, "", "", with_dims);
    load_refused(r, "params.w: expected shape (2,3,5), got (30)");
    craft(r, "", "", with_integers);
    load_refused(r, "params.bias");
    craft(r, "", "", as_dump);
    load_refused(r, "expected 12 tensors, got 4");
    craft(r, "format_version", "2", NULL);
    load_refused(r, "expected format version 1, got 2");
    craft(r, "format_version", NULL, NULL);
    load_refused(r, "expected format version 1, got none");
    craft(r, "architecture", NULL, NULL);
    load_refused(r, "unknown origin");
    craft(r, "channels", NULL, NULL);
    load_refused(r, "expected --channels in its metadata, got none");
    craft(r, "pairs", NULL, NULL); // older than a task's option: as if it had its default
    load_accepted(r, "step 7");
    r->pairs = 5;
    expect_die(check_load, r, EXIT_DATA, "was made with --pairs 4, this run has 5");
    craft(r, "pairs", "4", NULL);
    expect_die(check_load, r, EXIT_DATA, "was made with --pairs 4, this run has 5");
    r->pairs = 4;
    craft(r, "embed-std", NULL, NULL); // or than one of training
    load_accepted(r, "step 7");
    r->training.embed_std = 0.5;
    expect_die(check_load, r, EXIT_DATA, "was made with --embed-std 0, this run has 0.5");
    r->training.embed_std = 0;
    craft(r, "task", NULL, NULL); // any task's: --load takes the weights, --resume needs to know
    expect_die(check_load, r, EXIT_DATA, "expected --task in its metadata, got none");
    r->resume = 0;
    load_accepted(r, "step 7");
    r->resume = 1;
    const char *const steps[] = {NULL, "", "-1", "7x", "7.5", "x", "99999999999999999999"};
    for (int k = 0; k < 7; k++) {
        craft(r, "step", steps[k], NULL);
        load_refused(r, "expected a step number");
    }
    ((float *)r->params.bias)[5] = NAN;
    craft(r, "", "", NULL);
    ((float *)r->params.bias)[5] = 0;
    load_refused(r, "params.bias holds a NaN or Inf at element 5");
    ((float *)arena_data(&r->weights.v, 1))[29] = -INFINITY;
    craft(r, "", "", NULL);
    ((float *)arena_data(&r->weights.v, 1))[29] = 0;
    expect_die(check_load, r, EXIT_DATA, "v.w holds a NaN or Inf at element 29");
    craft(r, "", "", NULL);
    unsigned char *file = get_file(path, &n);
    file[n - 10] ^= 1;
    put_file(path, file, n);
    load_refused(r, "checksum");
    put_file(path, file, n - 1);
    load_refused(r, "cut short");
    free(file);
    remove(path);
    load_refused(r, "No such file");
    trainer_free(r);
    empty_dir("");
}

// stop_if_bad: training_stop_if_bad in a child, with a NaN in w.
static void stop_if_bad(void *trainer)
{
    Trainer *r = (Trainer *)trainer;
    Arena acts = small_arena(&r->grads, 4);
    arena_fill(&acts, 0);
    training_stop_if_bad("loss", 1, 41, &r->weights, &acts);
    printf("1 is fine\n");
    fflush(stdout);
    ((float *)r->grads.w)[7] = INFINITY;
    training_stop_if_bad("loss", NAN, 42, &r->weights, &acts);
}

// test_training_stop: a loss that is not finite stops with the step and the first bad value (A27).
static void test_training_stop(void)
{
    Trainer *r = trainer_make("none");
    Outcome out = run_child(stop_if_bad, r);
    CHECK(out.code == EXIT_FAIL && strstr(out.text, "1 is fine\nerror: step 42: the loss is") &&
              strstr(out.text, "parameters w[7]"), "code %d: %s", out.code, out.text);
    trainer_free(r);
}

// test_training_update: F06: batches of n[k] targets whose gradients are k + 1 everywhere and whose
// loss is 10 k: the sums are weighted by the targets, batches without any count for nothing; equal
// ones and a single one are not multiplied.
static void test_training_update(void)
{
    static const double n[][4] = {{3, 3, 3, 3}, {1, 2, 3, 4}, {0, 5, 0, 2}, {4}, {0}};
    for (int i = 0; i < 10; i++) {
        const size_t size = i & 1 ? 8 : 4;
        const double *targets = n[i / 2];
        Pointers p;
        Arena a = small_arena(&p, size);
        Update u = {0};
        double sum = 0, loss = 0, grad = 0;
        arena_fill(&a, 0);
        for (int k = 0; k < 4; k++) {
            update_add(&u, &a, 10 * k, 0.25 * k, targets[k]);
            for (int j = 0; j < a.n; j++)
                for (size_t e = 0; e < tensor_size(&a.table[j]) && targets[k] > 0; e++) {
                    void *x = arena_data(&a, j);
                    real_set(x, e, size, real_at(x, e, size) + k + 1);
                }
            sum += targets[k];
            loss += 10 * k * targets[k];
            grad += (k + 1) * targets[k];
        }
        update_end(&u, &a);
        loss = sum > 0 ? loss / sum : 0;
        grad = sum > 0 ? grad / sum : 0;
        CHECK(u.n == 4 && fabs(u.acc - 0.375) < 1e-15 && fabs(u.loss - loss) < 1e-14,
              "F06: loss %g, accuracy %g, expected %g, 0.375", u.loss, u.acc, loss);
        size_t right = 0;
        for (size_t e = 0; e < 30; e++)
            right += fabs(real_at(p.w, e, size) - grad) <= 1e-6 * grad;
        CHECK(right == 30, "F06: gradient %g, expected %g", real_at(p.w, 0, size), grad);
        CHECK(run_child(check_arena, &a).code == 0, "the canaries stay");
        u = (Update){0};
        update_add(&u, &a, 0.1 + i, 0.3, targets[0]);
        CHECK(u.acc == 0.3 && (u.loss == 0.1 + i || targets[0] == 0), "one batch keeps its bits");
        arena_free(&a);
    }
}

int main(void)
{
    threads_set(1); // children run OpenMP code, which they must not once the parent has threads
    make_dir();
    test_tensors_layout();
    test_tensors_canaries();
    test_tensors_init();
    test_tensors_sizes();
    test_training_rate();
    test_training_update();
    test_training_embeddings();
    test_training_round_trip();
    test_training_metadata();
    test_training_tensors();
    test_training_stop();
    return test_report();
}
