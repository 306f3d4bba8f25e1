// tensors.h: a set of named arrays in one allocation, driven by a table with one row per tensor.
//
// The table is the single list of a model's tensors. Allocation, initialisation, the optimiser,
// checkpoints, dumps and tests walk it, so a tensor added to the table is everywhere at once. A
// struct of pointers (struct { float *wte, *wpe; }) gives the same tensors names in code: each row
// says which field is its own.
//
// Element size is a run-time number (4 or 8): the tests rebuild a trainer with `float` meaning
// double.
#ifndef SEQ_UTIL_TENSORS_H
#define SEQ_UTIL_TENSORS_H

#include "check.h"
#include "rng.h"
#include "safetensors.h"

typedef enum {
    INIT_KIND_ZERO, INIT_KIND_ONE, INIT_KIND_NORMAL, INIT_KIND_UNIFORM, INIT_KIND_LOG_COUNT,
    INIT_KIND_STEP
} InitKind;
typedef struct {
    InitKind kind;
    double std, least; // std of uniform numbers and steps: their largest
} Init;
#define INIT_ZERO {INIT_KIND_ZERO, 0, 0}
#define INIT_ONE {INIT_KIND_ONE, 0, 0}
#define INIT_NORMAL(std) {INIT_KIND_NORMAL, (std), 0}
#define INIT_UNIFORM(most) {INIT_KIND_UNIFORM, (most), 0}
#define INIT_LOG_COUNT {INIT_KIND_LOG_COUNT, 0, 0} // ln 1, ln 2, ... along the last dimension
// Numbers whose softplus ln(1 + e^x) is log-uniform between least and most, both above 0.
#define INIT_STEP(least, most) {INIT_KIND_STEP, (most), (least)}

enum { NO_DECAY = 0, DECAY = 1, TENSOR_DIMS = 4, TENSORS_MAX = 64 };

typedef struct {
    const char *name;
    size_t shape[TENSOR_DIMS]; // up to its first 0; a tensor of first dimension 0 does not exist
    Init init;
    int decay;       // weight decay applies
    double lr_scale; // multiplies the learning rate
    size_t field;    // where the struct of pointers keeps this tensor's: offsetof(Params, wte)
} Tensor;

// ACTIVATION: a table row without initialisation, for activations and scratch.
#define ACTIVATION(name, type, field, ...) \
    {name, {__VA_ARGS__}, INIT_ZERO, 0, 0, offsetof(type, field)}

typedef struct {
    const char *what; // for messages: "parameters"
    Tensor table[TENSORS_MAX];
    int n;
    size_t real_size;          // 4 or 8
    size_t start[TENSORS_MAX]; // byte offset of each tensor
    size_t bytes;
    char *base;
} Arena;

// Tensors start at multiples of 64 bytes from the arena's start and are followed by at least one
// line of this canary byte, which makes a NaN of any float type, so that a read past the end shows
// as well as a write.
enum { ARENA_ALIGN = 64, CANARY = 0xff };

// tensor_dims: number of dimensions of a row.
static inline int tensor_dims(const Tensor *t)
{
    int n = 0;
    while (n < TENSOR_DIMS && t->shape[n])
        n++;
    return n;
}

// tensor_size: number of elements of a row; 0 if its first dimension is 0, which says it does not
// exist.
static inline size_t tensor_size(const Tensor *t)
{
    size_t n = t->shape[0] ? 1 : 0;
    for (int i = 0; i < tensor_dims(t); i++)
        n = size_mul(n, t->shape[i], t->name);
    return n;
}

// arena_fits: die over more rows than a table holds.
static inline void arena_fits(const char *what, int n)
{
    if (n > TENSORS_MAX)
        die(EXIT_FAIL, "%s: %d tensors, the table holds %d\nhint: raise TENSORS_MAX", what, n,
            TENSORS_MAX);
}

