// testing.h: what several test files need: children that may die, and a directory to write in.
//
// What must end in die() runs in a forked child whose output and exit code are looked at. Files are
// written to a new directory under TMPDIR (default /tmp), which is removed at the end.
#ifndef SEQ_DEV_TESTING_H
#define SEQ_DEV_TESTING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../util/check.h"
#include "../util/threads.h"
#include <dirent.h>
#include <ftw.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[1024]; // the temporary directory
static pid_t owner;    // the process that removes it
static int is_child;   // this is a process that run_child made

// __lsan_is_turned_off: what AddressSanitizer asks before it looks for leaks: a child that dies may
// leave its memory to the system.
int __lsan_is_turned_off(void)
{
    return is_child;
}

typedef struct {
    int code;        // exit code, or -1 if a signal ended it
    long peak_kib;   // peak memory
    char text[8192]; // the beginning of what it wrote to stdout and stderr
} Outcome;

// run_child: fn(arg) in a child process; exit code 0 if it returns. SIGALRM ends a hanging one.
static inline Outcome run_child(void (*fn)(void *), void *arg)
{
    Outcome out = {-1, 0, ""};
    struct rusage usage;
    int ends[2], status = 0;
    size_t n = 0;
    char rest[512];
    fflush(stdout);
    if (pipe(ends))
        die(EXIT_FAIL, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid < 0)
        die(EXIT_FAIL, "fork: %s", strerror(errno));
    if (pid == 0) {
        is_child = 1;
        threads_set(1); // clang's OpenMP starts afresh in a child
        alarm(60);
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        fn(arg);
        fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t k = 1; k > 0;) {
        size_t room = sizeof out.text - 1 - n;
        k = read(ends[0], room ? out.text + n : rest, room ? room : sizeof rest);
        n += k > 0 && room ? (size_t)k : 0;
    }
    out.text[n] = 0;
    close(ends[0]);
    if (wait4(pid, &status, 0, &usage) == pid && WIFEXITED(status))
        out.code = WEXITSTATUS(status);
    out.peak_kib = usage.ru_maxrss;
#ifdef __APPLE__
    out.peak_kib /= 1024; // bytes there
#endif
    return out;
}

// expect_die: one check that fn(arg) ends in die(code) with a message that holds `substring`: one
// line `error: ...`, then at most one line `hint: ...`, and nothing else.
#define expect_die(...) expect_die_at(__FILE__, __LINE__, __VA_ARGS__)
static inline int expect_die_at(const char *file, int line_number, void (*fn)(void *), void *arg,
                                int code, const char *substring)
{
    Outcome out = run_child(fn, arg);
    const char *line = strchr(out.text, '\n'), *last = strrchr(out.text, '\n');
    int form = !strncmp(out.text, "error: ", 7) && last && !last[1];
    if (form && line != last)
        form = !strncmp(line + 1, "hint: ", 6) && strchr(line + 1, '\n') == last;
    return test_check(out.code == code && form && strstr(out.text, substring), file, line_number,
                      "expected exit code %d and \"%s\", got %d and:\n%s", code, substring,
                      out.code, out.text);
}

// in_dir: the path of `name` in the temporary directory; valid until the fourth later call.
static inline char *in_dir(const char *name)
{
    static char paths[4][2048];
    static int k;
    k = (k + 1) % 4;
    snprintf(paths[k], sizeof paths[k], "%s/%s", dir, name);
    return paths[k];
}

// put_file: write n bytes to a file.
static inline void put_file(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f))
        die(EXIT_FAIL, "%s: %s", path, strerror(errno));
}

// get_file: the n bytes of a file, and a 0 after them. To be freed.
static inline unsigned char *get_file(const char *path, size_t *n)
{
    struct stat info;
    FILE *f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &info))
        die(EXIT_FAIL, "%s: %s", path, strerror(errno));
    *n = (size_t)info.st_size;
    unsigned char *data = (unsigned char *)alloc_zero(*n + 1, 1, path);
    if (fread(data, 1, *n, f) != *n || fclose(f))
        die(EXIT_FAIL, "%s: %s", path, strerror(errno));
    return data;
}

// remove_entry: one step of a walk that removes a tree from its leaves up; it never stops.
static inline int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info, (void)kind, (void)at;
    remove(path);
    return 0;
}

// empty_dir: remove what lies in the temporary directory and has `part` in its name; their number.
static inline int empty_dir(const char *part)
{
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && strstr(e->d_name, part)) {
            nftw(in_dir(e->d_name), remove_entry, 8, FTW_DEPTH | FTW_PHYS);
            n++;
        }
    if (d)
        closedir(d);
    return n;
}

// remove_dir: at the end, however it comes about, remove the temporary directory.
static inline void remove_dir(void)
{
    if (getpid() != owner) // a child
        return;
    empty_dir("");
    rmdir(dir);
}

// make_dir: make the temporary directory, to be removed at exit.
static inline void make_dir(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/seqc-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(dir))
        die(EXIT_DATA, "%s: cannot create a directory: %s\nhint: set TMPDIR", dir, strerror(errno));
    owner = getpid();
    atexit(remove_dir);
}

#endif
