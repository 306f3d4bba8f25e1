// published.h: weights that others have published as safetensors, read into our parameters.
//
// A trainer says with one table where such a file keeps each of its parameters: one tensor, or one
// a layer, h.LAYER.NAME, each with or without a leading "transformer.". What the table does not
// name is ignored. Files hold any of F32, F64, BF16 and F16.
#ifndef SEQ_UTIL_PUBLISHED_H
#define SEQ_UTIL_PUBLISHED_H

#include "tensors.h"

typedef struct {
    const char *ours, *theirs; // ours NULL ends the table
    int layered;               // ours has a leading L axis, theirs is a tensor a layer
    int transposed;            // theirs is (in,out)
    int longer;                // theirs may have more rows: the first are read
} Published;

// published_find: the tensor `name` of the file, NULL if there is none.
static inline const StEntry *published_find(const StFile *file, const char *name)
{
    char with[LIST_NAME + 16];
    const StEntry *entry = st_find(file, name);
    snprintf(with, sizeof with, "transformer.%s", name);
    return entry ? entry : st_find(file, with);
}

// published_read: to (the dims of shape, one or two) = the tensor `name` of the file. Dies with
// EXIT_DATA when it is missing, of another shape, or holds a NaN or Inf.
static inline void published_read(void *to, size_t real_size, StFile *file, const char *name,
                                  const size_t *shape, int dims, const Published *row)
{
    const StEntry *e = published_find(file, name);
    const size_t rows = dims == 2 ? shape[0] : 1, cols = shape[dims - 1];
    const size_t want[] = {dims == 1 || row->transposed ? cols : rows,
                           row->transposed ? rows : cols};
    char expected[128], got[256];
    if (!e)
        die(EXIT_DATA, "%s: has no tensor %s, which this model needs\nhint: is it of this "
            "architecture, and of as many --layers?", file->path, name);
    if (e->ndim != dims || e->shape[dims - 1] != want[dims - 1] ||
        (row->longer ? e->shape[0] < want[0] : e->shape[0] != want[0]))
        die(EXIT_DATA, "%s: %s: expected shape %s%s, got %s\nhint: the model's sizes, and the "
            "task's symbols and length, must fit the file", file->path, name,
            shape_text(want, dims, expected, sizeof expected), row->longer ? " or longer" : "",
            shape_text(e->shape, e->ndim, got, sizeof got));
    StEntry part = *e; // of a longer one the rows that are needed
    part.shape[0] = want[0];
    const size_t n = st_count(&part);
    void *all = alloc_zero(n, real_size, name);
    st_read_real(file, &part, all, real_size);
    const size_t bad = first_not_finite(all, n, real_size);
    if (bad < n)
        die(EXIT_DATA, "%s: %s holds a NaN or Inf at element %zu", file->path, name, bad);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            real_set(to, r * cols + c, real_size,
                     real_at(all, row->transposed ? c * rows + r : r * cols + c, real_size));
    free(all);
}

// published_load: the parameters of arena `a` that the table names = those of the file at `path`,
// of L layers. `head` (may be NULL) is a tensor that a file may have although the model ties it to
// the parameter head_is: then it must be equal. Dies with EXIT_DATA when something does not fit.
static inline void published_load(Arena *a, const char *path, const Published *table, size_t L,
                                  const char *head, const char *head_is)
{
    StFile *file = st_open(path);
    char name[LIST_NAME];
    st_verify(file);
    for (const Published *row = table; row->ours; row++) {
        int k = 0;
        while (k < a->n && strcmp(a->table[k].name, row->ours))
            k++;
        if (k == a->n)
            die(EXIT_FAIL, "there is no parameter %s", row->ours);
        const Tensor *t = &a->table[k];
        const size_t step = tensor_size(t) / (row->layered ? L : 1) * a->real_size;
        for (size_t l = 0; l < (row->layered ? L : 1); l++) {
            if (row->layered)
                snprintf(name, sizeof name, "h.%zu.%s", l, row->theirs);
            else
                snprintf(name, sizeof name, "%s", row->theirs);
            published_read((char *)arena_data(a, k) + l * step, a->real_size, file, name,
                           t->shape + row->layered, tensor_dims(t) - row->layered, row);
            if (row->layered && l + 1 == L) {
                snprintf(name, sizeof name, "h.%zu.%s", L, row->theirs);
                if (published_find(file, name))
                    die(EXIT_DATA, "%s: has the tensor %s, this model %zu layers\nhint: --layers "
                        "must fit the file", path, name, L);
            }
        }
        const int ties = head && !strcmp(row->ours, head_is);
        if (ties && published_find(file, head)) {
            const size_t n = tensor_size(t);
            void *x = alloc_zero(n, a->real_size, head);
            published_read(x, a->real_size, file, head, t->shape, tensor_dims(t), row);
            if (memcmp(x, arena_data(a, k), n * a->real_size))
                die(EXIT_DATA, "%s: %s: expected the numbers of %s, to which this model ties it, "
                    "got others", path, head, row->theirs);
            free(x);
        }
    }
    st_close(file);
    printf("weights from %s\n", path);
}

#endif
