// safetensors.h: write and read safetensors, the format of our checkpoints and dumps.
//
// safetensors_parse.h describes the format. In Python: safetensors.numpy.load_file(path).
// Our writer adds the metadata entry "checksum", 16 hexadecimal digits. With w[i] the i-th 8 bytes
// of all data as a little-endian integer (zeros after the end), everything modulo 2^64:
//     checksum = sum over i of mix(w[i] + i * 0x9e3779b97f4a7c15),        M = 0xd6e8feb86659fd93
//     mix(x): x ^= x >> 32, x *= M, x ^= x >> 32, x *= M, x ^= x >> 32
// (the same lines work on numpy's uint64 arrays). It finds accidents, not attacks.
//
// Writing never harms an older file of that name: a temporary file beside it, PATH.tmp-XXXXXX, is
// written, checked, flushed to the disk and renamed. A killed writer leaves the old file, and
// perhaps a temporary one that nothing reads. A failed save stops the program; it does not retry.
// Reading checks the header against the file's size before it allocates anything but that header.
#ifndef SEQ_UTIL_SAFETENSORS_H
#define SEQ_UTIL_SAFETENSORS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // mkstemp, pread, ... under -std=c11; needed before the first system header
#endif

#include "safetensors_parse.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static_assert(sizeof(off_t) == 8, "build with -D_FILE_OFFSET_BITS=64: files exceed 2 GiB");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors are little-endian, and this header reads and writes them without swapping bytes"
#endif

#define ST_TEMP ".tmp-" // between a file's name and what makes its temporary one unique

// A tensor to write.
typedef struct {
    const char *name;
    StDtype dtype;
    int ndim;
    size_t shape[ST_MAX_DIMS];
    const void *data;
} StTensor;

// A file open for reading.
typedef struct {
    char *path, *json;
    int fd;
    size_t size, data; // bytes of the file; where its data begins
    StHeader header;
} StFile;

// ----------------------------------------------------------------------------
// [checksum] The sum described above, fed piece by piece.

typedef struct {
    uint64_t sum, i; // so far; index of the next word
    unsigned char part[8];
    size_t n_part; // bytes of an unfinished word
} StSum;

// st_mix: the term of word w at index i.
static inline uint64_t st_mix(uint64_t w, uint64_t i)
{
    const uint64_t m = 0xd6e8feb86659fd93u;
    uint64_t x = w + i * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 32) * m;
    x = (x ^ x >> 32) * m;
    return x ^ x >> 32;
}

// st_sum_add: s += the next n bytes of the data.
static inline void st_sum_add(StSum *s, const void *data, size_t n)
{
    const unsigned char *p = (const unsigned char *)data;
    uint64_t w;
    while (n && (s->n_part || n < 8)) { // finish a word, or begin the last one
        s->part[s->n_part++] = *p++;
        n--;
        if (s->n_part == 8) {
            memcpy(&w, s->part, 8);
            s->sum += st_mix(w, s->i++);
            s->n_part = 0;
        }
    }
    size_t words = n / 8;
    uint64_t sum = 0, first = s->i;
    for (size_t k = 0; k < words; k++) {
        memcpy(&w, p + 8 * k, 8);
        sum += st_mix(w, first + k);
    }
    s->sum += sum;
    s->i += words;
    for (size_t k = 8 * words; k < n; k++)
        s->part[s->n_part++] = p[k];
}

// st_sum_hex: text (17) = the checksum of all bytes added so far.
static inline void st_sum_hex(const StSum *s, char *text)
{
    uint64_t sum = s->sum, w = 0;
    memcpy(&w, s->part, s->n_part);
    snprintf(text, 17, "%016llx", (unsigned long long)(s->n_part ? sum + st_mix(w, s->i) : sum));
}

// ----------------------------------------------------------------------------
// [write]

// st_put_string: text as a JSON string.
static inline void st_put_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', out);
        if ((unsigned char)*text < 32)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, out);
    }
    fputc('"', out);
}