// arena_grow: *bytes += padded, the room of a tensor of `bytes_of_it`; dies if that wraps round.
static inline void arena_grow(size_t *bytes, size_t padded, size_t bytes_of_it, const char *what)
{
    *bytes += padded;
    if (*bytes < bytes_of_it)
        die(EXIT_MEMORY, "%s do not fit in memory\nhint: make the model or the batch smaller",
            what);
}

// arena_plan: lay out the n rows of `table`; nothing is allocated. a->bytes is then what
// arena_alloc will take.
static inline void arena_plan(Arena *a, const char *what, const Tensor *table, int n,
                              size_t real_size)
{
    arena_fits(what, n);
    memset(a, 0, sizeof *a);
    a->what = what;
    a->n = n;
    a->real_size = real_size;
    for (int i = 0; i < n; i++) {
        size_t bytes = size_mul(tensor_size(&table[i]), real_size, table[i].name);
        a->table[i] = table[i];
        a->start[i] = a->bytes;
        arena_grow(&a->bytes, (bytes / ARENA_ALIGN + 2) * ARENA_ALIGN, bytes, what);
    }
}

// arena_data: pointer to tensor i's elements.
static inline void *arena_data(const Arena *a, int i)
{
    return a->base + a->start[i];
}

// arena_canary: the canary bytes after tensor i, *size of them.
static inline unsigned char *arena_canary(const Arena *a, int i, size_t *size)
{
    size_t used = tensor_size(&a->table[i]) * a->real_size;
    *size = (i + 1 < a->n ? a->start[i + 1] : a->bytes) - a->start[i] - used;
    return (unsigned char *)arena_data(a, i) + used;
}

// arena_alloc: allocate a planned arena, zeroed, set the canaries and the pointers of the struct at
// `fields`. With POISON defined (make debug) every element starts as NaN.
static inline void arena_alloc(Arena *a, void *fields)
{
    a->base = (char *)alloc_zero(a->bytes, 1, a->what);
#ifdef POISON
    memset(a->base, CANARY, a->bytes);
#endif
    for (int i = 0; i < a->n; i++) {
        size_t size;
        unsigned char *canary = arena_canary(a, i, &size);
        void *data = tensor_size(&a->table[i]) ? arena_data(a, i) : NULL;
        memset(canary, CANARY, size);
        if (fields)
            memcpy((char *)fields + a->table[i].field, &data, sizeof data);
    }
}

// arena_fill: set every byte of every tensor to `byte` (0, or CANARY for NaN).
static inline void arena_fill(Arena *a, int byte)
{
    for (int i = 0; i < a->n; i++)
        memset(arena_data(a, i), byte, tensor_size(&a->table[i]) * a->real_size);
}

// arena_scale: multiply every element by `factor`.
static inline void arena_scale(Arena *a, double factor)
{
    for (int k = 0; k < a->n; k++) {
        const size_t n = tensor_size(&a->table[k]);
        void *x = arena_data(a, k);
#pragma omp parallel for if (n > 65536)
        for (size_t i = 0; i < n; i++)
            real_set(x, i, a->real_size, factor * real_at(x, i, a->real_size));
    }
}

// arena_check: die if a canary was overwritten, naming the tensor before it.
static inline void arena_check(const Arena *a)
{
    for (int i = 0; i < a->n; i++) {
        size_t size;
        unsigned char *canary = arena_canary(a, i, &size);
        for (size_t k = 0; k < size; k++)
            if (canary[k] != CANARY)
                die(EXIT_FAIL, "%s: something wrote %zu bytes past the end of %s", a->what, k + 1,
                    a->table[i].name);
    }
}

// arenas_check: arena_check of the three arenas that a step writes to.
static inline void arenas_check(const Arena *a, const Arena *b, const Arena *c)
{
    arena_check(a);
    arena_check(b);
    arena_check(c);
}

// arena_free: give the memory back.
static inline void arena_free(Arena *a)
{
    free(a->base);
    a->base = NULL;
}

