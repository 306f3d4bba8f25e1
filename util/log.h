// log.h: a run's directory, its log.csv, and what the console shows.
//
// A run never overwrites another: without --out it takes the next free runs/TASK-MODEL-NNN; a given
// --out must be new (or empty), or the user says --resume or --force. log.csv is locked while a run
// writes it.
//
// log.csv: `#` lines (configuration, git hash, compiler, device), then the header LOG_COLUMNS, then
// one line a record, flushed at once. Step s of split "train" is measured before update s; split
// "val" at s after s updates. Before a "val" of text stands "val_bits": the same with its loss in
// bits per character.
#ifndef SEQ_UTIL_LOG_H
#define SEQ_UTIL_LOG_H

#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOG_COLUMNS "step,split,loss,acc,lr,grad_norm,ms,tokens_per_s"
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifndef GIT_HASH
#define GIT_HASH "unknown"
#endif

enum { LOG_DIR = 4096, LOG_PATH = LOG_DIR + 64 };
typedef struct {
    char dir[LOG_DIR];
    FILE *csv;
    int terminal;    // stdout is a terminal: the progress line is redrawn
    int line_open;   // a progress line stands unfinished on the terminal
    double started;  // seconds
    long first_99;   // first training step of accuracy >= 0.99, -1 if there is none
    double last_acc; // accuracy of the last training step, 0 before the first
    long steps;      // training steps recorded by log_step, and the time they took
    double ms;
} Log;

typedef struct {
    long step;
    const char *split;                                 // "train", "val" or "val_bits"
    double loss, acc, lr, grad_norm, ms, tokens_per_s; // nats, 0..1, -, -, milliseconds, 1/s
    double bits;                                       // per character, of text; else 0
    double scaled, constant; // accuracy, 0 for a guess; share of the most frequent target, else 0
    double macro, micro;     // mean over tokens of the share right, and share of all targets
    int held_out;            // an evaluation of what a file holds out, not of fresh sequences
} LogRow;

// seconds_now: a monotonic clock, in seconds.
static inline double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// log_none: a log that writes nowhere, its clock started.
static inline Log log_none(void)
{
    Log log;
    memset(&log, 0, sizeof log);
    log.terminal = isatty(STDOUT_FILENO);
    log.started = seconds_now();
    log.first_99 = -1;
    return log;
}

// duration_text: seconds as "12s", "3m05s" or "2h07m".
static inline const char *duration_text(double seconds, char *text, size_t size)
{
    long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
    if (s < 60)
        snprintf(text, size, "%lds", s);
    else if (s < 3600)
        snprintf(text, size, "%ldm%02lds", s / 60, s % 60);
    else
        snprintf(text, size, "%ldh%02ldm", s / 3600, s / 60 % 60);
    return text;
}

// dir_make: create `path` and what is missing above it; dies with EXIT_DATA where that fails.
static inline void dir_make(const char *path)
{
    char part[LOG_DIR];
    struct stat st;
    snprintf(part, sizeof part, "%s", path);
    for (char *p = part + 1;; p++) {
        char end = *p;
        if (end && end != '/')
            continue;
        *p = 0;
        int failed = mkdir(part, 0777) ? errno : 0;
        if (failed && (stat(part, &st) || !S_ISDIR(st.st_mode)))
            die(EXIT_DATA, "--out %s: %s%s%s%s", path, end ? part : "", end ? ": " : "",
                failed == EEXIST ? "expected a directory, got something else of that name"
                                 : "cannot make the directory: ",
                failed == EEXIST ? "" : strerror(failed));
        *p = end;
        if (!end)
            return;
    }
}

// dir_is_empty: 1 if the directory is empty or does not exist.
static inline int dir_is_empty(const char *path)
{
    int empty = 1;
    DIR *d = opendir(path);
    if (!d)
        return errno == ENOENT; // one that cannot be read may hold anything
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            empty = 0;
    closedir(d);
    return empty;
}