// st_make_header: the JSON of a file at path (for messages), its length such that the data begins
// at a multiple of 64 bytes; *total = the bytes of all tensors. To be freed.
static inline char *st_make_header(const char *path, const StMeta *meta, size_t n_meta,
                                   const StTensor *tensors, size_t n, size_t *length, size_t *total)
{
    char *json = NULL, hex[17];
    FILE *out = open_memstream(&json, length);
    StSum sum = {0, 0, {0}, 0};
    size_t at = 0, bytes = 0;
    if (!out)
        die(EXIT_MEMORY, "%s: cannot allocate its header", path);
    for (size_t i = 0; i < n; i++) {
        const StTensor *t = &tensors[i];
        if (t->ndim < 0 || t->ndim > ST_MAX_DIMS || !st_bytes(t->dtype, t->ndim, t->shape, &bytes))
            die(EXIT_DATA, "%s: cannot save %s; expected <= %d dimensions, whole bytes, got %d",
                path, t->name, ST_MAX_DIMS, t->ndim);
        st_sum_add(&sum, t->data, bytes);
    }
    st_sum_hex(&sum, hex);
    fputs("{\"__metadata__\":{", out);
    for (size_t i = 0; i < n_meta; i++) {
        st_put_string(out, meta[i].key);
        fputc(':', out);
        st_put_string(out, meta[i].value);
        fputc(',', out);
    }
    fprintf(out, "\"checksum\":\"%s\"}", hex);
    for (size_t i = 0; i < n; i++) {
        const StTensor *t = &tensors[i];
        st_bytes(t->dtype, t->ndim, t->shape, &bytes);
        fputc(',', out);
        st_put_string(out, t->name);
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", st_dtype(t->dtype)->name);
        for (int d = 0; d < t->ndim; d++)
            fprintf(out, "%s%zu", d ? "," : "", t->shape[d]);
        fprintf(out, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes);
        at += bytes;
    }
    fputc('}', out);
    fflush(out); // sets *length
    for (size_t k = *length; (8 + k) % 64; k++)
        fputc(' ', out);
    int failed = ferror(out);
    failed |= fclose(out); // frees out
    if (failed)
        die(EXIT_MEMORY, "%s: cannot allocate its header", path);
    *total = at;
    return json;
}

// st_write_bytes: write all n bytes. 0, or -1 with errno.
static inline int st_write_bytes(int fd, const void *data, size_t n)
{
    const char *p = (const char *)data;
    while (n) {
        ssize_t k = write(fd, p, n < (1 << 30) ? n : 1 << 30); // macOS refuses 2 GiB at once
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0) {
            errno = k ? errno : EIO;
            return -1;
        }
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

// st_sync: bring fd's bytes to the disk. 0, or -1 with errno.
static inline int st_sync(int fd)
{
#ifdef F_FULLFSYNC // macOS: fsync alone leaves them in the drive's cache
    if (fcntl(fd, F_FULLFSYNC) == 0)
        return 0;
#endif
    return fsync(fd);
}

// st_fill: write a whole file into fd and check it. NULL, or what failed, with errno.
static inline const char *st_fill(int fd, const char *json, size_t length, const StTensor *tensors,
                                  size_t n, size_t size)
{
    struct stat info;
    mode_t mask = umask(0); // the only way to ask; mkstemp made the file private, so nobody gains
    umask(mask);
    uint64_t n64 = length;
    if (fchmod(fd, 0666 & ~mask))
        return "chmod";
    if (st_write_bytes(fd, &n64, 8) || st_write_bytes(fd, json, length))
        return "write";
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        st_bytes(tensors[i].dtype, tensors[i].ndim, tensors[i].shape, &bytes);
        if (st_write_bytes(fd, tensors[i].data, bytes))
            return "write";
    }
    if (st_sync(fd))
        return "fsync";
    if (fstat(fd, &info))
        return "stat";
    errno = EIO;
    return (size_t)info.st_size == size ? NULL : "size check";
}

