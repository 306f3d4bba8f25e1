// test_safetensors.c: tests of util/safetensors.h and of dev/diff, which reads what it writes.
//
//     gcc -O2 -Wall -Wextra test_safetensors.c -o build/test_safetensors -lm
//
// [parse]    headers that must be refused
// [files]    whole files: round trips, damage, checksums, failing and killed saves
// [diff]     dev/diff
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define main diff_main // dev/diff's own
#include "dev/diff.c"
#undef main
#include "dev/testing.h"

// put_header: write a file with that header length, JSON and n_data zero bytes of data.
static void put_header(const char *path, size_t length, const char *json, size_t n_data)
{
    size_t n = strlen(json);
    char *all = (char *)alloc_zero(8 + n + n_data, 1, path);
    memcpy(all, &length, 8);
    memcpy(all + 8, json, n);
    put_file(path, all, 8 + n + n_data);
    free(all);
}

// Things to run in a child.
static void open_file(void *path)
{
    st_close(st_open((const char *)path));
}

static void verify_file(void *path)
{
    StFile *f = st_open((const char *)path);
    st_verify(f);
    st_close(f);
}

// ----------------------------------------------------------------------------
// [parse]

static const char good_json[] =
    "{\"__metadata__\":{\"k\":\"v\"},"
    "\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"i\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[24,32]}}  ";

// parse: st_parse of a copy of json (n) in a block of exactly that size, in a file with `data`
// bytes of data. The error, empty if none, lies in h->error; nothing else of h may be used.
static const char *parse(const char *json, size_t n, size_t data, StHeader *h)
{
    char *copy = (char *)memcpy(alloc_zero(n, 1, "json"), json, n);
    if (!st_parse(copy, n, 8 + n + data, h)) {
        st_header_free(h);
        h->error[0] = 0;
    }
    free(copy);
    return h->error;
}

// parse_text: the same for a whole string.
static const char *parse_text(const char *json, size_t data, StHeader *h)
{
    return parse(json, strlen(json), data, h);
}

