// text.h: language modelling: a file as tokens, windows of it to train on and to evaluate, and the
// way from tokens back to text.
//
// --vocab bytes   every byte is a token, V = 256, whatever the encoding
// --vocab ascii   V = 128; a byte of 128 or more is an error that names its offset
// --vocab gpt2    V = 50257; a file of uint16 tokens as data/gpt2_tokens.py writes and llm.c reads
//                 it: 256 int32 (20240520, 1, number of tokens, zeros), then the tokens; all
//                 little-endian
//
// Nothing is translated: CR and LF are tokens like any other. Only a UTF-8 byte order mark at the
// beginning is left out. The file is mapped, not read: it may be larger than the memory.
//
// Window w of T tokens reads tokens wT to wT+T: inputs, and one later targets. Windows do not
// overlap, and what is left after the last is not used. Sequence k of training belongs to epoch
// e = k / W and is window p_e(k mod W), where p_e, a permutation of the W windows, is a function of
// seed and epoch: the step number is all that a resumed run must know. The last --held-out share of
// the file, or all of --val, is never trained on.
#ifndef SEQ_DATA_TEXT_H
#define SEQ_DATA_TEXT_H

#include "../util/options.h"
#include "../util/rng.h"
#include "../util/safetensors.h"
#include <signal.h>
#include <sys/mman.h>

enum { TEXT_BYTES, TEXT_ASCII, TEXT_GPT2 };
enum { GPT2_V = 50257, GPT2_MAGIC = 20240520, GPT2_TABLE_MAGIC = 20240328, GPT2_HEADER = 1024 };

// A mapped file, or a part of one: token i is `width` bytes at map + first + i width.
typedef struct {
    const char *path;
    const unsigned char *map;
    size_t bytes, first, n; // of the whole file; of this part: offset and number of tokens
    int width;
} TextFile;

// What each token says: token i is bytes[at[i]] to bytes[at[i + 1]]. `end` marks the end of a text.
typedef struct {
    unsigned char *bytes;
    size_t *at, n;
    int end;
} TextTable;

typedef struct {
    const char *path, *val_path, *table_path; // options
    int vocab, context;
    double held_out;
    TextFile train, val; // filled by text_open
    TextTable table;     // n = 0 if there is none
    char checksum[17];
} Text;