// st_sync_directory: bring the renaming of path to the disk. NULL, or what failed, with errno.
static inline const char *st_sync_directory(const char *path)
{
    char *dir = strdup(path), *slash = dir ? strrchr(dir, '/') : NULL;
    if (!dir)
        return "strdup";
    if (slash)
        slash[slash == dir] = 0; // "/x" lies in "/"
    int fd = open(slash ? dir : ".", O_RDONLY | O_CLOEXEC);
    free(dir);
    if (fd < 0)
        return errno == EACCES ? NULL : "open directory"; // may be writable and not readable
    int failed = fsync(fd) && errno != EINVAL && errno != ENOTSUP; // some file systems cannot
    int reason = errno;
    close(fd);
    errno = reason;
    return failed ? "fsync directory" : NULL;
}

// st_write: save tensors (n) and metadata (n_meta, and a checksum) to path, as described above.
// Returns the size of the file, 8 + header + data. Dies with EXIT_DATA, the older file untouched,
// when anything fails, names repeat or are not UTF-8. A symbolic link at path is itself replaced.
static inline size_t st_write(const char *path, const StMeta *meta, size_t n_meta,
                              const StTensor *tensors, size_t n)
{
    static const char untouched[] = "hint: an older file of that name is untouched";
    size_t length = 0, total = 0;
    char *json = st_make_header(path, meta, n_meta, tensors, n, &length, &total);
    size_t size = 8 + length + total;
    struct stat info;
    StHeader check;
    char *temp = (char *)alloc_zero(strlen(path) + 12, 1, path);
    char *copy = (char *)memcpy(alloc_zero(length, 1, path), json, length);
    if (st_parse(copy, length, size, &check)) // what we could not read back we do not write
        die(EXIT_DATA, "%s: cannot save: %s\n%s", path, check.error, untouched);
    st_header_free(&check);
    if (!lstat(path, &info) && !S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode))
        die(EXIT_DATA, "%s: cannot save; expected a new name or a regular file, got a %s\n%s", path,
            S_ISDIR(info.st_mode) ? "directory" : "special file", untouched);
    sprintf(temp, "%s" ST_TEMP "XXXXXX", path);
    int fd = mkstemp(temp), reason;
    if (fd < 0)
        die(EXIT_DATA, "%s: cannot save; expected to create %s, got: %s\n%s", path, temp,
            strerror(errno), "hint: its directory must exist and be writable; nothing was changed");
    const char *failed = st_fill(fd, json, length, tensors, n, size);
    reason = errno;
    if (close(fd) && !failed)
        failed = "close", reason = errno;
    if (!failed && rename(temp, path))
        failed = "rename", reason = errno;
    if (failed) {
        unlink(temp);
        die(EXIT_DATA, "%s: cannot save; expected to write %zu bytes, got: %s: %s\n%s", path, size,
            failed, strerror(reason), untouched);
    }
    if ((failed = st_sync_directory(path)))
        die(EXIT_DATA, "%s: %s: %s\nhint: the new file is in place; a power cut may still undo it",
            path, failed, strerror(errno));
    free(json);
    free(copy);
    free(temp);
    return size;
}

// ----------------------------------------------------------------------------
// [read]