static void test_safetensors_refused_headers(void)
{
#define W(fields) "{\"w\":{" fields "}}"
#define F32(shape, offsets) "\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets
    static const struct {
        const char *json;
        size_t data;
        const char *message; // NULL: fine
    } cases[] = {
        {good_json, 32, NULL},
        {"{}", 0, NULL},
        {"{ }\t\r\n ", 0, NULL},
        {"{\"__metadata__\":{}}", 0, NULL},
        {W(F32("[]", "[0,4]")), 4, NULL},
        {W(F32("[0,7]", "[0,0]")), 0, NULL},
        {W(F32("[1,1,1,1,1,1,1,1]", "[0,4]")), 4, NULL},
        {W("\"data_offsets\":[0,3],\"shape\":[6],\"dtype\":\"F4\""), 3, NULL},
        {"{\"b\":{" F32("[1]", "[4,8]") "},\"a\":{" F32("[1]", "[0,4]") "}}", 8, NULL},
        {"{\"\\u00e9\\ud83d\\ude00\\\"\\\\\\/\\b\\f\\n\\r\\t\":{" F32("[]", "[0,4]") "}}", 4, NULL},
        {good_json, 31, "file is cut short; expected"},
        {good_json, 33, "file is too long; expected"},
        {"", 0, "header length; expected 1 to"},
        {" {}", 0, "expected '{', got ' '"},
        {"{}x", 0, "expected only spaces after the last '}', got 'x'"},
        {"{}{}", 0, "only spaces"},
        {"[]", 0, "expected '{', got '['"},
        {"{", 0, "got its end"},
        {"{\"w", 0, "end of a string"},
        {"{\"w\"", 0, "expected ':'"},
        {"{\"w\":", 0, "expected a tensor's '{'"},
        {"{\"w\":{}}", 0, "expected a string"},
        {"{,}", 0, "expected a string"},
        {"{\"__metadata__\":{},}", 0, "expected a string"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string, got '1'"},
        {"{\"__metadata__\":{\"a\":{}}}", 0, "expected a string, got '{'"},
        {"{\"__metadata__\":null}", 0, "expected the '{' of __metadata__"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "got it twice"},
        {"{\"__metadata__\":{\"a\":\"\",\"b\":\"\",\"a\":\"\"}}", 0, "metadata \"a\"; expected"},
        {"{\"w\":{" F32("[]", "[0,4]") "},\"w\":{" F32("[]", "[4,8]") "}}", 8, "\"w\"; expected"},
        {"{\"w\":{" F32("[]", "[0,4]") "},\"\\u0077\":{" F32("[]", "[4,8]") "}}", 8, "it twice"},
        {W("\"dtype\":\"F33\",\"shape\":[],\"data_offsets\":[0,4]"), 4, "got F33"},
        {W("\"dtype\":3,\"shape\":[],\"data_offsets\":[0,4]"), 4, "expected a string"},
        {W("\"dtype\":\"F32\",\"dtype\":\"F32\""), 4, "got dtype twice"},
        {W("\"dtype\":\"F32\",\"shape\":[]"), 4, "2 data_offsets, got fewer"},
        {W("\"dtype\":\"F32\",\"strides\":[]"), 4, "got strides"},
        {W(F32("[]", "[0]")), 4, "2 data_offsets"},
        {W(F32("[]", "[0,4,8]")), 4, "at most 2, got more"},
        {W(F32("[1,1,1,1,1,1,1,1,1]", "[0,4]")), 4, "at most 8, got more"},
        {W(F32("[-1]", "[0,4]")), 4, "number of 0 or more, got '-'"},
        {W(F32("[1.0]", "[0,4]")), 4, "got '.'"},
        {W(F32("[1e3]", "[0,4]")), 4, "got 'e'"},
        {W(F32("[01]", "[0,4]")), 4, "leading zeros"},
        {W(F32("[18446744073709551616]", "[0,4]")), 4, "expected < 2^64"},
        {W(F32("[4294967296,4294967296]", "[0,0]")), 0, "whole bytes below 2^61"},
        {W(F32("[2305843009213693952]", "[0,0]")), 0, "whole bytes below 2^61"},
        {W("\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]"), 1, "whole bytes"},
        {W(F32("[1]", "[4,0]")), 4, "begin <= end"},
        {W(F32("[1]", "[0,5]")), 5, "4 bytes apart, got 5"},
        {W(F32("[0]", "[0,4]")), 4, "0 bytes apart, got 4"},
        {W(F32("[1]", "[1,5]")), 5, "gap"},
        {W(F32("[1]", "[18446744073709551608,18446744073709551612]")), 4, "gap"},
        {"{\"a\":{" F32("[2]", "[0,8]") "},\"b\":{" F32("[1]", "[4,8]") "}}", 8, "overlap"},
        {"{\"a\":{" F32("[1]", "[0,4]") "},\"b\":{" F32("[1]", "[0,4]") "}}", 4, "overlap"},
        {"{\"a\":{" F32("[1]", "[0,4]") "},\"b\":{" F32("[1]", "[8,12]") "}}", 12, "gap"},
        {W(F32("[[1]]", "[0,4]")), 4, "got '['"},
        {"{\"\\u0000\":{}}", 0, "bad string"},
        {"{\"\\ud800\":{}}", 0, "bad string"},
        {"{\"\\udc00\":{}}", 0, "bad string"},
        {"{\"\\ud800\\u0041\":{}}", 0, "bad string"},
        {"{\"\\u12\":{}}", 0, "bad string"},
        {"{\"\\x\":{}}", 0, "bad string"},
        {"{\"a\nb\":{}}", 0, "bad string"},
        {"{\"\xff\":{}}", 0, "bad string"},
        {"{\"\xc0\x80\":{}}", 0, "bad string"},
        {"{\"\xed\xa0\x80\":{}}", 0, "bad string"},
        {"{\"\xf4\x90\x80\x80\":{}}", 0, "bad string"},
        {"{\"\xe2\x82", 0, "bad string"},
        {"{\"\\", 0, "bad string"},
    };
    StHeader h;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *error = parse_text(cases[i].json, cases[i].data, &h), *m = cases[i].message;
        CHECK(m ? strstr(error, m) && strstr(error, "; expected ") : !*error,
              "header %s: expected \"%s\", got \"%s\"", cases[i].json, m ? m : "no error", error);
    }
    CHECK(*parse("{}\0", 3, 0, &h) && *parse("{\"a\0\":{}}", 9, 0, &h), "a NUL is refused");
}

// Escapes become UTF-8 of one to four bytes.
static void test_safetensors_escapes(void)
{
    char json[] = "{\"__metadata__\":{\"\\u0041\\u00E9\\u20ac\\ud83d\\ude00\\uDBFF\\uDFFF\":"
                  "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}}";
    StHeader h;
    const char *error = st_parse(json, sizeof json - 1, 8 + sizeof json - 1, &h);
    if (!CHECK(!error && h.n_meta == 1, "escapes: %s", error ? error : "lost"))
        return;
    const char *key = "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf";
    CHECK(!strcmp(h.meta[0].key, key), "\\u: %s", h.meta[0].key);
    CHECK(!strcmp(h.meta[0].value, "\"\\/\b\f\n\r\t"), "others: %s", h.meta[0].value);
    st_header_free(&h);
}

// Every beginning of a header, every byte changed, every number replaced (case C04 and C05).
static void test_safetensors_mutated_headers(void)
{
    static const char *numbers[] = {"0", "1", "-1", "2147483647", "-2147483648", "99", "1000000",
                                    "18446744073709551615", "18446744073709551616", "1e9", ""};
    StHeader h;
    size_t n = sizeof good_json - 1;
    char json[sizeof good_json + 32];
    for (size_t k = 0; k < n - 2; k++)
        CHECK(*parse(good_json, k, 32, &h), "the first %zu bytes of a header are refused", k);
    for (size_t k = 0; k < n; k++)
        for (int c = 0; c < 256; c++) { // only sanitizers can complain here
            memcpy(json, good_json, n);
            json[k] = (char)c;
            parse(json, n, 32, &h);
        }
    for (size_t k = strlen("{\"__metadata__\":{\"k\":\"v\"},"); k < n; k++) {
        size_t digits = strspn(good_json + k, "0123456789");
        if (!digits || !strchr("[,", good_json[k - 1]))
            continue;
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
            snprintf(json, sizeof json, "%.*s%s%s", (int)k, good_json, numbers[i],
                     good_json + k + digits);
            CHECK(!strcmp(json, good_json) || *parse_text(json, 32, &h), "%s is refused", json);
        }
    }
}

