// safetensors_parse.h: the header of a safetensors file, from bytes to a checked table of tensors.
//
// A file is: 8 bytes, the header's length N, little-endian; N bytes of JSON; little-endian data.
//     {"__metadata__":{"step":"10"}, "w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, ...}
// Offsets count from the first data byte. The tensors tile the data: no gap, no overlap, none left
// over. The format is described at https://github.com/huggingface/safetensors.
//
// This part touches no file and never exits, so that dev/fuzz_safetensors.c can throw anything at
// it. Stricter than the format: names hold no \u0000; at most 8 dimensions and 2^17 tensors; no
// field of a tensor but the three above. safetensors.h reads and writes files.
#ifndef SEQ_UTIL_SAFETENSORS_PARSE_H
#define SEQ_UTIL_SAFETENSORS_PARSE_H

#include "check.h"
#include <assert.h>

static_assert(sizeof(size_t) == 8, "files above 4 GiB need 64-bit sizes");

// Every published dtype, so that a file holding any of them can be opened. Ours use F32 and I32.
typedef enum {
    ST_F32, ST_F64, ST_BF16, ST_F16, ST_I32, ST_I64, ST_U8, ST_I8, ST_I16, ST_U16, ST_U32, ST_U64,
    ST_BOOL, ST_C64, ST_F8_E4M3, ST_F8_E5M2, ST_F8_E8M0, ST_F8_E4M3FNUZ, ST_F8_E5M2FNUZ,
    ST_F6_E2M3, ST_F6_E3M2, ST_F4, ST_N_DTYPES
} StDtype;

enum {
    ST_MAX_DIMS = 8,
    ST_MAX_HEADER = 100000000, // bytes; the format's own limit
    ST_MAX_TENSORS = 1 << 17   // and metadata entries; our own limit, it bounds the memory
};

typedef struct {
    const char *key, *value;
} StMeta;

// A tensor in a file; begin and end count from the file's first data byte.
typedef struct {
    const char *name;
    StDtype dtype;
    int ndim;
    size_t shape[ST_MAX_DIMS];
    size_t begin, end;
} StEntry;

// A parsed header. Its strings lie in the JSON buffer given to st_parse.
typedef struct {
    StEntry *entries, **by_name; // (n) in the order of the data; (n) sorted by name
    StMeta *meta;                // (n_meta) sorted by key
    size_t n, n_meta;
    char error[320]; // why st_parse failed: "what; expected X, got Y"
} StHeader;

typedef struct {
    const char *name;
    size_t bits; // per element
} StDtypeInfo;

// st_dtype: name and size of a dtype.
static inline const StDtypeInfo *st_dtype(StDtype dtype)
{
    static const StDtypeInfo table[ST_N_DTYPES] = {
        {"F32", 32},    {"F64", 64},    {"BF16", 16},       {"F16", 16},        {"I32", 32},
        {"I64", 64},    {"U8", 8},      {"I8", 8},          {"I16", 16},        {"U16", 16},
        {"U32", 32},    {"U64", 64},    {"BOOL", 8},        {"C64", 64},        {"F8_E4M3", 8},
        {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},
        {"F6_E3M2", 6}, {"F4", 4}};
    return &table[dtype];
}

// st_bytes: *bytes = those of a tensor. Returns 0 if they overflow or are not whole (F4, F6).
static inline int st_bytes(StDtype dtype, int ndim, const size_t *shape, size_t *bytes)
{
    size_t bits = st_dtype(dtype)->bits;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] && bits > SIZE_MAX / shape[i])
            return 0;
        bits *= shape[i];
    }
    *bytes = bits / 8;
    return bits % 8 == 0;
}

// st_count: number of elements of an entry.
static inline size_t st_count(const StEntry *e)
{
    size_t n = 1;
    for (int i = 0; i < e->ndim; i++)
        n *= e->shape[i];
    return n;
}