// st_guess: what a file of `size` bytes that cannot be read seems to be, from its first n bytes.
static inline const char *st_guess(const unsigned char *b, size_t n, size_t size)
{
    static const struct {
        const char *bytes, *what;
    } magic[] = {
        {"\x89PNG", "this is a PNG image"},
        {"\x1f\x8b", "this is gzip-compressed; unpack it first"},
        {"PK\x03\x04", "this is a zip archive, perhaps a PyTorch checkpoint; convert it first"},
        {"\x80\x02", "this is a Python pickle, perhaps a PyTorch checkpoint; convert it first"},
        {"\x93NUMPY", "this is a NumPy .npy file"},
        {"GGUF", "this is a GGUF model"},
        {"version https://git-lfs", "this is a Git LFS pointer; git lfs pull fetches the file"}};
    static const char damaged[] = "the file is damaged, or was cut short while it was copied";
    uint32_t word = 0;
    uint64_t big = 0;
    size_t text = 0;
    if (n == 0)
        return "the file is empty";
    if (n > 8 && b[8] == '{' && !memcmp(b + 4, "\0\0\0", 4)) // a length below 4 GiB and JSON
        return damaged;
    for (size_t i = 0; i < sizeof magic / sizeof *magic; i++)
        if (n >= strlen(magic[i].bytes) && !memcmp(b, magic[i].bytes, strlen(magic[i].bytes)))
            return magic[i].what;
    memcpy(&word, b, n < 4 ? n : 4);
    if (word == 20240520)
        return "this is a file of GPT-2 tokens (.bin), data rather than a model";
    if (word == 20240328)
        return "this is a GPT-2 tokenizer (.bin), not a model";
    if (word == 20240326)
        return "this is an llm.c checkpoint (.bin); convert it to safetensors";
    for (size_t i = 0; i < 8 && i < n; i++)
        big = big << 8 | b[i];
    if (n > 8 && big > 0 && big <= ST_MAX_HEADER && big <= size - 8 && b[8] == '{')
        return "its byte order is big-endian; the format is little-endian, so its writer is wrong";
    while (text < n && ((b[text] >= 32 && b[text] < 127) || (b[text] >= 9 && b[text] <= 13)))
        text++;
    return n >= 8 && text == n ? "this is plain text" : damaged;
}

// st_pread: dst (n) = bytes of f from offset on; dies with EXIT_DATA if they cannot be read.
static inline void st_pread(const StFile *f, void *dst, size_t n, size_t offset)
{
    char *p = (char *)dst;
    while (n) {
        ssize_t k = pread(f->fd, p, n < (1 << 30) ? n : 1 << 30, (off_t)offset);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            die(EXIT_DATA, "%s: cannot read; expected %zu bytes at byte %zu, got: %s", f->path, n,
                offset, k ? strerror(errno) : "the end (did the file change?)");
        p += k;
        n -= (size_t)k;
        offset += (size_t)k;
    }
}

// st_read: f's header, of a file that is open and has f->size bytes, at least 8. Returns what is
// wrong with it; NULL: nothing.
static inline const char *st_read(StFile *f)
{
    uint64_t length = 0;
    st_pread(f, &length, 8, 0);
    const char *error = st_check_length(&f->header, length, f->size);
    if (error)
        return error;
    f->data = 8 + length;
    f->json = (char *)alloc_zero(length, 1, f->path);
    st_pread(f, f->json, length, 8);
    return st_parse(f->json, length, f->size, &f->header);
}

// st_open: open path and check its whole header; dies with EXIT_DATA saying what is wrong, and what
// the file seems to be. Allocates the header and its tables, nothing else.
static inline StFile *st_open(const char *path)
{
    StFile *f = (StFile *)alloc_zero(1, sizeof *f, path);
    struct stat info;
    unsigned char first[64];
    f->path = strcpy((char *)alloc_zero(strlen(path) + 1, 1, path), path);
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // not waiting for a pipe's writer
    if (f->fd < 0 || fstat(f->fd, &info))
        die(EXIT_DATA, "%s: cannot open; expected a safetensors file, got: %s", path,
            strerror(errno));
    if (!S_ISREG(info.st_mode))
        die(EXIT_DATA, "%s: cannot read; expected a safetensors file, got a %s", path,
            S_ISDIR(info.st_mode) ? "directory" : "special file");
    f->size = (size_t)info.st_size;
    size_t n = f->size < sizeof first ? f->size : sizeof first;
    st_pread(f, first, n, 0);
    if (n < 8)
        die(EXIT_DATA, "%s: file is too short; expected at least 8 bytes, got %zu\nhint: %s", path,
            n, st_guess(first, n, f->size));
    const char *error = st_read(f);
    if (error)
        die(EXIT_DATA, "%s: %s\nhint: %s", path, error, st_guess(first, n, f->size));
    return f;
}

// st_close: close f and free it, its entries and strings.
static inline void st_close(StFile *f)
{
    close(f->fd);
    st_header_free(&f->header);
    free(f->json);
    free(f->path);
    free(f);
}