// Large headers (C06): many tensors are fine; hostile headers end quickly and in bounded memory.
static void test_safetensors_large_headers(void)
{
    StHeader h;
    size_t most = (size_t)1 << 24, n, k = 0;
    char *json = (char *)alloc_zero(most + 100, 1, "json");
    for (n = sprintf(json, "{"); k < 20000; k++)
        n += (size_t)sprintf(json + n, "%s\"%zu\":{" F32("[1]", "[%zu,%zu]") "}", k ? "," : "", k,
                             4 * (20000 - k - 1), 4 * (20000 - k));
    sprintf(json + n, "}");
    CHECK(!*parse_text(json, 4 * 20000, &h), "20000 tensors, last first: %s", h.error);
    for (n = 1, k = 0; n < most; k++)
        n += (size_t)sprintf(json + n, "%s\"%zu\":{" F32("[0]", "[0,0]") "}", k ? "," : "", k);
    sprintf(json + n, "}");
    CHECK(strstr(parse_text(json, 0, &h), "at most 131072 tensors"), "%zu tensors: %s", k, h.error);
    memset(json + 1, '{', most);
    CHECK(*parse(json, most, 0, &h), "16 million braces");
    memset(json, '[', most);
    memcpy(json, "{\"w\":{\"shape\":", 14);
    CHECK(strstr(parse(json, most, 0, &h), "got '['"), "16 million brackets: %s", h.error);
    n = (size_t)sprintf(json, "{\"__metadata__\":{\"a\":\"b\"");
    while (n < most)
        n += (size_t)sprintf(json + n, ",\"a%zu\":\"\"", n);
    sprintf(json + n, "}}");
    CHECK(strstr(parse_text(json, 0, &h), "at most"), "too much metadata: %s", h.error);
    free(json);
}

// ----------------------------------------------------------------------------
// [files]

typedef struct {
    const char *path;
    const StMeta *meta;
    const StTensor *tensors;
    size_t n_meta, n;
} Save;

// save: run st_write, in a child or here.
static void save(void *arg)
{
    const Save *s = (const Save *)arg;
    st_write(s->path, s->meta, s->n_meta, s->tensors, s->n);
}

// save_floats: write n floats as the tensor "w", and the step.
static size_t save_floats(const char *path, const float *w, size_t n, int step)
{
    char text[16];
    StMeta meta[] = {{"step", text}};
    StTensor tensor = {"w", ST_F32, 1, {n}, w};
    snprintf(text, sizeof text, "%d", step);
    return st_write(path, meta, 1, &tensor, 1);
}

static void test_safetensors_round_trip(void)
{
    float f32[6] = {1, -2.5f, 3e38f, 1e-45f, 0, -0.0f}, got32[6];
    double f64[2] = {1e-300, -0.1}, got64[4];
    int32_t i32[3] = {INT32_MIN, -1, INT32_MAX}, got_i32[3];
    int64_t i64[2] = {INT64_MIN, 5};
    uint16_t bf16[3] = {0x3fc0, 0xff80, 0x7fc0}, f16[4] = {0x3c00, 0xc000, 0x0001, 0x7bff};
    unsigned char u8[7] = {0x1a, 0x0d, 0x0a, 0, 0xff, 0x1a, 0x0d}; // what text mode would change
    StTensor t[] = {{"f32", ST_F32, 2, {2, 3}, f32},
                    {"u8 \"\\\n\t\x01\xc3\xa9", ST_U8, 1, {7}, u8},
                    {"f64", ST_F64, 1, {2}, f64},
                    {"scalar", ST_F32, 0, {0}, f32 + 1},
                    {"i32", ST_I32, 3, {1, 3, 1}, i32},
                    {"i64", ST_I64, 1, {2}, i64},
                    {"none", ST_F32, 2, {0, 4}, NULL},
                    {"bf16", ST_BF16, 1, {3}, bf16},
                    {"f16", ST_F16, 1, {4}, f16},
                    {"", ST_U8, 1, {1}, u8}};
    StMeta meta[] = {{"step", "10"}, {"quote \"", "line\nbreak \\ \xf0\x9f\x98\x80"}, {"", ""}};
    size_t n = sizeof t / sizeof *t, sum = 24 + 7 + 16 + 4 + 12 + 16 + 6 + 8 + 1, i = 0;
    char *path = in_dir("round.safetensors");
    struct stat info;
    mode_t old = umask(027);
    size_t size = st_write(path, meta, 3, t, n);
    umask(old);
    StFile *f = st_open(path);
    st_verify(f);
    stat(path, &info);
    CHECK((info.st_mode & 0777) == 0640, "mode %o under umask 027", (unsigned)info.st_mode);
    CHECK(f->data % 64 == 0 && size == f->data + sum && (size_t)info.st_size == size, // C23
          "size %zu = 8 + header %zu + %zu", size, f->data - 8, sum);
    CHECK(!strcmp(st_meta(f, "step"), "10") && !strcmp(st_meta(f, ""), "") &&
              !strcmp(st_meta(f, meta[1].key), meta[1].value) && !st_meta(f, "none"),
          "metadata comes back");
    CHECK(f->header.n == n && f->header.n_meta == 4 && !st_find(f, "nowhere"), "counts");
    for (i = 0; i < n; i++) {
        const StEntry *e = st_find(f, t[i].name);
        if (!CHECK(e && e->dtype == t[i].dtype && e->ndim == t[i].ndim, "tensor %zu", i))
            continue;
        void *x = load_bytes(f, e);
        CHECK(!memcmp(e->shape, t[i].shape, (size_t)e->ndim * sizeof(size_t)), "shape of %zu", i);
        CHECK(e->begin == e->end || !memcmp(x, t[i].data, e->end - e->begin), "bytes of %zu", i);
        free(x);
    }
    st_read_real(f, st_find(f, "f32"), got32, 4);
    CHECK(!memcmp(got32, f32, sizeof f32), "F32 as float");
    st_read_real(f, st_find(f, "f64"), got64, 8);
    CHECK(!memcmp(got64, f64, sizeof f64), "F64 as double");
    st_read_real(f, st_find(f, "f64"), got32, 4);
    CHECK(got32[0] == 0 && got32[1] == -0.1f, "F64 as float");
    st_read_real(f, st_find(f, "bf16"), got64, 8);
    CHECK(got64[0] == 1.5 && got64[1] == (double)-INFINITY && got64[2] != got64[2], "BF16");
    st_read_real(f, st_find(f, "f16"), got64, 8);
    CHECK(got64[0] == 1 && got64[1] == -2 && got64[2] == ldexp(1, -24) && got64[3] == 65504, "F16");
    st_read_int32(f, st_find(f, "i32"), got_i32);
    CHECK(!memcmp(got_i32, i32, sizeof i32), "I32");
    st_close(f);
    CHECK(empty_dir("") == 1, "one file and no temporary one");
}