// name_in_list: 1 if `name` is one of the words of a list like "wte,wpe" (NULL has none).
static inline int name_in_list(const char *name, const char *list)
{
    for (size_t word; list; list = *list ? list + 1 : NULL) {
        word = strcspn(list, ",");
        if (word == strlen(name) && !strncmp(list, name, word))
            return 1;
        list += word;
    }
    return 0;
}

// arena_count: number of tensors that exist.
static inline size_t arena_count(const Arena *a)
{
    size_t n = 0;
    for (int i = 0; i < a->n; i++)
        n += tensor_size(&a->table[i]) > 0;
    return n;
}

// arena_elements: number of elements in all tensors but those named in `except` (may be NULL), a
// list like "wte,wpe".
static inline size_t arena_elements(const Arena *a, const char *except)
{
    size_t n = 0;
    for (int i = 0; i < a->n; i++)
        n += name_in_list(a->table[i].name, except) ? 0 : tensor_size(&a->table[i]);
    return n;
}

// initial_value: of element i of a tensor whose last dimension is `last`, from a stream of `seed`.
static inline double initial_value(Init init, size_t last, uint64_t seed, uint64_t stream, size_t i)
{
    const double most = init.std, least = init.least;
    double step;
    switch (init.kind) {
    case INIT_KIND_ZERO:
        return 0;
    case INIT_KIND_ONE:
        return 1;
    case INIT_KIND_UNIFORM:
        return most * (2 * rand_uniform(seed, stream, i) - 1);
    case INIT_KIND_LOG_COUNT:
        return log((double)(1 + i % last));
    case INIT_KIND_STEP:
        step = least * pow(most / least, rand_uniform(seed, stream, i));
        return step + log(-expm1(-step)); // the inverse of softplus
    default:
        return init.std * rand_normal(seed, stream, i);
    }
}

// arena_draw: draw tensor k's initial values as `init` says, from stream STREAM_INIT + k of `seed`.
static inline void arena_draw(Arena *a, int k, Init init, uint64_t seed)
{
    const Tensor *row = &a->table[k];
    const size_t n = tensor_size(row), last = n ? row->shape[tensor_dims(row) - 1] : 1;
    void *x = arena_data(a, k);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        real_set(x, i, a->real_size,
                 initial_value(init, last, seed, STREAM_INIT + (uint64_t)k, i));
}

// arena_init: draw all initial values, as the table says.
static inline void arena_init(Arena *a, uint64_t seed)
{
    for (int k = 0; k < a->n; k++)
        arena_draw(a, k, a->table[k].init, seed);
}

// arena_first_bad: the name of the first tensor holding a NaN or Inf and its index, or NULL.
static inline const char *arena_first_bad(const Arena *a, size_t *index)
{
    for (int i = 0; i < a->n; i++) {
        size_t n = tensor_size(&a->table[i]);
        *index = first_not_finite(arena_data(a, i), n, a->real_size);
        if (*index < n)
            return a->table[i].name;
    }
    return NULL;
}

// ---- files: arenas to and from safetensors

enum { LIST_MAX = 4 * TENSORS_MAX, LIST_NAME = 64 };
typedef struct {
    StTensor tensors[LIST_MAX];
    char names[LIST_MAX][LIST_NAME];
    size_t n;
} TensorList;

// list_add: append one array to the list; shape ends at its first 0.
static inline void list_add(TensorList *list, const char *prefix, const char *name, StDtype dtype,
                            const size_t *shape, const void *data)
{
    if (list->n == LIST_MAX)
        die(EXIT_FAIL, "more than %d tensors in a file\nhint: raise LIST_MAX", LIST_MAX);
    StTensor *t = &list->tensors[list->n];
    snprintf(list->names[list->n], LIST_NAME, "%s%s", prefix, name);
    t->name = list->names[list->n++];
    t->dtype = dtype;
    t->data = data;
    t->ndim = 0;
    while (t->ndim < TENSOR_DIMS && shape[t->ndim]) {
        t->shape[t->ndim] = shape[t->ndim];
        t->ndim++;
    }
}