// log_take_dir: decide the run's directory (see the top of this file) and create it. out may be
// NULL.
static inline void log_take_dir(Log *log, const char *out, const char *task, const char *model,
                                int resume, int force)
{
    struct stat st;
    if (!out) {
        dir_make("runs");
        for (int i = 1;; i++) {
            snprintf(log->dir, sizeof log->dir, "runs/%s-%s-%03d", task, model, i);
            if (!mkdir(log->dir, 0777))
                return;
            if (errno != EEXIST)
                die(EXIT_DATA, "%s: cannot create the directory: %s", log->dir, strerror(errno));
        }
    }
    if (strlen(out) >= sizeof log->dir - 64)
        die(EXIT_USAGE, "--out: expected a path shorter than %zu characters", sizeof log->dir - 64);
    snprintf(log->dir, sizeof log->dir, "%s", out);
    if (resume && stat(out, &st))
        die(EXIT_DATA, "--out %s: expected the directory of a run to resume, got: %s", out,
            strerror(errno));
    if (!resume && !force && !stat(out, &st) && S_ISDIR(st.st_mode) && !dir_is_empty(out))
        die(EXIT_USAGE,
            "--out %s: expected a new directory, this one holds files\nhint: --resume goes on with "
            "that run, --force overwrites it",
            out);
    dir_make(out);
}

// log_path: the path of `name` in the run's directory, in path (LOG_PATH).
static inline const char *log_path(const Log *log, const char *name, char *path)
{
    snprintf(path, LOG_PATH, "%s/%s", log->dir, name);
    return path;
}

// log_fail: die over a log.csv that cannot be written.
SEQ_NORETURN
static inline void log_fail(const Log *log)
{
    die(EXIT_DATA, "%s/log.csv: cannot write: %s", log->dir, strerror(errno));
}

// log_note: keep track of the last training accuracy and of the first step that reaches 99%.
static inline void log_note(Log *log, long step, const char *split, double acc)
{
    if (strncmp(split, "train", 5))
        return;
    log->last_acc = acc;
    if (log->first_99 < 0 && acc >= 0.99)
        log->first_99 = step;
}

// log_open: open and lock DIR/log.csv, as it is.
static inline void log_open(Log *log)
{
    char path[LOG_PATH];
    struct stat st;
    int fd = open(log_path(log, "log.csv", path), O_RDWR | O_CREAT | O_NONBLOCK, 0666);
    if (fd < 0 || fstat(fd, &st))
        log_fail(log);
    if (!S_ISREG(st.st_mode))
        die(EXIT_DATA, "%s: expected a file, got something else of that name", path);
    int locked = !flock(fd, LOCK_EX | LOCK_NB);
    if (!locked && errno == EWOULDBLOCK)
        die(EXIT_DATA, "%s: another run is writing it\nhint: give this run another --out", path);
    if (!locked)
        die(EXIT_DATA, "%s: cannot lock: %s", path, strerror(errno));
    if (!(log->csv = fdopen(fd, "r+b")))
        log_fail(log);
}

// log_start: make the open log ready for the rows from `step` on: with step < 0 it starts anew,
// else the rows from that step on are dropped (they will be written again). Returns 1 if it is
// empty now: the caller writes `#` lines, then calls log_header.
static inline int log_start(Log *log, long step)
{
    char *line = NULL;
    size_t room = 0;
    off_t keep = 0;
    long last = -1;
    int header = 0;
    for (ssize_t n; step >= 0 && (n = getline(&line, &room, log->csv)) > 0;) {
        char *at;
        long row = strtol(line, &at, 10);
        int data = at != line && *at == ',', train = data && !strncmp(at, ",train,", 7);
        if (line[n - 1] != '\n' || (data && row >= step))
            break;
        header |= !strncmp(line, LOG_COLUMNS, strlen(LOG_COLUMNS));
        char *loss = data ? strchr(at + 1, ',') : NULL, *acc = loss ? strchr(loss + 1, ',') : NULL;
        if (data)
            log_note(log, row, at + 1, acc ? strtod(acc + 1, NULL) : 0);
        last = train ? row : last;
        keep += n;
    }
    free(line);
    if (ferror(log->csv))
        log_fail(log);
    if (last >= 0 && !header)
        die(EXIT_DATA,
            "%s/log.csv: expected the line \"" LOG_COLUMNS "\" above its rows, got none\n"
            "hint: put it back, or move log.csv away",
            log->dir);
    if (step >= 0 && last != step - 1)
        warn("%s/log.csv: rows up to step %ld are missing", log->dir, step - 1);
    keep = header ? keep : 0;
    if (ftruncate(fileno(log->csv), keep) || fseeko(log->csv, keep, SEEK_SET))
        log_fail(log);
    return keep == 0;
}