// A file written by the Python package safetensors 0.8.0 (numpy 2.4.6, ml_dtypes).
static void test_safetensors_golden(void)
{
    static const char json[] =
        "{\"__metadata__\":{\"\xc3\xa9\\n\":\"\xc3\xbc\\t\xf0\x9f\x98\x80\"},"
        "\"i64\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]},"
        "\"f64\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[8,24]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[24,24]},"
        "\"f32\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[24,32]},"
        "\"i32\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[32,40]},"
        "\"bf16\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[40,44]},"
        "\"f16\":{\"dtype\":\"F16\",\"shape\":[5],\"data_offsets\":[44,54]},"
        "\"u8 \\\"q\\\"\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[54,57]}}   ";
    static const char hex[] = "feffffffffffffff59f3f8c21f6ea5019a9999999999b9bf0000003f000050c007"
                              "000000ffffffffc03f80ff003c00c00100ff7b00fc1a0d0a";
    unsigned char file[600], *data = file + sizeof json + 7;
    size_t length = sizeof json - 1;
    double x[5];
    int32_t i[2];
    memcpy(file, &length, 8);
    memcpy(file + 8, json, length);
    for (int k = 0; k < 57; k++)
        sscanf(hex + 2 * k, "%2hhx", data + k);
    CHECK(length == 504, "length %zu", length);
    put_file(in_dir("golden"), file, 8 + length + 57);
    StFile *f = st_open(in_dir("golden"));
    st_verify(f); // it has no checksum
    CHECK(f->header.n == 8 && st_find(f, "u8 \"q\"") && st_find(f, "empty"), "8 tensors");
    CHECK(!strcmp(st_meta(f, "\xc3\xa9\n"), "\xc3\xbc\t\xf0\x9f\x98\x80"), "metadata");
    st_read_real(f, st_find(f, "f64"), x, 8);
    CHECK(x[0] == 1e-300 && x[1] == -0.1, "F64");
    st_read_real(f, st_find(f, "f32"), x, 8);
    CHECK(x[0] == 0.5 && x[1] == -3.25, "F32");
    st_read_real(f, st_find(f, "bf16"), x, 8);
    CHECK(x[0] == 1.5 && x[1] == (double)-INFINITY, "BF16");
    st_read_real(f, st_find(f, "f16"), x, 8);
    CHECK(x[0] == 1 && x[2] == ldexp(1, -24) && x[3] == 65504 && x[4] == (double)-INFINITY, "F16");
    st_read_int32(f, st_find(f, "i32"), i);
    CHECK(i[0] == 7 && i[1] == -1, "I32");
    st_close(f);
    empty_dir("");
}