// list_add_arena: append every tensor of the arena as prefix + name.
static inline void list_add_arena(TensorList *list, const char *prefix, const Arena *a)
{
    for (int i = 0; i < a->n; i++)
        if (tensor_size(&a->table[i]))
            list_add(list, prefix, a->table[i].name, a->real_size == 8 ? ST_F64 : ST_F32,
                     a->table[i].shape, arena_data(a, i));
}

// file_has_tensor: 1 if path is a safetensors file with a whole header and a tensor of that name,
// else 0: st_open would die over what is no such file.
static inline int file_has_tensor(const char *path, const char *name)
{
    StFile f;
    struct stat info;
    int found = 0;
    memset(&f, 0, sizeof f);
    f.path = (char *)path;
    f.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f.fd < 0)
        return 0;
    if (!fstat(f.fd, &info) && info.st_size >= 8) {
        f.size = (size_t)info.st_size;
        if (!st_read(&f)) {
            found = st_find(&f, name) != NULL;
            st_header_free(&f.header);
        }
        free(f.json);
    }
    close(f.fd);
    return found;
}

// shape_text: a shape as (2,3,4).
static inline const char *shape_text(const size_t *shape, int n, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < n && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%zu", i ? "," : "", shape[i]);
    if (used < size)
        snprintf(text + used, size - used, ")");
    return text;
}

// arena_shaped: 1 if each tensor of the arena that the file has, as prefix + name, has its shape.
static inline int arena_shaped(const Arena *a, const StFile *file, const char *prefix)
{
    for (int i = 0; i < a->n; i++) {
        char name[LIST_NAME];
        const Tensor *t = &a->table[i];
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        const StEntry *entry = tensor_size(t) ? st_find(file, name) : NULL;
        if (entry && (entry->ndim != tensor_dims(t) ||
                      memcmp(entry->shape, t->shape, (size_t)entry->ndim * sizeof *t->shape)))
            return 0;
    }
    return 1;
}

// arena_match: die with EXIT_DATA unless the file has every tensor of the arena, as prefix + name,
// with its shape.
static inline void arena_match(const Arena *a, const StFile *file, const char *path,
                               const char *prefix)
{
    for (int i = 0; i < a->n; i++) {
        char name[LIST_NAME], want[128], got[256];
        const Tensor *t = &a->table[i];
        if (!tensor_size(t)) // it does not exist
            continue;
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        const StEntry *entry = st_find(file, name);
        if (!entry)
            die(EXIT_DATA,
                "%s: has no tensor %s, which this model needs\nhint: is it a checkpoint of "
                "another model?",
                path, name);
        shape_text(t->shape, tensor_dims(t), want, sizeof want);
        shape_text(entry->shape, entry->ndim, got, sizeof got);
        if (strcmp(want, got))
            die(EXIT_DATA,
                "%s: %s: expected shape %s, got %s\nhint: give the sizes it was made with", path,
                name, want, got);
    }
}

// arena_read: read every tensor of the arena from a file that arena_match has passed. Dies with
// EXIT_DATA when one holds a NaN or Inf.
static inline void arena_read(Arena *a, StFile *file, const char *path, const char *prefix)
{
    for (int i = 0; i < a->n; i++) {
        char name[LIST_NAME];
        size_t n = tensor_size(&a->table[i]);
        if (!n)
            continue;
        snprintf(name, sizeof name, "%s%s", prefix, a->table[i].name);
        st_read_real(file, st_find(file, name), arena_data(a, i), a->real_size);
        size_t bad = first_not_finite(arena_data(a, i), n, a->real_size);
        if (bad < n)
            die(EXIT_DATA, "%s: %s holds a NaN or Inf at element %zu", path, name, bad);
    }
}

#endif
