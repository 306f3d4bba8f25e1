// fuzz_safetensors.c: throw bytes at st_parse, and check that what it accepts is true.
//
//     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. dev/fuzz_safetensors.c -o build/fuzz
//     build/fuzz -max_total_time=120
// Without libFuzzer, run the inputs it found:
//     gcc -g -fsanitize=address,undefined -DSTANDALONE -I. dev/fuzz_safetensors.c -o build/fuzz
//     build/fuzz crash-...
//
// An input is two bytes, the size of the pretended data, and then the header's JSON.
#include "../util/safetensors_parse.h"

// require: abort, which the fuzzer reports with the input, unless the condition holds.
#define require(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #cond);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

// check_string: s lies in json (length) with its closing NUL.
static void check_string(const char *s, const char *json, size_t length)
{
    require(s >= json && s < json + length);
    require(memchr(s, 0, (size_t)(json + length - s)));
}

// check_header: every promise of st_parse about an accepted header.
static void check_header(const StHeader *h, const char *json, size_t length, size_t data)
{
    size_t at = 0, bytes = 0;
    require(h->n <= ST_MAX_TENSORS && h->n_meta <= ST_MAX_TENSORS);
    for (size_t i = 0; i < h->n; i++) {
        const StEntry *e = &h->entries[i];
        check_string(e->name, json, length);
        require((int)e->dtype >= 0 && e->dtype < ST_N_DTYPES && e->ndim >= 0);
        require(e->ndim <= ST_MAX_DIMS && e->begin == at && e->end >= at);
        require(st_bytes(e->dtype, e->ndim, e->shape, &bytes) && bytes == e->end - e->begin);
        require(st_count(e) * st_dtype(e->dtype)->bits == 8 * bytes);
        require(i == 0 || strcmp(h->by_name[i - 1]->name, h->by_name[i]->name) < 0);
        at = e->end;
    }
    require(at == data);
    for (size_t i = 0; i < h->n_meta; i++) {
        check_string(h->meta[i].key, json, length);
        check_string(h->meta[i].value, json, length);
        require(i == 0 || strcmp(h->meta[i - 1].key, h->meta[i].key) < 0);
    }
}

#ifdef __cplusplus
extern "C"
#endif
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

// LLVMFuzzerTestOneInput: one input. Its JSON is copied to a block of exactly its size, so that
// AddressSanitizer sees any step outside, and the leak checker anything not freed.
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size < 2)
        return 0;
    size_t data = input[0] | (size_t)input[1] << 8, length = size - 2;
    char *json = (char *)malloc(length ? length : 1);
    StHeader h;
    if (!json)
        return 0;
    memcpy(json, input + 2, length);
    const char *error = st_parse(json, length, 8 + length + data, &h);
    if (!error) {
        check_header(&h, json, length, data);
        st_header_free(&h);
    } else {
        require(error == h.error && strlen(error) > 10 && strstr(error, "; expected "));
        require(!h.entries && !h.by_name && !h.meta);
    }
    free(json);
    return 0;
}

#ifdef STANDALONE
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        size_t most = (size_t)1 << 27;
        uint8_t *input = (uint8_t *)alloc_zero(most, 1, argv[i]);
        if (!f)
            die(EXIT_DATA, "%s: cannot open: %s", argv[i], strerror(errno));
        LLVMFuzzerTestOneInput(input, fread(input, 1, most, f));
        fclose(f);
        free(input);
    }
    printf("%d inputs done\n", argc - 1);
    return 0;
}
#endif