// log_header: end the `#` lines: git hash, compiler and device, then the column names.
static inline void log_header(Log *log, const char *device)
{
    fprintf(log->csv, "# git=%s compiler=\"%s\" device=\"%s\"\n%s\n", GIT_HASH, COMPILER, device,
            LOG_COLUMNS);
    if (fflush(log->csv))
        log_fail(log);
}

// log_row: append one record, floats as %.9g, and flush it. Does nothing in a log that is not open.
static inline void log_row(Log *log, const LogRow *r)
{
    log_note(log, r->step, r->split, r->acc);
    if (!log->csv)
        return;
    fprintf(log->csv, "%ld,%s,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g\n", r->step, r->split, r->loss, r->acc,
            r->lr, r->grad_norm, r->ms, r->tokens_per_s);
    if (fflush(log->csv))
        log_fail(log);
}

// log_flush: show what was printed. Where nobody reads any more (`| head`), ask the run to save and
// end.
static inline void log_flush(void)
{
    static int asked;
    if (fflush(stdout) && !asked++)
        raise(SIGTERM);
}

// log_line: print a line of its own, below an open progress line.
SEQ_PRINTF(2, 3)
static inline void log_line(Log *log, const char *fmt, ...)
{
    va_list args;
    if (log->line_open)
        printf("\n");
    log->line_open = 0;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    log_flush();
}

// log_progress: show a record: redrawn on a terminal (every step), one line per interval otherwise
// (`interval` says whether this step ends one). seconds_left may be 0.
static inline void log_progress(Log *log, const LogRow *r, long steps, double seconds_left,
                                int interval)
{
    char left[32];
    if (!log->terminal && !interval)
        return;
    printf("%sstep %ld/%ld | loss %.4f | acc %5.1f%% | norm %.3g | lr %.3g | %.1f ms | %.0f tok/s "
           "| %s left",
           log->terminal ? "\r\033[K" : "", r->step, steps, r->loss, 100 * r->acc, r->grad_norm,
           r->lr, r->ms, r->tokens_per_s, duration_text(seconds_left, left, sizeof left));
    log->line_open = log->terminal && !interval;
    if (!log->line_open)
        printf("\n");
    log_flush();
}

// log_train_row: the record of a training step of `tokens` tokens.
static inline LogRow log_train_row(long step, double loss, double acc, double lr, double norm,
                                   double seconds, size_t tokens)
{
    LogRow row = {step, "train", loss, acc, lr, norm, 1e3 * seconds, (double)tokens / seconds,
                  0, 0, 0, 0, 0, 0};
    return row;
}

// log_step: record and show a training step of `steps`; see log_progress for `interval`.
static inline void log_step(Log *log, const LogRow *row, long steps, int interval)
{
    log->steps++;
    log->ms += row->ms;
    log_row(log, row);
    log_progress(log, row, steps,
                 1e-3 * log->ms / (double)log->steps * (double)(steps - row->step - 1), interval);
}

// log_ms_per_step: mean time of the steps recorded, 0 if there are none.
static inline double log_ms_per_step(const Log *log)
{
    return log->steps ? log->ms / (double)log->steps : 0;
}

// log_eval: record and show an evaluation; of one without data, whose loss is NaN, nothing.
static inline void log_eval(Log *log, const LogRow *val)
{
    LogRow bits = *val;
    if (!is_finite_bits(val->loss))
        return;
    bits.split = "val_bits";
    bits.loss = val->bits;
    if (val->bits > 0)
        log_row(log, &bits);
    log_row(log, val);
    if (val->bits > 0)
        log_line(log, "step %ld: held out: loss %.4f, %.4f bits per character, accuracy %.2f%%\n",
                 val->step, val->loss, val->bits, 100 * val->acc);
    else if (val->constant > 0)
        log_line(log, "step %ld: on fresh sequences loss %.4f, accuracy %.2f%%, scaled %.4f; the "
                 "most frequent target: %.2f%%\n", val->step, val->loss, 100 * val->acc,
                 val->scaled, 100 * val->constant);
    else
        log_line(log, "step %ld: %s loss %.4f, accuracy %.2f%%\n", val->step,
                 val->held_out ? "held out:" : "on fresh sequences", val->loss, 100 * val->acc);
}

// log_close: close log.csv, which gives up its lock.
static inline void log_close(Log *log)
{
    if (log->csv && fclose(log->csv))
        log_fail(log);
    log->csv = NULL;
}

#endif