// st_find: the tensor of that name; NULL if there is none.
static inline const StEntry *st_find(const StFile *f, const char *name)
{
    StEntry key, *p = &key;
    key.name = name;
    const StHeader *h = &f->header;
    StEntry **e = (StEntry **)bsearch(&p, h->by_name, h->n, sizeof p, st_by_name);
    return e ? *e : NULL;
}

// st_meta: the metadata value of that key; NULL if there is none.
static inline const char *st_meta(const StFile *f, const char *key)
{
    StMeta wanted = {key, NULL};
    const StHeader *h = &f->header;
    if (!h->n_meta) // then h->meta may be NULL
        return NULL;
    const void *m = bsearch(&wanted, h->meta, h->n_meta, sizeof wanted, st_by_key);
    return m ? ((const StMeta *)m)->value : NULL;
}

// st_real: the value of one element of dtype F32, F64, BF16 or F16.
static inline double st_real(const void *x, StDtype dtype)
{
    uint16_t h;
    uint32_t u = 0;
    float f;
    double d;
    if (dtype == ST_F64) {
        memcpy(&d, x, 8);
        return d;
    }
    if (dtype != ST_F16) { // BF16 is the upper half of a float
        memcpy(dtype == ST_F32 ? (char *)&u : (char *)&u + 2, x, dtype == ST_F32 ? 4 : 2);
        memcpy(&f, &u, 4);
        return (double)f;
    }
    memcpy(&h, x, 2);
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double value = exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                   : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                  : ldexp(fraction, -24);
    return h >> 15 ? -value : value;
}

// st_read_real: dst (count of e) = a tensor of F32, F64, BF16 or F16, as float (real_size 4) or
// double (8). Dies with EXIT_DATA on any other dtype.
static inline void st_read_real(StFile *f, const StEntry *e, void *dst, size_t real_size)
{
    size_t size = st_dtype(e->dtype)->bits / 8, n = st_count(e);
    unsigned char block[1 << 14];
    if (e->dtype > ST_F16)
        die(EXIT_DATA, "%s: tensor %s; expected dtype F32, F64, BF16 or F16, got %s", f->path,
            e->name, st_dtype(e->dtype)->name);
    if ((e->dtype == ST_F32 && real_size == 4) || (e->dtype == ST_F64 && real_size == 8)) {
        st_pread(f, dst, n * size, f->data + e->begin);
        return;
    }
    for (size_t i = 0, k; i < n; i += k) {
        k = n - i < sizeof block / size ? n - i : sizeof block / size;
        st_pread(f, block, k * size, f->data + e->begin + i * size);
        for (size_t j = 0; j < k; j++)
            real_set(dst, i + j, real_size, st_real(block + j * size, e->dtype));
    }
}

// st_read_int32: dst (count of e) = a tensor of I32; dies with EXIT_DATA on any other dtype.
static inline void st_read_int32(StFile *f, const StEntry *e, int32_t *dst)
{
    if (e->dtype != ST_I32)
        die(EXIT_DATA, "%s: tensor %s; expected dtype I32, got %s", f->path, e->name,
            st_dtype(e->dtype)->name);
    st_pread(f, dst, e->end - e->begin, f->data + e->begin);
}

// st_verify: recompute the checksum of f's data; dies with EXIT_DATA if its metadata has another. A
// file without one (from another program) passes.
static inline void st_verify(StFile *f)
{
    const char *expected = st_meta(f, "checksum");
    const size_t size = 1 << 20;
    StSum sum = {0, 0, {0}, 0};
    char hex[17];
    if (!expected)
        return;
    void *block = alloc_zero(size, 1, f->path);
    for (size_t at = f->data, k; at < f->size; at += k) {
        k = f->size - at < size ? f->size - at : size;
        st_pread(f, block, k, at);
        st_sum_add(&sum, block, k);
    }
    free(block);
    st_sum_hex(&sum, hex);
    if (strcmp(expected, hex))
        die(EXIT_DATA, "%s: data does not match its checksum; expected %.40s, got %s\nhint: %s",
            f->path, expected, hex, "the file is damaged; copy it again or use an older one");
}

#endif
