// test_tasks.h: a second task beside copying for the tests of trainers, of any T (--string-size)
// and V, and small files of images. Included before the trainer, whose table of tasks is replaced
// by one that has it; after dev/testing.h.
#ifndef SEQ_DEV_TEST_TASKS_H
#define SEQ_DEV_TEST_TASKS_H

#include "../data/tasks.h"

static size_t any_vocabulary = 29;

// any_shape: T = string_size, V = any_vocabulary; no input shows a target, so a model that sees all
// positions may have it.
static TaskShape any_shape(const TaskOptions *options)
{
    const size_t T = (size_t)options->string_size;
    TaskShape shape = {T, any_vocabulary, 1, 0, "T", 0, T, 0};
    return shape;
}

// any_fill: inputs (T) and targets (T), uniform. Of four targets one is left out, in one sequence
// of three two: the numbers of targets differ.
static void any_fill(const TaskOptions *options, uint64_t seed, uint64_t stream, int *inputs,
                     int *targets)
{
    uint32_t V = (uint32_t)any_vocabulary;
    for (int t = 0; t < options->string_size; t++) {
        inputs[t] = (int)rand_below(seed, stream, 2 * (uint64_t)t, V);
        targets[t] = (int)rand_below(seed, stream, 2 * (uint64_t)t + 1, V);
        targets[t] = t % 4 == 1 || (t % 4 == 2 && stream % 3 == 0) ? IGNORE : targets[t];
    }
}

static const Task TEST_TASKS[] = {
    {"copying", "", "^|$abcdefghijklmnopqrstuvwxyz", copying_shape, copying_fill, copying_score,
     -1, 0},
    {"any", "", "", any_shape, any_fill, copying_score, -1, 0},
    STATE_TASKS,
    RECALL_TASKS,
    IMAGES_TASK
};
enum { COPYING, ANY, PARITY, MODULAR, BRACKETS, S5, Z60, HORIZON, RECALL, MQAR, IN_CONTEXT, NOISY,
       FUZZY, MEMORIZATION, SELECTIVE, NEEDLE, IMAGES };
#define TASKS TEST_TASKS

// images_put: write a file of random images of H x W pixels; half of the images are evaluated on.
static inline void images_put(const char *path, size_t H, size_t W, size_t channels, size_t classes,
                              size_t images)
{
    const uint32_t sizes[] = {1, (uint32_t)H, (uint32_t)W, (uint32_t)channels, (uint32_t)classes};
    const uint64_t counts[] = {images - images / 2, images / 2};
    const double numbers[] = {.5, .4, .3, .2, .25, .5, .3, .2}; // mean, deviation
    const size_t n = IMAGES_HEADER + images * (1 + H * W * channels);
    unsigned char *data = (unsigned char *)alloc_zero(n, 1, "file of images");
    memcpy(data, IMAGES_MAGIC, 8);
    memcpy(data + 8, sizes, sizeof sizes);
    memcpy(data + 32, counts, sizeof counts);
    memcpy(data + 48, numbers, sizeof numbers);
    for (size_t i = IMAGES_HEADER; i < n; i++)
        data[i] = (unsigned char)rand_below(9, H, i, i < IMAGES_HEADER + images ? (uint32_t)classes
                                                                             : 256);
    put_file(path, data, n);
    free(data);
}

// images_small: such a file, mapped, to be read in patches of p x p.
static inline Images images_small(size_t H, size_t W, size_t channels, size_t classes, int p)
{
    static char path[2048];
    Images im;
    memset(&im, 0, sizeof im);
    snprintf(path, sizeof path, "%s", in_dir("small.images"));
    images_put(path, H, W, channels, classes, 14);
    im.path = path;
    im.patch = p;
    images_map(&im);
    return im;
}

#endif