// ----------------------------------------------------------------------------
// [parse] The header's JSON. No recursion, no exit, no allocation but the three arrays of StHeader.

typedef struct {
    char *begin, *p, *end;
    StHeader *h;
} StParser;

// st_fail: put a message into h->error, control characters (of hostile names) as '?'. Returns 0.
SEQ_PRINTF(2, 3)
static inline int st_fail(StHeader *h, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(h->error, sizeof h->error, fmt, args);
    va_end(args);
    for (char *p = h->error; *p; p++)
        if ((unsigned char)*p < 32 || *p == 127)
            *p = '?';
    return 0;
}

// st_peek: the next character that is not white space, not consumed; -1 at the end.
static inline int st_peek(StParser *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
    return s->p < s->end ? (unsigned char)*s->p : -1;
}

// st_unexpected: fail at the current character, white space or not.
static inline int st_unexpected(StParser *s, const char *wanted)
{
    int c = s->p < s->end ? (unsigned char)*s->p : -1;
    size_t at = (size_t)(s->p - s->begin);
    if (c < 0)
        return st_fail(s->h, "bad JSON in the header; expected %s, got its end", wanted);
    return st_fail(s->h, "bad JSON at byte %zu of the header; expected %s, got '%c' (0x%02x)", at,
                   wanted, c < 127 ? c : '?', (unsigned)c);
}

// st_token: consume the character c, or fail.
static inline int st_token(StParser *s, int c, const char *wanted)
{
    if (st_peek(s) != c)
        return st_unexpected(s, wanted);
    s->p++;
    return 1;
}

// st_more: between two items of a list closed by `close`: 1 more follow, 0 closed, -1 failed.
static inline int st_more(StParser *s, int close)
{
    int c = st_peek(s);
    if (c != ',' && c != close)
        return st_unexpected(s, close == ']' ? "',' or ']'" : "',' or '}'"), -1;
    s->p++;
    return c == ',';
}

// st_utf8: length of the UTF-8 character at p, 0 if it is not valid or a control character.
static inline size_t st_utf8(const char *text, const char *end)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] < 32 || (p[0] >= 0x80 && p[0] < 0xc2) || p[0] > 0xf4 || n > (size_t)(end - text))
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || // overlong; surrogate
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))   // overlong; above 10ffff
        return 0;
    return n;
}

// st_hex4: consume "\uXXXX"; its value, or 0 if that is not what is there (or it says \u0000).
static inline unsigned st_hex4(StParser *s)
{
    unsigned u = 0;
    if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u')
        return 0;
    for (int i = 2; i < 6; i++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF", *d = strchr(digits, s->p[i]);
        if (!s->p[i] || !d)
            return 0;
        u = u * 16 + (unsigned)((d - digits) % 16);
    }
    s->p += 6;
    return u;
}

// st_escape: decode one backslash escape to `out`; the end of the output, NULL if
// bad. \u0000 is refused: names are C strings. The output is never longer than the escape.
static inline char *st_escape(StParser *s, char *out)
{
    const char *codes = "\"\\/bfnrt", *values = "\"\\/\b\f\n\r\t";
    const char *c = s->end - s->p >= 2 && s->p[1] ? strchr(codes, s->p[1]) : NULL;
    if (c) {
        s->p += 2;
        *out++ = values[c - codes];
        return out;
    }
    unsigned u = st_hex4(s), low;
    if (u >= 0xd800 && u < 0xdc00) { // the first half of a surrogate pair
        low = st_hex4(s);
        u = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00) : 0;
    }
    if (!u || (u >= 0xdc00 && u < 0xe000))
        return NULL;
    if (u < 0x80) {
        *out++ = (char)u;
        return out;
    }
    int extra = u < 0x800 ? 1 : u < 0x10000 ? 2 : 3;
    *out++ = (char)((0xff00 >> (extra + 1) & 0xff) | u >> 6 * extra); // as many ones as bytes
    while (extra--)
        *out++ = (char)(0x80 | (u >> 6 * extra & 0x3f));
    return out;
}

