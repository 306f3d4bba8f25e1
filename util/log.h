// log.h: a run's directory, its log.csv, and what the console shows.
//
// A run never overwrites another: without --out it takes the next free runs/TASK-MODEL-NNN; a given
// --out must be new (or empty), or the user says --resume or --force. log.csv is locked while a run
// writes it.
//
// log.csv: `#` lines (configuration, git hash, compiler, device), then the header LOG_COLUMNS, then
// one line a record, flushed at once. Step s of split "train" is measured before update s; split
// "eval" at s after s updates.
#ifndef SEQ_UTIL_LOG_H
#define SEQ_UTIL_LOG_H

#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOG_COLUMNS "step,split,loss,acc,lr,grad_norm,ms,tokens_per_s"
#ifndef GIT_HASH
#define GIT_HASH "unknown"
#endif

typedef struct {
    char dir[4096];
    FILE *csv;
    int terminal;   // stdout is a terminal: the progress line is redrawn
    int line_open;  // a progress line stands unfinished on the terminal
    double started; // seconds
} Log;

typedef struct {
    long step;
    const char *split;                                 // "train" or "eval"
    double loss, acc, lr, grad_norm, ms, tokens_per_s; // nats, 0..1, -, -, milliseconds, 1/s
} LogRow;

// seconds_now: a monotonic clock, in seconds.
static inline double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// peak_memory: the largest resident size of this process so far, in bytes.
static inline double peak_memory(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return (double)usage.ru_maxrss;
#else
    return 1024.0 * (double)usage.ru_maxrss;
#endif
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

// dir_make: create `path` and what is missing above it; dies with EXIT_DATA when that fails.
static inline void dir_make(const char *path)
{
    char part[4096];
    struct stat st;
    snprintf(part, sizeof part, "%s", path);
    for (char *p = part + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(part, 0777); // a failure shows below
            *p = '/';
        }
    if (mkdir(part, 0777) && errno != EEXIST)
        die(EXIT_DATA, "--out %s: cannot create the directory: %s", path, strerror(errno));
    if (stat(part, &st) || !S_ISDIR(st.st_mode))
        die(EXIT_DATA, "--out %s: expected a directory, got something else of that name", path);
}

// dir_is_empty: 1 if the directory is empty or does not exist.
static inline int dir_is_empty(const char *path)
{
    int empty = 1;
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            empty = 0;
    if (d)
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
        if (resume)
            die(EXIT_USAGE, "--resume needs --out DIR, the directory of the run to go on with");
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
    if (!resume && !force && !stat(out, &st) && S_ISDIR(st.st_mode) && !dir_is_empty(out))
        die(EXIT_USAGE,
            "--out %s: expected a new directory, this one holds files\nhint: --resume goes on with "
            "that run, --force overwrites it",
            out);
    dir_make(out);
}

// log_path: the path of `name` in the run's directory.
static inline const char *log_path(const Log *log, const char *name, char *path, size_t size)
{
    snprintf(path, size, "%s/%s", log->dir, name);
    return path;
}

// log_truncate: drop the data rows of log.csv from step `step` on (they will be written again).
static inline void log_truncate(FILE *csv, long step)
{
    char line[4096];
    long keep = 0;
    rewind(csv);
    while (fgets(line, sizeof line, csv)) {
        char *end;
        long row = strtol(line, &end, 10);
        if (!strchr(line, '\n') || (end != line && *end == ',' && row >= step))
            break;
        keep += (long)strlen(line);
    }
    if (ftruncate(fileno(csv), keep) || fseeko(csv, 0, SEEK_END))
        die(EXIT_DATA, "log.csv: cannot truncate: %s", strerror(errno));
}

// log_open: open and lock DIR/log.csv. resume_step >= 0 keeps the rows before that step; otherwise
// the file starts anew. Returns 1 if the caller is to write `#` lines and then call log_header.
static inline int log_open(Log *log, long resume_step)
{
    char path[4200];
    log_path(log, "log.csv", path, sizeof path);
    int fd = open(path, O_RDWR | O_CREAT, 0666);
    if (fd < 0 || !(log->csv = fdopen(fd, "r+b")))
        die(EXIT_DATA, "%s: cannot write: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB))
        die(EXIT_DATA, "%s: another run is writing it\nhint: give this run another --out", path);
    log->terminal = isatty(STDOUT_FILENO);
    log->started = seconds_now();
    log_truncate(log->csv, resume_step >= 0 ? resume_step : 0);
    if (resume_step >= 0 && ftello(log->csv) > 0)
        return 0;
    if (ftruncate(fd, 0) || fseeko(log->csv, 0, SEEK_SET))
        die(EXIT_DATA, "%s: cannot truncate: %s", path, strerror(errno));
    return 1;
}

// log_header: end the `#` lines: compiler and git hash, then the column names.
static inline void log_header(Log *log)
{
    fprintf(log->csv, "# git=%s compiler=\"%s\"\n%s\n", GIT_HASH, __VERSION__, LOG_COLUMNS);
    if (fflush(log->csv))
        die(EXIT_DATA, "%s/log.csv: cannot write: %s", log->dir, strerror(errno));
}

// log_row: append one record, floats as %.9g, and flush it.
static inline void log_row(Log *log, const LogRow *r)
{
    fprintf(log->csv, "%ld,%s,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g\n", r->step, r->split, r->loss, r->acc,
            r->lr, r->grad_norm, r->ms, r->tokens_per_s);
    if (fflush(log->csv))
        die(EXIT_DATA, "%s/log.csv: cannot write: %s", log->dir, strerror(errno));
}

// log_newline: end an open progress line, before anything else is printed.
static inline void log_newline(Log *log)
{
    if (log->line_open)
        printf("\n");
    log->line_open = 0;
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
    fflush(stdout);
}

// log_close: close log.csv, which gives up the lock.
static inline void log_close(Log *log)
{
    log_newline(log);
    if (log->csv && fclose(log->csv))
        die(EXIT_DATA, "%s/log.csv: cannot write: %s", log->dir, strerror(errno));
    log->csv = NULL;
}

#endif