// C01: files cut short and extended name both sizes.
static void test_safetensors_truncation(void)
{
    float w[100] = {1, 2, 3};
    char *path = in_dir("cut"), message[128];
    save_floats(path, w, 100, 1);
    size_t size, length;
    unsigned char *good = get_file(path, &size);
    memcpy(&length, good, 8);
    size_t cuts[] = {0, 1, 3, 7, 8, 9, 7 + length, 8 + length, 9 + length, size / 2, size - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        put_file(path, good, cuts[i]);
        if (cuts[i] < 8)
            snprintf(message, 128, "expected at least 8 bytes, got %zu", cuts[i]);
        else if (cuts[i] < 8 + length)
            snprintf(message, 128, "expected at least %zu bytes (8 + header %zu), got %zu",
                     8 + length, length, cuts[i]);
        else
            snprintf(message, 128, "expected %zu bytes (8 + header %zu + data 400), got %zu", size,
                     length, cuts[i]);
        expect_die(open_file, path, EXIT_DATA, message);
    }
    unsigned char *longer = (unsigned char *)alloc_zero(size + 1, 1, "longer");
    memcpy(longer, good, size);
    put_file(path, longer, size + 1);
    snprintf(message, 128, "expected %zu bytes (8 + header %zu + data 400), got %zu", size, length,
             size + 1);
    expect_die(open_file, path, EXIT_DATA, message);
    put_file(path, good, size);
    CHECK(run_child(verify_file, path).code == 0, "the whole file opens");
    free(good);
    free(longer);
    empty_dir("");
}

// C02, C03: whatever else a file is, the message says so.
static void test_safetensors_other_files(void)
{
    static const struct {
        const char *bytes;
        size_t n;
        const char *message;
    } cases[] = {
        {"", 0, "the file is empty"},
        {"\x88\xd8\x34\x01\x01\0\0\0\x09\0\0\0", 12, "file of GPT-2 tokens"},
        {"\xc8\xd7\x34\x01\x01\0\0\0\x51\xc4\0\0", 12, "GPT-2 tokenizer"},
        {"\0\0\0\0\0\0\0\x02{}", 10, "big-endian"},
        {"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16, "PNG"},
        {"\x1f\x8b\x08\0\0\0\0\0\0\x03\0\0", 12, "gzip"},
        {"PK\x03\x04\0\0\x08\x08\0\0\0\0", 12, "zip archive, perhaps a PyTorch"},
        {"Once upon a time there was", 26, "plain text"},
        {"version https://git-lfs.github.com/spec/v1\n", 43, "Git LFS"},
        {"\x02\0\0\0\0\0\0\0[]", 10, "damaged"},
        {"\x02\0\0\0\0\0\0\0{\xff", 10, "damaged"},
    };
    char *path = in_dir("other");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_file(path, cases[i].bytes, cases[i].n);
        expect_die(open_file, path, EXIT_DATA, cases[i].message);
        expect_die(open_file, path, EXIT_DATA, path);
    }
    expect_die(open_file, dir, EXIT_DATA, "got a directory");
    expect_die(open_file, in_dir("absent"), EXIT_DATA, "got: No such file or directory");
    remove(path);
    if (!CHECK(mkfifo(path, 0600) == 0, "mkfifo: %s", strerror(errno)))
        return;
    expect_die(open_file, path, EXIT_DATA, "special file");
    empty_dir("");
}

// C04: a header length that lies costs no memory and reads nothing outside.
static void test_safetensors_lengths(void)
{
    size_t lengths[] = {0, 1, 3, 5, 0x7fffffff, 0x80000000, 100000000, 100000001, (size_t)1 << 62,
                        (size_t)1 << 63, SIZE_MAX - 8, SIZE_MAX - 7, SIZE_MAX};
    char *path = in_dir("length");
    Outcome base = run_child(open_file, in_dir("absent"));
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put_header(path, lengths[i], "{}  ", 0);
        if (lengths[i] == 3) {
            expect_die(open_file, path, EXIT_DATA, "file is too long; expected 11 bytes");
            continue;
        }
        expect_die(open_file, path, EXIT_DATA, lengths[i] == 1 ? "got its end" : "expected");
        long peak = run_child(open_file, path).peak_kib - base.peak_kib;
        CHECK(peak < 64 << 10, "length %zu: %ld KiB", lengths[i], peak);
    }
    put_header(path, 100000001, "{}", 0); // in a file that is long enough, but sparse
    CHECK(truncate(path, 200000000) == 0, "truncate: %s", strerror(errno));
    expect_die(open_file, path, EXIT_DATA, "expected 1 to 100000000, got 100000001");
    size_t n = 1, most = (size_t)1 << 24;
    char *json = (char *)alloc_zero(most + 64, 1, "json");
    json[0] = '{';
    for (size_t k = 0; n < most && k < 131072; k++)
        n += (size_t)sprintf(json + n, "%s\"%zu\":{" F32("[0]", "[0,0]") "}", k ? "," : "", k);
    strcpy(json + n++, "}");
    put_header(path, n, json, 0);
    free(json);
    Outcome out = run_child(open_file, path);
    long peak = (out.peak_kib - base.peak_kib) * 1024 - (long)n;
    CHECK(out.code == 0 && peak < 64 << 20, "131072 tensors: code %d, file + %ld bytes: %s",
          out.code, peak, out.text);
    empty_dir("");
}