// st_string: a JSON string, decoded in place and closed by a NUL; NULL if bad.
static inline char *st_string(StParser *s)
{
    if (!st_token(s, '"', "a string"))
        return NULL;
    char *text = s->p, *out = text;
    while (s->p < s->end && *s->p != '"') {
        size_t at = (size_t)(s->p - s->begin), n = st_utf8(s->p, s->end);
        if (*s->p == '\\') {
            out = st_escape(s, out);
        } else if (n) {
            memmove(out, s->p, n);
            out += n;
            s->p += n;
        }
        if (!out || !n) {
            st_fail(s->h, "bad string at byte %zu of the header; expected UTF-8, got other", at);
            return NULL;
        }
    }
    if (!st_token(s, '"', "the end of a string"))
        return NULL;
    *out = 0;
    return text;
}

// st_number: v = a whole number that fits a size_t, without sign, fraction, exponent, leading zero.
static inline int st_number(StParser *s, size_t *v)
{
    int c = st_peek(s);
    const char *first = s->p;
    if (c < '0' || c > '9')
        return st_unexpected(s, "a number of 0 or more");
    for (*v = 0; s->p < s->end && *s->p >= '0' && *s->p <= '9'; s->p++) {
        size_t digit = (size_t)(*s->p - '0');
        if (*v > (SIZE_MAX - digit) / 10)
            return st_fail(s->h, "number at byte %zu of the header; expected < 2^64, got more",
                           (size_t)(first - s->begin));
        *v = *v * 10 + digit;
    }
    return *first != '0' || s->p == first + 1 || st_unexpected(s, "no leading zeros");
}

// st_list: v (max) = a list of numbers, *n of them.
static inline int st_list(StParser *s, size_t *v, int max, int *n)
{
    int more = 1;
    if (!st_token(s, '[', "'['"))
        return 0;
    *n = 0;
    if (st_peek(s) == ']')
        return st_token(s, ']', "']'");
    for (; more == 1; more = st_more(s, ']'), ++*n) {
        if (*n == max)
            return st_fail(s->h, "list at byte %zu of the header; expected at most %d, got more",
                           (size_t)(s->p - s->begin), max);
        if (!st_number(s, &v[*n]))
            return 0;
    }
    return more == 0;
}

// st_find_dtype: the dtype of that name, ST_N_DTYPES if there is none.
static inline StDtype st_find_dtype(const char *name)
{
    int i = 0;
    while (i < ST_N_DTYPES && strcmp(st_dtype((StDtype)i)->name, name))
        i++;
    return (StDtype)i;
}

// st_entry: the object of one tensor. Its name is set; checks its shape against its offsets.
static inline int st_entry(StParser *s, StEntry *e)
{
    size_t offsets[2] = {0, 0}, bytes = 0;
    int seen = 0, field, n_offsets = 0, more, ok;
    if (!st_token(s, '{', "a tensor's '{'"))
        return 0;
    do {
        const char *key = st_string(s), *dtype;
        if (!key || !st_token(s, ':', "':'"))
            return 0;
        field = !strcmp(key, "dtype") + 2 * !strcmp(key, "shape");
        field += 4 * !strcmp(key, "data_offsets");
        if (!field || (seen & field))
            return st_fail(s->h, "tensor \"%.60s\"; expected dtype, shape, offsets, got %.40s%s",
                           e->name, key, field ? " twice" : "");
        seen |= field;
        if (field == 1) {
            ok = (dtype = st_string(s)) != NULL;
            e->dtype = ok ? st_find_dtype(dtype) : ST_F32;
            if (e->dtype == ST_N_DTYPES)
                return st_fail(s->h, "tensor \"%.60s\": dtype; expected F32, I32, ..., got %.40s",
                               e->name, dtype);
        } else {
            ok = field == 2 ? st_list(s, e->shape, ST_MAX_DIMS, &e->ndim)
                            : st_list(s, offsets, 2, &n_offsets);
        }
        more = ok ? st_more(s, '}') : -1;
    } while (more == 1);
    if (more < 0)
        return 0;
    if (seen != 7 || n_offsets != 2)
        return st_fail(s->h, "tensor \"%.60s\"; expected dtype, shape, 2 data_offsets, got fewer",
                       e->name);
    e->begin = offsets[0];
    e->end = offsets[1];
    if (e->begin > e->end)
        return st_fail(s->h, "tensor \"%.60s\": data_offsets; expected begin <= end, got %zu, %zu",
                       e->name, e->begin, e->end);
    if (!st_bytes(e->dtype, e->ndim, e->shape, &bytes))
        return st_fail(s->h, "tensor \"%.60s\": shape; expected whole bytes below 2^61, got other",
                       e->name);
    if (e->end - e->begin != bytes)
        return st_fail(s->h, "tensor \"%.60s\": data_offsets; expected %zu bytes apart, got %zu",
                       e->name, bytes, e->end - e->begin);
    return 1;
}

