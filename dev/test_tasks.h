// test_tasks.h: a second task beside copying for the tests of trainers, of any T (--string-size)
// and V. Included before the trainer, whose table of tasks is replaced by one that has it.
#ifndef SEQ_DEV_TEST_TASKS_H
#define SEQ_DEV_TEST_TASKS_H

#include "../data/tasks.h"

static size_t any_vocabulary = 29;

// any_shape: T = string_size, V = any_vocabulary; no input shows a target, so a model that sees all
// positions may have it.
static TaskShape any_shape(const TaskOptions *options)
{
    const size_t T = (size_t)options->string_size;
    TaskShape shape = {T, any_vocabulary, 1, 0, "T", 0, T};
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
};
enum { COPYING, ANY, PARITY, MODULAR, BRACKETS, S5, Z60, HORIZON, RECALL, MQAR, IN_CONTEXT, NOISY,
       FUZZY, MEMORIZATION, SELECTIVE, NEEDLE };
#define TASKS TEST_TASKS

#endif