static void test_safetensors_checksum(void)
{
    unsigned char bytes[1003];
    char whole[17], parts[17];
    for (int i = 0; i < 1003; i++)
        bytes[i] = (unsigned char)(i * i >> 3);
    for (size_t n = 0; n < 1003; n += n < 30 ? 1 : 89) { // the same, however it is cut into pieces
        StSum a = {0, 0, {0}, 0}, b = a;
        st_sum_add(&a, bytes, n);
        for (size_t k = 0, step = 0; k < n; k += step) {
            step = (k * 7 + n) % 23;
            step = step < n - k ? step + !step : n - k;
            st_sum_add(&b, bytes + k, step);
        }
        st_sum_hex(&a, whole);
        st_sum_hex(&b, parts);
        CHECK(!strcmp(whole, parts), "checksum of %zu bytes: %s and %s", n, whole, parts);
    }
    StSum a = {0, 0, {0}, 0}; // from numpy, by the formula in safetensors.h
    st_sum_add(&a, bytes, 1003);
    st_sum_hex(&a, whole);
    CHECK(!strcmp(whole, "db4d9de81458fa90"), "checksum %s", whole);
    for (int i = 7; i < 1000; i += 8) { // the signs of two numbers, which weak sums do not see
        StSum b = {0, 0, {0}, 0};
        bytes[i] ^= 128;
        bytes[1007 - i - 1] ^= 128;
        st_sum_add(&b, bytes, 1003);
        bytes[i] ^= 128;
        bytes[1007 - i - 1] ^= 128;
        st_sum_hex(&b, parts);
        CHECK(i == 1006 - i || strcmp(whole, parts), "two bits at %d", i);
    }
    float w[101] = {1, 2, 3};
    char *path = in_dir("sum");
    save_floats(path, w, 101, 1);
    size_t size;
    unsigned char *good = get_file(path, &size);
    for (size_t back = 1; back <= 404; back += 31) {
        good[size - back] ^= 1;
        put_file(path, good, size);
        good[size - back] ^= 1;
        expect_die(verify_file, path, EXIT_DATA, "does not match its checksum; expected ");
        CHECK(run_child(open_file, path).code == 0, "without st_verify it opens");
    }
    free(good);
    empty_dir("");
}

// What reading refuses.
static void read_wrong_real(void *path)
{
    StFile *f = st_open((const char *)path);
    double x[4];
    st_read_real(f, st_find(f, "i"), x, 8);
}

static void read_wrong_int(void *path)
{
    StFile *f = st_open((const char *)path);
    int32_t x[8];
    st_read_int32(f, st_find(f, "w"), x);
}

static void read_shrunk(void *path)
{
    StFile *f = st_open((const char *)path);
    float x[6];
    if (truncate((const char *)path, (off_t)f->size - 20))
        die(EXIT_FAIL, "truncate");
    st_read_real(f, st_find(f, "w"), x, 4);
}

static void test_safetensors_reading(void)
{
    char *path = in_dir("read");
    put_header(path, sizeof good_json - 1, good_json, 32);
    expect_die(read_wrong_real, path, EXIT_DATA, "tensor i; expected dtype F32, F64");
    expect_die(read_wrong_int, path, EXIT_DATA, "tensor w; expected dtype I32, got F32");
    expect_die(read_shrunk, path, EXIT_DATA, "got: the end");
    empty_dir("");
}

// Saves that must fail, with the older file intact and no temporary one left.
static void save_limited(void *arg) // as under `trap '' XFSZ; ulimit -f 8`
{
    struct rlimit limit = {8192, 8192};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    save(arg);
}

// expect_failed_save: fn(s) dies so, leaves the bytes at s->path as they are and no other file.
static void expect_failed_save(void (*fn)(void *), Save *s, const char *message)
{
    size_t n, m;
    unsigned char *before = get_file(in_dir("save"), &n);
    expect_die(fn, s, EXIT_DATA, message);
    expect_die(fn, s, EXIT_DATA, s->path);
    unsigned char *after = get_file(in_dir("save"), &m);
    CHECK(n == m && !memcmp(before, after, n), "%s: the older file is untouched", message);
    CHECK(empty_dir(".tmp-") == 0, "%s: no temporary file", message);
    free(before);
    free(after);
}

static void test_safetensors_failed_saves(void) // C18, C19, C21
{
    static float w[10000], old[4] = {1, 2, 3, 4};
    StTensor t[] = {{"w", ST_F32, 1, {10000}, w}, {"v", ST_F32, 1, {4}, w}};
    StMeta meta[] = {{"step", "2"}, {"x", "y"}};
    char path[2048], other[2048];
    Save s = {path, meta, t, 2, 2};
    strcpy(path, in_dir("save"));
    save_floats(path, old, 4, 1);
    expect_failed_save(save_limited, &s, "write: File too large");
    t[1].name = "w";
    expect_failed_save(save, &s, "tensor \"w\"; expected once");
    t[1].name = "__metadata__";
    expect_failed_save(save, &s, "cannot save");
    t[1].name = "\xff";
    expect_failed_save(save, &s, "UTF-8");
    t[1].name = "v";
    t[1].ndim = 9;
    expect_failed_save(save, &s, "dimensions");
    t[1].ndim = 1;
    meta[1].key = "checksum";
    expect_failed_save(save, &s, "metadata \"checksum\"; expected once");
    meta[1].key = "x";
    s.path = other;
    strcpy(other, in_dir("absent/save"));
    expect_failed_save(save, &s, "No such file or directory");
    strcpy(other, in_dir("save/save")); // a file as a directory
    expect_failed_save(save, &s, "Not a directory");
    strcpy(other, dir);
    expect_failed_save(save, &s, "got a directory");
    strcpy(other, "/dev/null"); // root could replace it
    expect_failed_save(save, &s, "got a special file");
    if (geteuid() != 0) {
        strcpy(other, in_dir("save2"));
        chmod(dir, 0500);
        expect_failed_save(save, &s, "Permission denied");
        chmod(dir, 0700);
    }
    memset(other, 'x', 300);
    other[300] = 0;
    expect_failed_save(save, &s, "File name too long");
    s.path = path;
    CHECK(run_child(save, &s).code == 0 && run_child(verify_file, path).code == 0, "then it works");
    empty_dir("");
}