// st_metadata: the object "__metadata__", strings to strings.
static inline int st_metadata(StParser *s, size_t max)
{
    StHeader *h = s->h;
    int more = 1;
    if (h->meta)
        return st_fail(h, "__metadata__; expected once, got it twice");
    h->meta = (StMeta *)calloc(max, sizeof *h->meta);
    if (!h->meta)
        return st_fail(h, "header; expected memory for %zu entries, got none", max);
    if (!st_token(s, '{', "the '{' of __metadata__"))
        return 0;
    if (st_peek(s) == '}')
        return st_token(s, '}', "'}'");
    for (; more == 1; more = st_more(s, '}'), h->n_meta++) {
        StMeta *m = &h->meta[h->n_meta];
        if (h->n_meta == max)
            return st_fail(h, "__metadata__; expected at most %zu entries, got more", max);
        if (!(m->key = st_string(s)) || !st_token(s, ':', "':'") || !(m->value = st_string(s)))
            return 0;
    }
    return more == 0;
}

// The orders of the tables: entries by offset, entries by name, metadata by key.
static inline int st_by_offset(const void *a, const void *b)
{
    const StEntry *x = (const StEntry *)a, *y = (const StEntry *)b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

// st_by_name: order of two entries by name, for qsort.
static inline int st_by_name(const void *a, const void *b)
{
    return strcmp((*(StEntry *const *)a)->name, (*(StEntry *const *)b)->name);
}

// st_by_key: order of two metadata strings by key, for qsort.
static inline int st_by_key(const void *a, const void *b)
{
    return strcmp(((const StMeta *)a)->key, ((const StMeta *)b)->key);
}

// st_layout: sort the tables. Names must be unique, and the tensors tile the data of such a file.
static inline int st_layout(StHeader *h, size_t length, size_t file_size)
{
    size_t at = 0;
    for (size_t i = 0; i < h->n; i++)
        h->by_name[i] = &h->entries[i];
    qsort(h->entries, h->n, sizeof *h->entries, st_by_offset);
    qsort(h->by_name, h->n, sizeof *h->by_name, st_by_name);
    if (h->n_meta)
        qsort(h->meta, h->n_meta, sizeof *h->meta, st_by_key);
    for (size_t i = 1; i < h->n; i++)
        if (!strcmp(h->by_name[i - 1]->name, h->by_name[i]->name))
            return st_fail(h, "tensor \"%.60s\"; expected once, got it twice", h->by_name[i]->name);
    for (size_t i = 1; i < h->n_meta; i++)
        if (!strcmp(h->meta[i - 1].key, h->meta[i].key))
            return st_fail(h, "metadata \"%.60s\"; expected once, got it twice", h->meta[i].key);
    for (size_t i = 0; i < h->n; at = h->entries[i++].end)
        if (h->entries[i].begin != at)
            return st_fail(h, "tensor \"%.60s\": %s; expected to begin at data byte %zu, got %zu",
                           h->entries[i].name, h->entries[i].begin > at ? "gap" : "overlap", at,
                           h->entries[i].begin);
    if (at != file_size - 8 - length)
        return st_fail(h, "%s; expected %zu bytes (8 + header %zu + data %zu), got %zu",
                       at > file_size - 8 - length ? "file is cut short" : "file is too long",
                       8 + length + at, length, at, file_size);
    return 1;
}

// st_header_free: free the tables of h (not the JSON buffer, which is the caller's).
static inline void st_header_free(StHeader *h)
{
    free(h->entries);
    free(h->by_name);
    free(h->meta);
    h->entries = NULL;
    h->by_name = NULL;
    h->meta = NULL;
    h->n = h->n_meta = 0;
}

// st_check_length: can a file of file_size bytes have a header of `length` bytes? To be asked
// before allocating them. NULL if so, otherwise h->error.
static inline const char *st_check_length(StHeader *h, size_t length, size_t file_size)
{
    if (length == 0 || length > ST_MAX_HEADER)
        st_fail(h, "header length; expected 1 to %d, got %zu", ST_MAX_HEADER, length);
    else if (file_size < 8 || length > file_size - 8)
        st_fail(h, "file is cut short; expected at least %zu bytes (8 + header %zu), got %zu",
                8 + length, length, file_size);
    else
        return NULL;
    return h->error;
}

// st_object: the whole header.
static inline int st_object(StParser *s, size_t max_entries, size_t max_meta)
{
    StHeader *h = s->h;
    int more = 1;
    if (s->p == s->end || *s->p != '{') // not even white space may come first
        return st_unexpected(s, "'{'");
    s->p++;
    if (st_peek(s) == '}')
        more = st_token(s, '}', "'}'") - 1;
    while (more == 1) {
        const char *name = st_string(s);
        if (!name || !st_token(s, ':', "':'"))
            return 0;
        if (!strcmp(name, "__metadata__")) {
            if (!st_metadata(s, max_meta))
                return 0;
        } else {
            if (h->n == max_entries)
                return st_fail(h, "header; expected at most %zu tensors, got more", max_entries);
            h->entries[h->n].name = name;
            if (!st_entry(s, &h->entries[h->n]))
                return 0;
            h->n++;
        }
        more = st_more(s, '}');
    }
    return more == 0 && (st_peek(s) == -1 || st_unexpected(s, "only spaces after the last '}'"));
}

// st_parse: the tables h of a file of file_size bytes whose header is json (length), which is
// rewritten in place: h's strings lie in it. Returns NULL, or an error "what; expected X, got Y"
// that lies in h; then nothing needs to be freed. Reads and writes nothing outside json; memory at
// most 2.5 times its length, and at most 16 MiB.
static inline const char *st_parse(char *json, size_t length, size_t file_size, StHeader *h)
{
    memset(h, 0, sizeof *h);
    if (st_check_length(h, length, file_size))
        return h->error;
    // The shortest: "":{"dtype":"U8","shape":[],"data_offsets":[0,0]}; of the metadata "":"".
    const size_t most = ST_MAX_TENSORS;
    size_t max_entries = length / 48 < most ? length / 48 + 1 : most;
    size_t max_meta = length / 5 < most ? length / 5 + 1 : most;
    StParser s = {json, json, json + length, h};
    h->entries = (StEntry *)calloc(max_entries, sizeof *h->entries);
    h->by_name = (StEntry **)calloc(max_entries, sizeof *h->by_name);
    int ok = h->entries && h->by_name
                 ? st_object(&s, max_entries, max_meta)
                 : st_fail(h, "header; expected memory for %zu tensors, got none", max_entries);
    if (ok && st_layout(h, length, file_size))
        return NULL;
    st_header_free(h);
    return h->error;
}

#endif
