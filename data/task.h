// task.h: what a task is: one row of the table TASKS (tasks.h) and three functions: its shape (how
// long, how many symbols), one sequence of it (none: it is of images, images.h), and the score of
// one prediction.
#ifndef SEQ_DATA_TASK_H
#define SEQ_DATA_TASK_H

#include "../util/rng.h"
#include "images.h" // and with it text.h

enum { IGNORE = -1 };

// What the tasks can be told; each task reads the fields it knows.
typedef struct {
    int string_size; // copying: letters in a string
    int min_length, max_length, eval_min_length, eval_max_length; // tasks_state.h; 0: the paper's
    int multiply, elements, tokens_per_element, modulus, resets;  // tasks_state.h
    int pairs, vocab_size, copies, examples; // tasks_recall.h; 0: the task's own
    double noise, eval_depth;
    int eval_batches; // 0: one, or all that is held out
    const char *curve; // file for the accuracy by length
    Text text;
    Images images;
    int sample, top_k; // tokens to say at the end
    double temperature;
    const char *prompt;
    int *read, *said; // (read_n), made by task_open: the prompt and room; what the model says to it
    size_t prompt_n, read_n;
} TaskOptions;

typedef struct {
    size_t T;      // tokens in a sequence
    size_t V;      // symbols
    size_t prompt; // leading tokens given when decoding; its own follow; from T on: none
    int causal;    // 1: the targets stand in the inputs, so a bidirectional model would read them
    const char *size_name; // what RESULT calls the size of the task, and the size
    int size;
    size_t eval_T; // tokens in a sequence of the evaluation
    size_t asked;  // the most targets that a sequence has, of either; 0: up to all
} TaskShape;

typedef struct {
    const char *name, *help;
    const char *symbols; // a printable character a token; "": numbers; NULL: the tokens are text's
    TaskShape (*shape)(const TaskOptions *options);
    void (*fill)(const TaskOptions *options, uint64_t seed, uint64_t stream, int *inputs,
                 int *targets);
    double (*score)(const int *targets, const int *predictions, size_t T);
    double chance; // the score of a guess, for which scaled scores are 0; -1: they are not shown
    int restart;   // the token from which --curve counts; 0: all of a sequence, all right so far
} Task;

// fraction_right: the fraction of the targets (T) that is predicted.
static inline double fraction_right(const int *targets, const int *predictions, size_t T)
{
    size_t right = 0, count = 0;
    for (size_t t = 0; t < T; t++) {
        count += targets[t] != IGNORE;
        right += targets[t] != IGNORE && targets[t] == predictions[t];
    }
    return count ? (double)right / (double)count : 0;
}

#endif