// text_options: add the options of text to the command line.
static inline void text_options(Options *options, Text *t)
{
    const Option rows[] = {
        {"text", OPT_STRING, &t->path, NULL, 0, 0, "FILE", RUNTIME, "text: what to train on"},
        {"val", OPT_STRING, &t->val_path, NULL, 0, 0, "FILE", RUNTIME,
         "text: what to evaluate on, in place of --held-out"},
        {"held-out", OPT_REAL, &t->held_out, "0.1", 1e-6, 0.9, "share", DEFINES_DATA,
         "text: the end of --text that is kept for evaluation"},
        {"vocab", OPT_CHOICE, &t->vocab, "bytes", 0, 0, "bytes|ascii|gpt2", DEFINES_DATA,
         "text: what a token is; gpt2: FILE is of data/gpt2_tokens.py"},
        {"context", OPT_INT, &t->context, "64", 1, 1 << 20, "tokens", DEFINES_DATA,
         "text: T, tokens in a window"},
        {"tokenizer", OPT_STRING, &t->table_path, NULL, 0, 0, "FILE", RUNTIME,
         "text: what gpt2's tokens say, gpt2_tokenizer.bin"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

// text_V: symbols of a vocabulary.
static inline size_t text_V(int vocab)
{
    return vocab == TEXT_GPT2 ? GPT2_V : vocab == TEXT_ASCII ? 128 : 256;
}

// ---- files

// text_u32: the little-endian 32-bit number at p.
static inline uint32_t text_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// text_kind: what a file of bytes p (n) seems to be, in words for errors.
static inline const char *text_kind(const unsigned char *p, size_t n)
{
    const uint32_t magic = n >= 4 ? text_u32(p) : 0;
    const uint32_t ends = magic >> 24 | magic << 24;
    const uint32_t swapped = ends | (magic >> 8 & 0xff00) | (magic & 0xff00) << 8;
    if (magic == GPT2_MAGIC)
        return "a file of tokens";
    if (magic == GPT2_TABLE_MAGIC)
        return "a tokenizer";
    if (swapped == GPT2_MAGIC || swapped == GPT2_TABLE_MAGIC)
        return "one in big-endian byte order";
    if (n > 8 && p[8] == '{' && !p[7])
        return "a safetensors file";
    for (size_t i = 0; i < n && i < 4096; i++)
        if (p[i] < 9)
            return "one of unknown kind";
    return "plain text";
}

// text_on_bus_error: the handler for what a shortened file does to those who read its map.
static inline void text_on_bus_error(int number)
{
    static const char line[] = "error: --text or --images: changed while it was read: the file is "
                               "shorter than at the start\n";
    (void)number;
    _exit(write(STDERR_FILENO, line, sizeof line - 1) < 0 ? EXIT_FAIL : EXIT_DATA);
}

// text_map: a file in memory, read-only; `option` is named in errors. If the file is made shorter,
// reading it ends the program with EXIT_DATA.
static inline TextFile text_map(const char *option, const char *path)
{
    TextFile f = {path, NULL, 0, 0, 0, 1};
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe must not wait
    if (fd < 0 || fstat(fd, &st))
        die(EXIT_DATA, "%s %s: cannot read: %s", option, path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        die(EXIT_DATA, "%s %s: expected a file, got %s", option, path,
            S_ISDIR(st.st_mode) ? "a directory" : "something else of that name");
    if (st.st_size == 0)
        die(EXIT_DATA, "%s %s: expected data, got an empty file", option, path);
    f.bytes = (size_t)st.st_size;
    void *map = mmap(NULL, f.bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        die(EXIT_DATA, "%s %s: cannot map %zu bytes: %s", option, path, f.bytes, strerror(errno));
    close(fd);
    signal(SIGBUS, text_on_bus_error);
    f.map = (const unsigned char *)map;
    return f;
}

// text_header: find the tokens of a file of --vocab gpt2; dies unless its header and size agree.
static inline void text_header(TextFile *f, const char *option)
{
    const char *kind = text_kind(f->map, f->bytes);
    if (f->bytes < 4 || text_u32(f->map) != GPT2_MAGIC)
        die(EXIT_DATA, "%s %s: expected a file of tokens (it begins with %d), got %s\n"
            "hint: data/gpt2_tokens.py encodes plain text; --vocab bytes reads it as it is",
            option, f->path, GPT2_MAGIC, kind);
    if (f->bytes < GPT2_HEADER)
        die(EXIT_DATA, "%s %s: expected a header of %d bytes, the file has %zu", option, f->path,
            GPT2_HEADER, f->bytes);
    if (text_u32(f->map + 4) != 1)
        die(EXIT_DATA, "%s %s: expected version 1 (tokens of 2 bytes), got version %u", option,
            f->path, text_u32(f->map + 4));
    f->first = GPT2_HEADER;
    f->n = text_u32(f->map + 8);
    f->width = 2;
    if (f->bytes != GPT2_HEADER + 2 * (uint64_t)f->n)
        die(EXIT_DATA, "%s %s: its header says %zu tokens, which take %zu bytes; got %zu bytes\n"
            "hint: the file is cut off, or of another format", option, f->path, f->n,
            GPT2_HEADER + 2 * f->n, f->bytes);
    if (!f->n)
        die(EXIT_DATA, "%s %s: expected at least one token, its header says 0", option, f->path);
}

// text_token: token i of a part.
static inline int text_token(const TextFile *f, size_t i)
{
    const unsigned char *p = f->map + f->first + i * (size_t)f->width;
    return f->width == 1 ? p[0] : p[0] | p[1] << 8;
}

// text_file: map a file and find its tokens; dies over one that is not of this vocabulary.
static inline TextFile text_file(const char *option, const char *path, int vocab)
{
    TextFile f = text_map(option, path);
    const int V = (int)text_V(vocab);
    if (vocab == TEXT_GPT2)
        text_header(&f, option);
    else {
        if (f.bytes >= 4 && text_u32(f.map) == GPT2_MAGIC)
            die(EXIT_DATA, "%s %s: expected plain text, got a file of tokens\nhint: --vocab gpt2",
                option, path);
        f.first = f.bytes >= 3 && !memcmp(f.map, "\xef\xbb\xbf", 3) ? 3 : 0;
        f.n = f.bytes - f.first;
    }
    size_t bad = f.n;
#pragma omp parallel for reduction(min : bad)
    for (size_t i = 0; i < (V < 256 || vocab == TEXT_GPT2 ? f.n : 0); i++)
        bad = text_token(&f, i) >= V && i < bad ? i : bad;
    if (bad < f.n && vocab == TEXT_GPT2)
        die(EXIT_DATA, "%s %s: token %zu is %d; expected one from 0 to %d", option, path, bad,
            text_token(&f, bad), V - 1);
    if (bad < f.n)
        die(EXIT_DATA, "%s %s: the byte at offset %zu is 0x%02X; expected ASCII, below 0x80\n"
            "hint: --vocab bytes takes any", option, path, f.first + bad, text_token(&f, bad));
    return f;
}

// text_checksum: text (17) = checksum of a file's size, the tokens of its part f and the file's
// bytes, in util/safetensors.h's formula: of all up to 16 MiB, else of 4096 pieces of 4 KiB spread
// over it; of such a file nothing is read ahead any more, as its windows come from anywhere.
static inline void text_checksum(const TextFile *f, char *text)
{
    enum { PIECES = 4096, PIECE = 4096 };
    const uint64_t sizes[] = {f->bytes, f->n};
    StSum sum = {0, 0, {0}, 0};
    st_sum_add(&sum, sizes, sizeof sizes);
    if (f->bytes > PIECES * PIECE) // advice: to fail is fine
        madvise((void *)f->map, f->bytes, MADV_RANDOM);
    if (f->bytes <= PIECES * PIECE)
        st_sum_add(&sum, f->map, f->bytes);
    else
        for (size_t i = 0; i < PIECES; i++)
            st_sum_add(&sum, f->map + (f->bytes - PIECE) * i / (PIECES - 1), PIECE);
    st_sum_hex(&sum, text);
}

// text_windows: windows of T tokens in a part.
static inline size_t text_windows(const TextFile *f, size_t T)
{
    return f->n ? (f->n - 1) / T : 0;
}

// text_shuffle: element i of a permutation of 0..n-1, which is a function of seed and stream: six
// rounds of a Feistel network on the next power of 4, again and again until the result is below n.
static inline uint64_t text_shuffle(uint64_t seed, uint64_t stream, uint64_t i, uint64_t n)
{
    unsigned half = 1;
    while (half < 32 && (n - 1) >> (2 * half))
        half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t next = left ^ (rand_u64(seed, stream, round << 32 | right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

// text_fill: inputs (T), targets (T) = a window: for stream STREAM_TRAIN + k that of sequence k of
// training, for STREAM_EVAL + k the held-out one number k, in an order that no seed changes.
// Returns 0 if k is past the last of these.
static inline int text_fill(const Text *t, uint64_t seed, uint64_t stream, int *inputs,
                            int *targets)
{
    const int held = stream >= STREAM_EVAL;
    const TextFile *f = held ? &t->val : &t->train;
    const size_t T = (size_t)t->context, W = text_windows(f, T);
    const uint64_t k = stream - (held ? STREAM_EVAL : STREAM_TRAIN);
    if (k >= W && (held || !W))
        return 0;
    size_t at = T * (held ? text_shuffle(0, STREAM_EVAL, k, W)
                          : text_shuffle(seed, STREAM_TRAIN + k / W, k % W, W));
    for (size_t i = 0; i < T; i++) {
        inputs[i] = text_token(f, at + i);
        targets[i] = text_token(f, at + i + 1);
    }
    return 1;
}

// ---- what tokens say

// text_table: read an id-to-bytes table: 256 uint32 (20240328, 2, number of tokens, the one that
// ends a text, zeros), then for each a length in one byte and its bytes. Dies unless it has V.
static inline void text_table(TextTable *table, const char *path, size_t V)
{
    TextFile f = text_map("--tokenizer", path);
    if (f.bytes < GPT2_HEADER || text_u32(f.map) != GPT2_TABLE_MAGIC)
        die(EXIT_DATA, "--tokenizer %s: expected a tokenizer (it begins with %d), got %s", path,
            GPT2_TABLE_MAGIC, text_kind(f.map, f.bytes));
    const uint32_t version = text_u32(f.map + 4), n = text_u32(f.map + 8);
    const uint32_t end = text_u32(f.map + 12);
    if (version != 2)
        die(EXIT_DATA, "--tokenizer %s: expected version 2, got %u", path, version);
    if (n != V || end != V - 1)
        die(EXIT_DATA, "--tokenizer %s: expected %zu tokens, got %u, the end of a text being %u, "
            "expected %zu", path, V, n, end, V - 1);
    table->bytes = (unsigned char *)alloc_zero(f.bytes, 1, "tokenizer");
    table->at = (size_t *)alloc_zero(V + 1, sizeof *table->at, "tokenizer");
    table->n = V;
    table->end = (int)end;
    size_t from = GPT2_HEADER;
    for (size_t i = 0; i < V; i++) {
        const size_t length = from < f.bytes ? f.map[from] : 0;
        if (!length || length >= f.bytes - from)
            die(EXIT_DATA, "--tokenizer %s: expected %zu tokens, it ends within token %zu", path, V,
                i);
        memcpy(table->bytes + table->at[i], f.map + from + 1, length);
        table->at[i + 1] = table->at[i] + length;
        from += 1 + length;
    }
    if (from != f.bytes)
        die(EXIT_DATA, "--tokenizer %s: expected %zu bytes, got %zu", path, from, f.bytes);
    munmap((void *)f.map, f.bytes);
}

// text_characters: characters (bytes of text) in n tokens, those below 0 left out; 0 if unknown.
static inline size_t text_characters(const Text *t, const int *tokens, size_t n)
{
    size_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (tokens[i] >= 0 && t->vocab != TEXT_GPT2)
            sum++;
        else if (tokens[i] >= 0 && (size_t)tokens[i] < t->table.n && tokens[i] != t->table.end)
            sum += t->table.at[tokens[i] + 1] - t->table.at[tokens[i]];
    return sum;
}

// text_print: what tokens (n) say, on stdout; '?' for what is no token, and for control characters
// other than tab and line feed, which a terminal might obey.
static inline void text_print(const Text *t, const int *tokens, size_t n)
{
    enum { MOST = 256 }; // bytes of a token
    char *all = (char *)alloc_zero(n, t->vocab == TEXT_GPT2 ? MOST : 1, "text to print"), *p = all;
    for (size_t i = 0; i < n; i++) {
        const int token = tokens[i];
        if (token < 0 || (size_t)token >= text_V(t->vocab))
            *p++ = '?';
        else if (t->vocab != TEXT_GPT2)
            *p++ = (char)token;
        else if (!t->table.n)
            p += snprintf(p, MOST, "[%d]", token);
        else
            for (size_t k = t->table.at[token]; k < t->table.at[token + 1]; k++)
                *p++ = (char)t->table.bytes[k];
    }
    mask_controls(all, (size_t)(p - all), "\n\t");
    fwrite(all, 1, (size_t)(p - all), stdout);
    free(all);
}

// text_piece: bytes of the first piece of p (n), as GPT-2 cuts a text before it merges: 's 't 're
// 've 'm 'll 'd, or letters, or digits, or other marks, these three with a space in front if there
// is one, or white space. A byte of 128 or more counts as a letter.
static inline size_t text_piece(const unsigned char *p, size_t n)
{
    enum { SPACE, LETTER, DIGIT, MARK };
#define KIND(c) ((c) == ' ' || ((c) >= 9 && (c) <= 13) ? SPACE : \
                 isalpha(c) || (c) >= 128 ? LETTER : isdigit(c) ? DIGIT : MARK)
    static const char endings[] = "s\0t\0re\0ve\0m\0ll\0d\0";
    for (const char *e = endings; p[0] == '\'' && *e; e += strlen(e) + 1)
        if (strlen(e) < n && !memcmp(p + 1, e, strlen(e)))
            return 1 + strlen(e);
    size_t first = p[0] == ' ' && n > 1 && KIND(p[1]) != SPACE, i = first;
    const int kind = KIND(p[first]);
    while (i < n && KIND(p[i]) == kind)
        i++;
    return kind == SPACE && i < n && i > 1 ? i - 1 : i; // the last blank goes to the next piece
#undef KIND
}

// text_find: the token that says p (n); -1 if none does.
static inline int text_find(const TextTable *table, const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < table->n; i++)
        if (table->at[i + 1] - table->at[i] == n && !memcmp(table->bytes + table->at[i], p, n))
            return (int)i;
    return -1;
}

// text_merge: tokens = those of one piece p (n); returns how many. Byte-pair encoding: of all
// neighbours that together are a token, the two that are the lowest one merge, until none are.
// start (n+1), pair (n) are scratch.
static inline size_t text_merge(const TextTable *table, int *tokens, size_t *start, int *pair,
                                const unsigned char *p, size_t n)
{
    size_t count = n;
    for (size_t i = 0; i <= n; i++)
        start[i] = i;
    for (size_t i = 0; i + 1 < n; i++)
        pair[i] = text_find(table, p + i, 2);
    for (;;) {
        size_t best = count;
        for (size_t i = 0; i + 1 < count; i++)
            if (pair[i] >= 0 && (best == count || pair[i] < pair[best]))
                best = i;
        if (best == count)
            break;
        memmove(start + best + 1, start + best + 2, (count - best - 1) * sizeof *start);
        memmove(pair + best, pair + best + 1, (count - best - 1) * sizeof *pair);
        count--;
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < count; i++)
            pair[i] = text_find(table, p + start[i], start[i + 2] - start[i]);
    }
    for (size_t i = 0; i < count; i++)
        tokens[i] = text_find(table, p + start[i], start[i + 1] - start[i]);
    return count;
}

// text_encode: tokens (room for one more than the bytes of text) = what --prompt says; returns
// their number, at least 1: without text a line feed or, for gpt2, the end of a text. Dies over a
// byte that no token says, and for gpt2 without a table.
static inline size_t text_encode(const Text *t, int *tokens, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    const size_t n = strlen(text);
    size_t count = 0;
    tokens[0] = t->vocab != TEXT_GPT2 ? '\n' : t->table.n ? t->table.end : GPT2_V - 1;
    if (!n)
        return 1;
    if (t->vocab != TEXT_GPT2) {
        for (; count < n; count++)
            if ((size_t)(tokens[count] = p[count]) >= text_V(t->vocab))
                die(EXIT_USAGE, "--prompt: the byte at offset %zu is 0x%02X; expected ASCII", count,
                    p[count]);
        return count;
    }
    if (!t->table.n)
        die(EXIT_USAGE, "--prompt: --vocab gpt2 needs --tokenizer FILE to know what tokens say");
    size_t *start = (size_t *)alloc_zero(n + 1, sizeof *start, "prompt");
    int *pair = (int *)alloc_zero(n, sizeof *pair, "prompt");
    for (size_t at = 0, piece; at < n; at += piece) {
        piece = text_piece(p + at, n - at);
        count += text_merge(&t->table, tokens + count, start, pair, p + at, piece);
    }
    free(start);
    free(pair);
    for (size_t i = 0, at = 0; i < count; i++) {
        if (tokens[i] < 0)
            die(EXIT_DATA, "--tokenizer %s: no token says 0x%02X, byte %zu of --prompt",
                t->table_path, p[at], at);
        at += t->table.at[tokens[i] + 1] - t->table.at[tokens[i]];
    }
    return count;
}

// ---- start and end

// text_same: 1 if both paths are names of one file.
static inline int text_same(const char *a, const char *b)
{
    struct stat x, y;
    return a && b && !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// text_open: map the files, check every token, divide them. With `training` there must be a batch
// of B windows to train on. Nothing is opened if neither --text nor --val is given.
static inline void text_open(Text *t, size_t B, int training)
{
    const size_t T = (size_t)t->context, need = size_mul(B, T, "--batch-size x --context") + 1;
    if (t->table_path && t->vocab != TEXT_GPT2)
        die(EXIT_USAGE, "--tokenizer is for --vocab gpt2\nhint: bytes say themselves");
    if (t->table_path)
        text_table(&t->table, t->table_path, text_V(t->vocab));
    if (training && !t->path)
        die(EXIT_USAGE, "--task text needs --text FILE, the text to train on");
    if (text_same(t->path, t->val_path))
        die(EXIT_USAGE, "--val %s: expected another file than --text: what is evaluated must not "
            "be trained on\nhint: without --val the end of --text is held out", t->val_path);
    if (t->path)
        t->train = text_file("--text", t->path, t->vocab);
    if (t->val_path)
        t->val = text_file("--val", t->val_path, t->vocab);
    else if (t->path) {
        t->val = t->train;
        t->val.n = (size_t)((double)t->train.n * t->held_out);
        t->train.n -= t->val.n;
        t->val.first += t->train.n * (size_t)t->train.width;
    }
    if (t->path)
        text_checksum(&t->train, t->checksum);
    if (training && t->train.n < need)
        die(EXIT_DATA, "--text %s: need %zu tokens for a batch (--batch-size %zu x --context %zu + "
            "1), have %zu to train on and %zu held out\nhint: a smaller --context or --batch-size",
            t->path, need, B, T, t->train.n, t->val_path ? (size_t)0 : t->val.n);
    if (t->val.map && !text_windows(&t->val, T))
        die(EXIT_DATA, "%s %s: need %zu tokens to evaluate (--context + 1), have %zu\nhint: a "
            "larger --held-out, or another file with --val", t->val_path ? "--val" : "--text",
            t->val.path, T + 1, t->val.n);
    char name[4096];
    if (t->train.map)
        printf("text: %s, checksum %s%s: %zu tokens to train on, %zu windows an epoch\n",
               masked(t->path, name, sizeof name), t->checksum,
               t->train.first == 3 ? ", byte order mark left out" : "", t->train.n,
               text_windows(&t->train, T));
    if (t->val.map)
        printf("held out: %s, %zu tokens, %zu windows; CR and LF are tokens like any other\n",
               masked(t->val.path, name, sizeof name), t->val.n, text_windows(&t->val, T));
}

// text_close: give everything back.
static inline void text_close(Text *t)
{
    if (t->val.map && t->val.map != t->train.map)
        munmap((void *)t->val.map, t->val.bytes);
    if (t->train.map)
        munmap((void *)t->train.map, t->train.bytes);
    free(t->table.bytes);
    free(t->table.at);
    memset(&t->train, 0, sizeof t->train);
    memset(&t->val, 0, sizeof t->val);
    memset(&t->table, 0, sizeof t->table);
}

#endif