// save_often: 30 saves in a row.
static void save_often(void *path)
{
    float w[1000];
    for (int i = 0; i < 30; i++) {
        for (int k = 0; k < 1000; k++)
            w[k] = (float)(getpid() + i);
        save_floats((const char *)path, w, 1000, i);
    }
}

static void test_safetensors_two_writers(void) // C21
{
    char *path = in_dir("twice");
    put_file(in_dir("twice.tmp-AAAAAA"), "stale", 5);
    pid_t pid = fork();
    if (pid == 0) {
        save_often(path);
        _exit(0);
    }
    Outcome out = run_child(save_often, path);
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0 && out.code == 0, "both can save");
    CHECK(run_child(verify_file, path).code == 0, "the file is one of theirs");
    CHECK(empty_dir("") == 2, "one file, one stale temporary one");
}

// save_forever: save 10 MB with a rising step until killed.
static void save_forever(void *path)
{
    const size_t n = 2500000;
    float *w = (float *)alloc_zero(n, 4, "w");
    StFile *f = st_open((const char *)path);
    int step = (int)strtol(st_meta(f, "step"), NULL, 10);
    st_close(f);
    for (;;) {
        step++;
        for (size_t i = 0; i < n; i += 1000)
            w[i] = (float)step;
        save_floats((const char *)path, w, n, step);
    }
}

// print_step: verify a file and print its step.
static void print_step(void *path)
{
    StFile *f = st_open((const char *)path);
    st_verify(f);
    printf("step %s\n", st_meta(f, "step"));
    st_close(f);
}

static void test_safetensors_killed_saves(void) // G05
{
    char path[2048];
    float w[4] = {0};
    int last = 0, stale = 0;
    uint32_t random = 12345;
    strcpy(path, in_dir("killed"));
    save_floats(path, w, 4, 0);
    for (int k = 0; k < 50; k++) {
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            save_forever(path);
            _exit(0);
        }
        random = random * 1664525u + 1013904223u;
        usleep((random >> 8) % 80000);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        Outcome out = run_child(print_step, path);
        int step = -1;
        sscanf(out.text, "step %d", &step);
        CHECK(out.code == 0 && step >= last, "kill %d: step %d after %d: %s", k, step, last,
              out.text);
        last = step;
        stale += empty_dir(".tmp-");
    }
    CHECK(stale >= 10, "expected 10 of 50 kills during a save, got %d", stale);
    CHECK(last >= 1, "expected saves between the kills, got %d", last);
    printf("50 kills: %d during a save, %d saves completed\n", stale, last);
    empty_dir("");
}

// ----------------------------------------------------------------------------
// [diff]

// run_diff: dev/diff with the words of `arg` as its arguments, in a child.
static void run_diff(void *arg)
{
    char *words[10] = {(char *)"diff"};
    int n = 1;
    for (char *w = strtok((char *)arg, " "); w && n < 9; w = strtok(NULL, " "))
        words[n++] = w;
    if (chdir(dir))
        exit(99);
    optind = 1;
    exit(diff_main(n, words));
}

// expect_diff: one check that dev/diff with these arguments ends with this code and prints that.
static void expect_diff(const char *args, int code, const char *substring)
{
    char copy[256];
    snprintf(copy, sizeof copy, "%s", args);
    Outcome out = run_child(run_diff, copy);
    CHECK(out.code == code && strstr(out.text, substring),
          "diff %s: expected code %d and \"%s\", got %d and\n%s", args, code, substring, out.code,
          out.text);
}

// test_diff_losses: losses near 0 may differ by what an fp32 number as large as the logits leaves,
// not by a sign, a position that was left out, or more.
static void test_diff_losses(void)
{
    float logits[4] = {8, -2, 0, -9}, losses[4] = {1e-2f, 2e-3f, 0, 3e-3f}, other[4];
    StTensor a[] = {{"acts.logits", ST_F32, 1, {4}, logits},
                    {"acts.losses", ST_F32, 1, {4}, losses}};
    StTensor b[] = {a[0], {"acts.losses", ST_F32, 1, {4}, other}};
    st_write(in_dir("a"), NULL, 0, a, 2);
    for (int i = 0; i < 4; i++)
        other[i] = losses[i] + 9e-7f; // 2^-23 times 9 is 1.07e-6, 1e-5 of losses 1e-7
    st_write(in_dir("b"), NULL, 0, b, 2);
    expect_diff("a b", 0, "2 tensors agree");
    expect_diff("b a", 0, "2 tensors agree");
    for (int i = 0; i < 4; i++)
        other[i] = losses[i] + 1.3e-6f;
    st_write(in_dir("b"), NULL, 0, b, 2);
    expect_diff("a b", 1, "1 do not");
    memcpy(other, losses, sizeof other);
    other[1] *= -1;
    st_write(in_dir("b"), NULL, 0, b, 2);
    expect_diff("a b", 1, "[1]              DIFFERS\n");
    other[1] = losses[1];
    other[3] = 0;
    st_write(in_dir("b"), NULL, 0, b, 2);
    expect_diff("a b", 1, "[3]              DIFFERS\n");
    b[0].name = "acts.other"; // no logits: nothing is allowed for
    a[0].name = "acts.other";
    for (int i = 0; i < 4; i++)
        other[i] = losses[i] + 9e-7f;
    st_write(in_dir("a"), NULL, 0, a, 2);
    st_write(in_dir("b"), NULL, 0, b, 2);
    expect_diff("a b", 1, "1 do not");
}

static void test_diff(void)
{
    float x[6] = {1, 2, 3, 4, 5, 6}, big[2] = {3, 4}, noise[2] = {1e-8f, 2e-8f};
    int32_t i[4] = {1, 2, 3, 4};
    double x64[6] = {1, 2, 3, 4, 5, 6};
    StTensor a[] = {{"acts.x", ST_F32, 2, {2, 3}, x},
                    {"inputs", ST_I32, 2, {2, 2}, i},
                    {"grads.big", ST_F32, 1, {2}, big},
                    {"grads.noise", ST_F32, 1, {2}, noise},
                    {"only.a", ST_F32, 1, {6}, x},
                    {"none", ST_F32, 1, {0}, NULL}};
    StTensor b[6];
    memcpy(b, a, sizeof a);
    st_write(in_dir("a"), NULL, 0, a, 6);
    b[4].name = "only.b";
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 0, "5 tensors agree, 0 do not, 2 in one file only\n");
    expect_diff("a b", 0, "only in b\n");
    expect_diff("a a", 0, "6 tensors agree, 0 do not, 0 in one file only\n");
    b[0].dtype = ST_F64;
    b[0].data = x64;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 0, "5 tensors agree");
    x64[4] *= 1 + 5e-3; // between the bounds for fp32 and bf16
    noise[1] = 1.1e-8f;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 1, "[1,1]            DIFFERS\n");
    expect_diff("a b", 1, "4 tensors agree, 1 do not, 2 in one file only\n");
    expect_diff("--bf16 a b", 0, "5 tensors agree");
    expect_diff("a b --forward=0.01", 0, "5 tensors agree");
    expect_diff("b a --bf16 --forward 1e-3", 1, "1 do not");
    b[0] = a[0];
    big[1] *= 1.001f;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 1, "DIFFERS");
    expect_diff("a b --grad 0.01", 0, "5 tensors agree");
    big[1] = NAN;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b --grad 1e9", 1, "[1]              DIFFERS: NaN or Inf\n");
    expect_diff("b a --grad 1e9", 1, "NaN or Inf");
    big[1] = 4;
    i[2]++;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b --forward 1e9", 1, "[1,0]            DIFFERS\n");
    b[1].shape[0] = 1;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 1, "DIFFERS: shape [1,2]");
    b[1] = a[0];
    b[1].name = "inputs";
    b[1].shape[1] = 2;
    b[1].shape[0] = 2;
    st_write(in_dir("b"), NULL, 0, b, 6);
    expect_diff("a b", 1, "DIFFERS: dtype I32 and F32");
    st_write(in_dir("b"), NULL, 0, b + 4, 1);
    expect_diff("a b", 1, "0 tensors agree, 0 do not, 7 in one file only\n");
    test_diff_losses();
    expect_diff("a absent", 3, "error: absent: cannot open");
    expect_diff("a .", 3, "got a directory");
    expect_diff("a", 2, "expected two files, got 1");
    expect_diff("a b --froward 1", 2, "--froward: unknown option");
    expect_diff("a b --grad", 2, "--grad: expected a value");
    expect_diff("a b --grad 1x", 2, "expected a number >= 0, got 1x");
    expect_diff("a b --grad nan", 2, "got nan");
    expect_diff("--help", 0, "usage: diff");
    empty_dir("");
}

int main(void)
{
    make_dir();
    test_safetensors_refused_headers();
    test_safetensors_escapes();
    test_safetensors_mutated_headers();
    test_safetensors_large_headers();
    test_safetensors_round_trip();
    test_safetensors_golden();
    test_safetensors_truncation();
    test_safetensors_other_files();
    test_safetensors_lengths();
    test_safetensors_checksum();
    test_safetensors_reading();
    test_safetensors_failed_saves();
    test_safetensors_two_writers();
    test_safetensors_killed_saves();
    test_diff();
    return test_report();
}
