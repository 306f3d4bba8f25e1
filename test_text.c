// test_text.c: tests of data/text.h and data/sampler.h: files that are not what they should be,
// windows and their order, what tokens say, and which token a sampler takes.
//
//     gcc -O2 -fopenmp -Wall -Wextra test_text.c -o build/test_text -lm && build/test_text
//
// [files]    bytes, ASCII, token files, tokenizers: what is read and what is refused
// [windows]  every target once an epoch, permutations, the held-out part, 5 GiB
// [words]    encoding of a prompt, printing
// [sampler]  probabilities, ties, coins at the ends
// A name like C13 is a row of the list of cases that this project keeps: failures that users of
// other programs have reported.
#include "dev/testing.h" // first: it asks for GNU extensions
#include "data/tasks.h"

// text_of: options as the command line leaves them.
static Text text_of(const char *path, int vocab, int context)
{
    Text t;
    memset(&t, 0, sizeof t);
    t.path = path;
    t.vocab = vocab;
    t.context = context;
    t.held_out = 0.1;
    return t;
}

typedef struct {
    Text text;
    size_t B;
    int training;
} Opening;

// open_text: text_open in a child.
static void open_text(void *arg)
{
    Opening *o = (Opening *)arg;
    text_open(&o->text, o->B, o->training);
}

// quietly: text_open, its lines thrown away.
static void quietly(Text *t, size_t B)
{
    fflush(stdout);
    int out = dup(1), null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    text_open(t, B, 1);
    fflush(stdout);
    dup2(out, 1);
    close(out);
    close(null);
}

// refused: one check that text_open of a file of n bytes (NULL: of what lies there) dies so.
static void refused(const void *data, size_t n, int vocab, const char *substring)
{
    char *path = in_dir("refused");
    if (data)
        put_file(path, data, n);
    Opening o = {text_of(path, vocab, 4), 2, 1};
    expect_die(open_text, &o, EXIT_DATA, substring);
}

// token_file: a file of n tokens in `data` (room for 1024 + 2 n bytes); returns its size.
static size_t token_file(unsigned char *data, const int *tokens, size_t n)
{
    const uint32_t header[] = {GPT2_MAGIC, 1, (uint32_t)n};
    memset(data, 0, GPT2_HEADER);
    memcpy(data, header, sizeof header); // little-endian machines only, as util/safetensors.h asks
    for (size_t i = 0; i < n; i++) {
        data[GPT2_HEADER + 2 * i] = (unsigned char)tokens[i];
        data[GPT2_HEADER + 2 * i + 1] = (unsigned char)(tokens[i] >> 8);
    }
    return GPT2_HEADER + 2 * n;
}

// ------------------------------------------------------------------------------------------------
// [files]

// test_files_plain: what is no text (C11, C14, G06), and the smallest that is enough.
static void test_files_plain(void)
{
    static const char abc[] = "abcdefghijklmnopqrstuvwxyz";
    char got[64];
    static char path[2048]; // what in_dir gives does not last
    snprintf(path, sizeof path, "%s", in_dir("absent"));
    Opening absent = {text_of(path, TEXT_BYTES, 4), 2, 1};
    refused("", 0, TEXT_BYTES, "got an empty file");
    refused("", 0, TEXT_GPT2, "got an empty file");
    refused("\xef\xbb\xbf", 3, TEXT_BYTES, "need 9 tokens"); // a byte order mark only
    refused(abc, 8, TEXT_BYTES,
            "need 9 tokens for a batch (--batch-size 2 x --context 4 + 1), have 8 to");
    refused(abc, 9, TEXT_BYTES, "held-out"); // 9 to train on, 0 held out
    expect_die(open_text, &absent, EXIT_DATA, "absent: cannot read: No such file");
    absent.text.path = dir;
    expect_die(open_text, &absent, EXIT_DATA, "expected a file, got a directory");
    mkfifo(in_dir("fifo"), 0600);
    absent.text.path = in_dir("fifo");
    expect_die(open_text, &absent, EXIT_DATA, "got something else of that name");
    absent.text.path = NULL;
    expect_die(open_text, &absent, EXIT_USAGE, "needs --text FILE");
    absent.text.val_path = in_dir("refused");
    absent.training = 0;
    put_file(in_dir("refused"), abc, 4);
    expect_die(open_text, &absent, EXIT_DATA, "need 5 tokens to evaluate");
    put_file(in_dir("closed"), abc, 20);
    chmod(in_dir("closed"), 0);
    absent.text.val_path = in_dir("closed");
    if (getuid())
        expect_die(open_text, &absent, EXIT_DATA, "cannot read: Permission denied");
    for (size_t at = 0; at < 4; at++) { // C3 A9, in ASCII, at the first byte and at later ones
        char text[64] = "";
        snprintf(text, sizeof text, "%.*s\xc3\xa9 and more of the text", (int)(at * 3), abc);
        snprintf(got, sizeof got, "the byte at offset %zu is 0xC3", at * 3);
        refused(text, strlen(text), TEXT_ASCII, got);
    }
    refused("\xef\xbb\xbf" "abcdefghijklmnop\x80", 20, TEXT_ASCII, "offset 19 is 0x80");
    refused("\xff\xfe" "a\0b\0c\0d\0e\0f\0g\0h\0", 18, TEXT_ASCII, "offset 0 is 0xFF"); // UTF-16
}

// test_files_bytes: CR, LF and 0x1A are tokens like any other, a byte order mark is none, and every
// byte counts (C15, C16).
static void test_files_bytes(void)
{
    static const char *const texts[] = {
        "one\ntwo\nthree\nfour\n", "one\r\ntwo\r\nthree\r\nfour\r\n",
        "one\rtwo\rthree\rfour\r", "\x1a\r\n\xff\x80 is no end\x1a"};
    for (int k = 0; k < 8; k++) {
        char data[64] = "\xef\xbb\xbf";
        size_t mark = k < 4 ? 0 : 3, n = strlen(texts[k % 4]), different = 0;
        memcpy(data + mark, texts[k % 4], n);
        put_file(in_dir("text"), data, mark + n);
        TextFile f = text_file("--text", in_dir("text"), TEXT_BYTES);
        CHECK(f.n == n, "text %d: %zu tokens, expected %zu", k, f.n, n);
        for (size_t i = 0; i < f.n; i++)
            different += text_token(&f, i) != (unsigned char)texts[k % 4][i];
        CHECK(!different, "text %d: %zu bytes differ", k, different);
        munmap((void *)f.map, f.bytes);
    }
}

// test_files_tokens: token files that lie (C02, C03, C04, C07, C09, C11).
static void test_files_tokens(void)
{
    enum { N = 40 };
    static unsigned char data[GPT2_HEADER + 4 * N], bad[GPT2_HEADER + 4 * N];
    const uint32_t counts[] = {0, UINT32_MAX, INT32_MAX, 0x80000000u, N - 1, N + 1};
    int tokens[N];
    for (int i = 0; i < N; i++)
        tokens[i] = i % 2 ? 50256 - i : i * 257;
    size_t size = token_file(data, tokens, N);
    put_file(in_dir("tokens"), data, size);
    TextFile f = text_file("--text", in_dir("tokens"), TEXT_GPT2);
    size_t different = 0;
    for (size_t i = 0; i < N; i++)
        different += text_token(&f, i) != tokens[i];
    CHECK(f.n == N && !different, "%zu tokens, %zu differ", f.n, different);
    munmap((void *)f.map, f.bytes);
    refused(data, size, TEXT_BYTES, "expected plain text, got a file of tokens");
    refused(data, size, TEXT_ASCII, "expected plain text, got a file of tokens");
    refused("some plain text, not encoded", 28, TEXT_GPT2, "got plain text");
    refused("\x40\x01\0\0\0\0\0\0{\"a\":1}", 15, TEXT_GPT2, "got a safetensors file");
    const size_t cuts[] = {4, 100, GPT2_HEADER - 1};
    for (int k = 0; k < 3; k++)
        refused(data, cuts[k], TEXT_GPT2, "expected a header of 1024 bytes");
    refused(data, size - 1, TEXT_GPT2, "says 40 tokens, which take 1104 bytes; got 1103");
    refused(data, size + 1, TEXT_GPT2, "got 1105 bytes");
    refused(data, GPT2_HEADER, TEXT_GPT2, "got 1024 bytes");
    refused(data, size + 2 * N, TEXT_GPT2, "got 1184 bytes"); // as tokens of 4 bytes are stored
    for (int k = 0; k < 6; k++) {
        memcpy(bad, data, size);
        memcpy(bad + 8, &counts[k], 4);
        refused(bad, size, TEXT_GPT2, "its header says");
    }
    memset(bad + 8, 0, 4);
    refused(bad, GPT2_HEADER, TEXT_GPT2, "its header says 0");
    for (int version = 0; version < 4; version++) {
        char got[64];
        memcpy(bad, data, size);
        bad[4] = (unsigned char)version;
        snprintf(got, sizeof got, "got version %d", version);
        if (version != 1)
            refused(bad, size, TEXT_GPT2, got);
    }
    const uint32_t table = GPT2_TABLE_MAGIC;
    memcpy(bad, &table, 4);
    refused(bad, size, TEXT_GPT2, "got a tokenizer");
    for (int i = 0; i < 4; i++)
        bad[i] = data[3 - i];
    refused(bad, size, TEXT_GPT2, "got one in big-endian byte order");
    const int wrong[] = {50257, 65535};
    for (int k = 0; k < 2; k++) { // at the last position and at the first
        char got[64];
        memcpy(bad, tokens, sizeof tokens);
        int *some = (int *)(void *)bad;
        some[k ? 0 : N - 1] = wrong[k];
        static unsigned char file[GPT2_HEADER + 2 * N];
        token_file(file, some, N);
        snprintf(got, sizeof got, "token %d is %d; expected one from 0 to 50256", k ? 0 : N - 1,
                 wrong[k]);
        refused(file, size, TEXT_GPT2, got);
    }
}

// table_file: a table of V tokens, a letter more each after the bytes; returns its size. `data` has
// room for 1024 + 8 V bytes.
static size_t table_file(unsigned char *data, uint32_t V)
{
    const uint32_t header[] = {GPT2_TABLE_MAGIC, 2, V, V - 1};
    size_t n = GPT2_HEADER;
    memset(data, 0, GPT2_HEADER);
    memcpy(data, header, sizeof header);
    for (uint32_t i = 0; i < V; i++) {
        char word[8] = {(char)i};
        int length = i < 256 ? 1 : snprintf(word, sizeof word, "<%x>", i);
        data[n++] = (unsigned char)length;
        memcpy(data + n, word, (size_t)length);
        n += (size_t)length;
    }
    return n;
}

// open_table: text_table of the file "table" for GPT2_V tokens, in a child.
static void open_table(void *unused)
{
    TextTable table;
    (void)unused;
    text_table(&table, in_dir("table"), GPT2_V);
}

// test_files_table: tokenizers that lie (C02, C04, C10).
static void test_files_table(void)
{
    static unsigned char data[GPT2_HEADER + 8 * GPT2_V];
    const size_t size = table_file(data, GPT2_V);
    TextTable table;
    put_file(in_dir("table"), data, size);
    text_table(&table, in_dir("table"), GPT2_V);
    CHECK(table.end == GPT2_V - 1 && table.at[256] == 256 && table.at[257] == 261 &&
              !memcmp(table.bytes + 256, "<100>", 5), "tokens of a table");
    free(table.bytes);
    free(table.at);
    const size_t cuts[] = {GPT2_HEADER, GPT2_HEADER + 1, GPT2_HEADER + 300, size / 2, size - 1};
    for (int k = 0; k < 5; k++) {
        put_file(in_dir("table"), data, cuts[k]);
        expect_die(open_table, NULL, EXIT_DATA, "it ends within token");
    }
    put_file(in_dir("table"), data, 1000);
    expect_die(open_table, NULL, EXIT_DATA, "expected a tokenizer");
    put_file(in_dir("table"), data, size + 1);
    expect_die(open_table, NULL, EXIT_DATA, "bytes, got");
    data[GPT2_HEADER] = 0;
    put_file(in_dir("table"), data, size);
    expect_die(open_table, NULL, EXIT_DATA, "it ends within token 0");
    put_file(in_dir("table"), data, table_file(data, 300));
    expect_die(open_table, NULL, EXIT_DATA, "expected 50257 tokens, got 300");
    table_file(data, GPT2_V);
    memset(data + 12, 0xff, 4);
    put_file(in_dir("table"), data, size);
    expect_die(open_table, NULL, EXIT_DATA, "the end of a text being 4294967295");
    const uint32_t first = 0;
    memcpy(data + 12, &first, 4);
    put_file(in_dir("table"), data, size);
    expect_die(open_table, NULL, EXIT_DATA, "the end of a text being 0");
    data[4] = 1;
    put_file(in_dir("table"), data, size);
    expect_die(open_table, NULL, EXIT_DATA, "expected version 2, got 1");
    put_file(in_dir("table"), "plain text", 10);
    expect_die(open_table, NULL, EXIT_DATA, "got plain text");
}

// shorten: read a mapped text after its file has lost all its bytes, in a child.
static void shorten(void *unused)
{
    (void)unused;
    put_file(in_dir("shorten"), "abcdefgh", 8);
    TextFile f = text_file("--text", in_dir("shorten"), TEXT_BYTES);
    if (text_token(&f, 7) != 'h' || truncate(in_dir("shorten"), 0))
        die(EXIT_FAIL, "the file was not shortened");
    text_token(&f, 7);
    printf("%d", text_token(&f, 7));
}

// test_checksum: it follows the content and the part that is trained on, not the name.
static void test_checksum(void)
{
    static unsigned char data[17 << 20]; // above and, cut, below the limit of 16 MiB
    char sums[4][17];
    for (int k = 0; k < 4; k++) {
        data[k < 2 ? 9000000 : sizeof data - 1] = (unsigned char)k;
        put_file(in_dir("sum"), data, k < 2 ? 10000000 : sizeof data);
        TextFile f = text_map("--text", in_dir("sum"));
        text_checksum(&f, sums[k]);
        CHECK(strlen(sums[k]) == 16, "checksum %s", sums[k]);
        for (int j = 0; j < k; j++)
            CHECK(strcmp(sums[j], sums[k]), "files %d and %d have checksum %s", j, k, sums[k]);
        char again[17];
        text_checksum(&f, again);
        CHECK(!strcmp(again, sums[k]), "checksums of one file: %s and %s", again, sums[k]);
        f.n = 1;
        text_checksum(&f, again);
        CHECK(strcmp(again, sums[k]), "checksum %s of two parts", again);
        munmap((void *)f.map, f.bytes);
    }
    expect_die(shorten, NULL, EXIT_DATA, "--text or --images: changed while it was read");
}

// ------------------------------------------------------------------------------------------------
// [windows]

// test_shuffle: text_shuffle is a permutation for every n, its own for every epoch and seed, and
// every element comes to every place about equally often.
static void test_shuffle(void)
{
    enum { MOST = 1000, PLACES = 13, EPOCHS = 13000 };
    static unsigned char seen[MOST];
    static double count[PLACES][PLACES];
    for (uint64_t n = 1; n <= MOST; n += n < 70 ? 1 : 31) {
        size_t fixed = 0, same = 0, twice = 0;
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t k = text_shuffle(7, STREAM_TRAIN + n, i, n);
            twice += k >= n || seen[k]++;
            fixed += k == i;
            same += k == text_shuffle(7, STREAM_TRAIN + n + 1, i, n);
            same += k == text_shuffle(8, STREAM_TRAIN + n, i, n);
        }
        CHECK(!twice, "n %d: %zu values twice or too large", (int)n, twice);
        if (n > 100)
            CHECK(fixed < 10 && same < 20, "n %d: %zu unmoved, %zu as in another order", (int)n,
                  fixed, same);
    }
    double chi = 0;
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++)
        for (uint64_t i = 0; i < PLACES; i++)
            count[i][text_shuffle(1, STREAM_TRAIN + epoch, i, PLACES)]++;
    for (int i = 0; i < PLACES * PLACES; i++) {
        double d = count[i / PLACES][i % PLACES] - EPOCHS / PLACES;
        chi += d * d / (EPOCHS / PLACES);
    }
    CHECK(chi < 230, "places: chi-square %.1f, expected about 144 +- 17", chi);
    uint64_t huge = text_shuffle(1, STREAM_TRAIN, UINT64_MAX - 1, UINT64_MAX);
    CHECK(huge < UINT64_MAX, "2^64 - 1 windows");
}

// ramp: a file of n tokens 0, 1, 2, ... of --vocab gpt2, opened with windows of T.
static Text ramp(size_t n, size_t B, int T, double held_out)
{
    static unsigned char data[GPT2_HEADER + 2 * 4000];
    static int tokens[4000];
    static char path[2048];
    for (int i = 0; i < 4000; i++)
        tokens[i] = i;
    snprintf(path, sizeof path, "%s", in_dir("ramp"));
    put_file(path, data, token_file(data, tokens, n));
    Text t = text_of(path, TEXT_GPT2, T);
    t.held_out = held_out;
    quietly(&t, B);
    return t;
}

// test_windows: a ramp of k B T + 1 tokens: targets = inputs + 1, and in every epoch every token
// but the first is a target once (C11, C13, F10), however large the batches are.
static void test_windows(void)
{
    enum { MOST = 4000 };
    static unsigned char seen[MOST];
    for (int k = 0; k < 4; k++) {
        const size_t B = (const size_t[]){1, 2, 3, 5}[k], T = (const size_t[]){1, 7, 16, 10}[k];
        const size_t W = 6 * B, n = W * T + 1;
        int inputs[16], targets[16], orders = 0, last = -1;
        Text t = ramp(2 * n, B, (int)T, 0.5); // half is held out
        CHECK(t.train.n == n && t.val.n == n && text_windows(&t.train, T) == W,
              "%zu and %zu tokens", t.train.n, t.val.n);
        for (int epoch = 0; epoch < 4; epoch++)
            for (int held = 0; held < 2; held++) {
                size_t wrong = 0, from = held ? n : 0;
                memset(seen, 0, sizeof seen);
                for (size_t i = 0; i < W; i++) {
                    uint64_t stream = held ? STREAM_EVAL + i : STREAM_TRAIN + W * (size_t)epoch + i;
                    CHECK(text_fill(&t, 1, stream, inputs, targets), "window %zu", i);
                    for (size_t j = 0; j < T; j++) {
                        wrong += targets[j] != inputs[j] + 1 || (j && inputs[j] != targets[j - 1]);
                        wrong += (size_t)inputs[j] < from || (size_t)targets[j] >= from + n;
                        seen[targets[j]]++;
                    }
                    orders += !held && !i && inputs[0] != last;
                    last = held || i ? last : inputs[0];
                }
                for (size_t i = from + 1; i < from + n; i++)
                    wrong += seen[i] != 1;
                CHECK(!wrong, "B=%zu T=%zu epoch %d held %d: %zu wrong", B, T, epoch, held, wrong);
            }
        CHECK(orders > 1, "every epoch begins with the same window");
        CHECK(!text_fill(&t, 1, STREAM_EVAL + W, inputs, targets), "past the last held-out window");
        text_close(&t);
    }
    Opening o = {text_of(in_dir("ramp"), TEXT_GPT2, 7), 2, 1};
    static unsigned char data[GPT2_HEADER + 32];
    static const int zeros[16];
    put_file(in_dir("ramp"), data, token_file(data, zeros, 14)); // B T tokens and --val
    static char path[2048]; // what in_dir gives does not last
    snprintf(path, sizeof path, "%s", in_dir("ramp"));
    o.text.path = path;
    o.text.val_path = in_dir("tokens");
    expect_die(open_text, &o, EXIT_DATA, "need 15 tokens");
    put_file(in_dir("ramp"), data, token_file(data, zeros, 15));
    o.text.val_path = in_dir("ramp-val");
    put_file(o.text.val_path, data, token_file(data, zeros, 15));
    CHECK(run_child(open_text, &o).code == 0, "B T + 1 tokens are enough");
    o.text.val_path = in_dir("ramp-link");
    if (symlink(o.text.path, o.text.val_path))
        die(EXIT_FAIL, "symlink: %s", strerror(errno));
    expect_die(open_text, &o, EXIT_USAGE, "expected another file than --text");
}

// test_val_file: with --val all of --text is trained on, and only --val evaluated.
static void test_val_file(void)
{
    int inputs[4], targets[4];
    put_file(in_dir("train"), "aaaaaaaaa", 9);
    put_file(in_dir("val"), "bbbbbb", 6);
    Text t = text_of(in_dir("train"), TEXT_ASCII, 4);
    t.val_path = in_dir("val");
    quietly(&t, 2);
    CHECK(text_windows(&t.train, 4) == 2 && text_windows(&t.val, 4) == 1, "2 and 1 windows");
    text_fill(&t, 1, STREAM_TRAIN + 5, inputs, targets);
    CHECK(inputs[0] == 'a' && targets[3] == 'a', "training reads --text");
    text_fill(&t, 1, STREAM_EVAL, inputs, targets);
    CHECK(inputs[0] == 'b' && targets[3] == 'b', "evaluation reads --val");
    text_close(&t);
}

// test_large: a sparse file of 5 GiB with marks beyond 4 GiB: counted right, and read there (C17).
static void test_large(void)
{
    enum { T = 1 << 16 };
    const size_t GIB = (size_t)1 << 30, n = 5 * GIB + 1, mark = 4 * GIB + 12345;
    char path[2048];
    snprintf(path, sizeof path, "%s", in_dir("large"));
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)n) || pwrite(fd, "marked", 6, (off_t)mark) != 6 ||
        pwrite(fd, "end", 3, (off_t)n - 3) != 3 || close(fd)) {
        printf("SKIP a file of 5 GiB: %s\n", strerror(errno));
        unlink(path);
        return;
    }
    Text t = text_of(path, TEXT_BYTES, T);
    t.held_out = 0.1;
    quietly(&t, 1);
    const size_t W = text_windows(&t.train, T);
    CHECK(t.train.n + t.val.n == n && W == (t.train.n - 1) / T, "%zu + %zu tokens", t.train.n,
          t.val.n);
    uint64_t k = 0;
    while (text_shuffle(1, STREAM_TRAIN + 2, k, W) != mark / T)
        k++;
    int *inputs = (int *)alloc_zero(2 * T, sizeof(int), "window"), *targets = inputs + T;
    text_fill(&t, 1, STREAM_TRAIN + 2 * W + k, inputs, targets); // as a run resumed in epoch 2
    size_t at = mark % T, wrong = 0;
    for (size_t i = 0; i < 6; i++)
        wrong += inputs[at + i] != "marked"[i] || targets[at + i - 1] != "marked"[i];
    CHECK(!wrong && !inputs[at - 1] && !inputs[at + 6], "the mark at 4 GiB + 12345");
    CHECK(text_token(&t.val, t.val.n - 1) == 'd', "the last byte");
    free(inputs);
    text_close(&t);
    unlink(path);
}

// test_evaluation: over all held-out windows in batches that do not divide them, the mean is that
// of all targets, and bits per character follow.
static void test_evaluation(void)
{
    TaskOptions o;
    Evaluation e;
    Batch batch;
    size_t targets = 0;
    double nats = 0;
    memset(&o, 0, sizeof o);
    memset(&e, 0, sizeof e);
    put_file(in_dir("train"), "0123456789012345678901234567890", 31);
    o.text = text_of(in_dir("train"), TEXT_ASCII, 2);
    o.text.held_out = 0.5; // 15 tokens, 7 windows
    quietly(&o.text, 4);
    batch_alloc(&batch, 4, 2);
    CHECK(task_eval_batches(&TASKS[1], &o, 4) == 2, "7 windows in 2 batches");
    for (long i = 0; i < 2; i++) {
        size_t count = 0;
        task_batch(&TASKS[1], &o, 1, STREAM_EVAL, i, &batch);
        for (size_t j = 0; j < 8; j++) {
            count += batch.targets[j] != IGNORE;
            batch.predictions[j] = batch.targets[j] == '3' ? '3' : '?';
        }
        targets += count;
        nats += (double)count * (double)(i + 1);
        evaluation_add(&e, &TASKS[1], &o, &batch, (double)(i + 1));
    }
    LogRow row = evaluation_row(&e, 5);
    CHECK(targets == 14 && row.step == 5 && fabs(row.loss - nats / 14) < 1e-12, "%zu targets, %g",
          targets, row.loss);
    CHECK(fabs(row.bits - row.loss / log(2.0)) < 1e-12, "bits %g", row.bits);
    CHECK(fabs(row.acc - 1 / 14.0) < 1e-12, "accuracy %g", row.acc); // 6..9, 0..9: one 3
    o.eval_batches = 1;
    CHECK(task_eval_batches(&TASKS[1], &o, 4) == 1, "--eval-batches 1");
    o.eval_batches = 9;
    CHECK(task_eval_batches(&TASKS[1], &o, 4) == 2, "--eval-batches 9");
    CHECK(task_eval_batches(&TASKS[0], &o, 4) == 9, "--eval-batches 9, fresh sequences");
    batch_free(&batch);
    text_close(&o.text);
}

// ------------------------------------------------------------------------------------------------
// [words]

// a_table: a small table: the bytes, then words in the order of their merges, then the end.
static TextTable a_table(void)
{
    static const char *const words[] = {"he", "ll", "hell", " w", "or", "hello", " wor", "ld",
                                        " world", "aa", "aaa", "<end>"};
    TextTable table;
    table.n = 256 + sizeof words / sizeof *words;
    table.end = (int)table.n - 1;
    table.bytes = (unsigned char *)alloc_zero(table.n + 64, 1, "table");
    table.at = (size_t *)alloc_zero(table.n + 1, sizeof(size_t), "table");
    for (size_t i = 0; i < table.n; i++) {
        size_t length = i < 256 ? 1 : strlen(words[i - 256]);
        char byte = (char)i;
        memcpy(table.bytes + table.at[i], i < 256 ? &byte : words[i - 256], length);
        table.at[i + 1] = table.at[i] + length;
    }
    return table;
}

// test_encode: prompts as tokens: nothing, one byte, merges in order, what never merges.
static void test_encode(void)
{
    static const struct {
        const char *text;
        int n, tokens[8];
    } rows[] = {
        {"", 1, {267}},                   // the end of a text
        {"h", 1, {'h'}},
        {"he", 1, {256}},
        {"hello world", 2, {261, 264}},
        {"hellohello", 2, {261, 261}},
        {"helo", 3, {256, 'l', 'o'}},
        {"aaaa", 2, {265, 265}},           // the pairs first
        {"aaaaa", 2, {265, 266}},
        {"he'll", 3, {256, '\'', 257}},
        {"hell 'll", 4, {258, ' ', '\'', 257}},
        {"hello  world", 3, {261, ' ', 264}}, // the second space belongs to the word
        {"hello\n world", 3, {261, '\n', 264}},
        {"<end>", 5, {'<', 'e', 'n', 'd', '>'}}, // text, not the mark
        {"\xc3\xa9", 2, {0xc3, 0xa9}},
    };
    Text t = text_of(NULL, TEXT_GPT2, 4);
    t.table = a_table();
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        int tokens[32];
        size_t n = text_encode(&t, tokens, rows[k].text), wrong = n != (size_t)rows[k].n;
        for (size_t i = 0; i < n && !wrong; i++)
            wrong = tokens[i] != rows[k].tokens[i];
        CHECK(!wrong, "\"%s\": %zu tokens, the first %d", rows[k].text, n, tokens[0]);
    }
    static const char *const pieces[] = {"don", "'t", " stop", "   ", " 42", " 7", "abc", "!?",
                                         " (", "x", ")", "\n", "\n", "end", " \n "};
    char text[128] = "";
    for (size_t k = 0; k < sizeof pieces / sizeof *pieces; k++)
        strcat(text, pieces[k]);
    size_t at = 0, k = 0;
    for (size_t length = strlen(text); at < length; k++) {
        size_t n = text_piece((const unsigned char *)text + at, length - at);
        CHECK(k < sizeof pieces / sizeof *pieces && n == strlen(pieces[k]) &&
                  !memcmp(text + at, pieces[k], n), "piece %zu: %.*s", k, (int)n, text + at);
        at += n;
    }
    const int five[] = {256, 'x', 267, IGNORE, 264}; // "he", "x", no text, none, " world"
    CHECK(text_characters(&t, five, 5) == 9, "%zu characters", text_characters(&t, five, 5));
    text_close(&t);
    CHECK(text_characters(&t, five, 5) == 0, "no table, no characters");
    int tokens[4];
    t.vocab = TEXT_ASCII;
    CHECK(text_encode(&t, tokens, "") == 1 && tokens[0] == '\n', "no prompt is a line feed");
    CHECK(text_encode(&t, tokens, "ab") == 2 && tokens[1] == 'b', "ASCII prompt");
}

// encode_bad: a prompt that cannot be: of bytes in ASCII, or without a table; in a child.
static void encode_bad(void *vocab)
{
    int tokens[8];
    Text t = text_of(NULL, *(int *)vocab, 4);
    text_encode(&t, tokens, "ab\xc3\xa9");
}

// encode_unsaid: a prompt with a byte that the table has not, after one that merges; in a child.
static void encode_unsaid(void *unused)
{
    int tokens[8];
    Text t = text_of(NULL, TEXT_GPT2, 4);
    (void)unused;
    t.table_path = "table";
    t.table = a_table();
    t.table.bytes['!'] = '?';
    text_encode(&t, tokens, "hello!");
}

// print_all: every kind of token, in a child.
static void print_all(void *vocab)
{
    const int tokens[] = {'a', 127, 128, -1, '\n', 0x1b, 255, 256, 50257, INT32_MAX, INT32_MIN};
    Text t = text_of(NULL, *(int *)vocab, 4);
    text_print(&t, tokens, 11);
}

// print_bytes: a text of UTF-8, of bytes and of what only looks like UTF-8, in a child.
static void print_bytes(void *said)
{
    const char *bytes = (const char *)said;
    int tokens[64], n = 0;
    Text t = text_of(NULL, TEXT_BYTES, 4);
    for (; bytes[n]; n++)
        tokens[n] = (unsigned char)bytes[n];
    text_print(&t, tokens, (size_t)n);
}

// test_print: what tokens say, of every vocabulary; a terminal is not commanded (C14).
static void test_print(void)
{
    char utf8[] = "\xc3\xa9 \xc3\x80 \xe2\x80\xa6 \xf0\x9f\x98\x80 \xe9\xff";
    static char c1[][2][8] = {{"\xc2\x9b" "31m", "\xc2?31m"}, {"\x9b" "31m", "?31m"},
                              {"\xe0\x82\x9b", "\xe0??"}, {"\xf0\x80\x82\x9b", "\xf0???"},
                              {"\xc3", "\xc3"}, {"\xe2\x80", "\xe2?"}, {"\xc1\x9b", "\xc1?"},
                              {"\xf5\x90", "\xf5?"}, {"\xe2\x80z", "\xe2?z"}};
    const char *expected[] = {"a???\n?\xff????", "a???\n??????",
                              "[97][127][128]?[10][27][255][256]???"};
    int vocab = TEXT_ASCII;
    for (int k = 0; k < 3; k++) {
        Outcome out = run_child(print_all, &k);
        CHECK(out.code == 0 && !strcmp(out.text, expected[k]), "vocabulary %d: %s", k, out.text);
    }
    CHECK(!strcmp(run_child(print_bytes, utf8).text, utf8), "UTF-8 is printed as it is");
    for (size_t k = 0; k < sizeof c1 / sizeof *c1; k++) {
        Outcome out = run_child(print_bytes, c1[k][0]);
        CHECK(!strcmp(out.text, c1[k][1]), "control bytes %zu: %s", k, out.text);
    }
    expect_die(encode_bad, &vocab, EXIT_USAGE, "--prompt: the byte at offset 2 is 0xC3");
    vocab = TEXT_GPT2;
    expect_die(encode_bad, &vocab, EXIT_USAGE, "needs --tokenizer");
    expect_die(encode_unsaid, NULL, EXIT_DATA, "no token says 0x21, byte 5 of --prompt");
    const char *real = getenv("GPT2_TOKENIZER"); // the published table, where there is one
    if (!real) {
        printf("SKIP the published tokenizer: set GPT2_TOKENIZER=gpt2_tokenizer.bin\n");
        return;
    }
    Text t = text_of(NULL, TEXT_GPT2, 4);
    const int hello[] = {15496, 11, 995, 0, 314, 1101, 838, 25}, n = 8;
    int tokens[64];
    text_table(&t.table, real, GPT2_V);
    CHECK(text_encode(&t, tokens, "Hello, world! I'm 10:") == (size_t)n &&
              !memcmp(tokens, hello, sizeof hello), "published tokens of a sentence");
    text_close(&t);
}

// ------------------------------------------------------------------------------------------------
// [sampler]

typedef struct {
    const double *values;
    size_t n;
    double temperature;
} Choice;

// choose: sampler_choose in a child.
static void choose(void *arg)
{
    const Choice *c = (const Choice *)arg;
    const Sampler s = {c->temperature, 0, 1};
    sampler_choose(&s, c->values, sizeof(double), c->n, 0, 0);
}

// pick: sampler_pick in a child.
static void pick(void *arg)
{
    const Choice *c = (const Choice *)arg;
    sampler_pick(c->values, c->n, 0.5);
}

// test_coins: a coin at either end finds an index of positive probability (A26).
static void test_coins(void)
{
    const double p[] = {0, 0.25, 0, 0.5, 0.25, 0, 0}, coins[] = {0, 0.99999994, 1 - 0x1p-53};
    const size_t wanted[] = {1, 4, 4};
    for (int k = 0; k < 3; k++)
        CHECK(sampler_pick(p, 7, coins[k]) == wanted[k], "coin %.17g: %zu", coins[k],
              sampler_pick(p, 7, coins[k]));
    CHECK(sampler_pick(p, 7, 0.25) == 3 && sampler_pick(p, 7, 0.2499) == 1, "in between");
    const double tiny[] = {1e-300, 0, 1e-300};
    CHECK(sampler_pick(tiny, 3, 0.49) == 0 && sampler_pick(tiny, 3, 0.999) == 2, "tiny sums");
    const double bad[][2] = {{NAN, 1}, {1, NAN}, {INFINITY, 1}, {0, 0}};
    for (int k = 0; k < 4; k++) {
        Choice c = {bad[k], 2, 1};
        expect_die(pick, &c, EXIT_FAIL, "finite positive sum");
    }
}

// test_tail: of 50257 tokens, 1e5 of a tail of probability 0.1 in 1e6 draws (A25).
static void test_tail(void)
{
    enum { V = 50257, TAIL = 40000, DRAWS = 1000000 };
    static double p[V], sum[V];
    size_t tail = 0;
    for (size_t i = 0; i < V; i++) {
        p[i] = i < V - TAIL ? 0.9 / (V - TAIL) : 0.1 / TAIL;
        sum[i] = p[i] + (i ? sum[i - 1] : 0);
    }
    for (size_t k = 0; k < 1000; k++) { // sampler_pick itself, against a search of the running sum
        const double coin = rand_uniform(5, 5, k);
        size_t i = 0;
        while (sum[i] <= coin * sum[V - 1])
            i++;
        CHECK(sampler_pick(p, V, coin) == i, "coin %.17g", coin);
    }
    for (size_t k = 0; k < DRAWS; k++) {
        double coin = rand_uniform(1, STREAM_SAMPLE, k) * sum[V - 1];
        tail += coin >= sum[V - TAIL - 1];
    }
    CHECK(fabs((double)tail / DRAWS - 0.1) < 0.002, "the tail came %zu times in 1e6", tail);
    static float logits[V];
    for (size_t i = 0; i < V; i++)
        logits[i] = (float)log(p[i]);
    const Sampler s = {1, 0, 3};
    tail = 0;
    for (size_t k = 0; k < 4000; k++)
        tail += sampler_choose(&s, logits, sizeof(float), V, 0, k) >= V - TAIL;
    CHECK(fabs((double)tail / 4000 - 0.1) < 0.02, "the tail came %zu times in 4000", tail);
}

// test_temperature: 0 and 1e-30 take the first of the largest, whatever the coin; high ones take
// all alike; in between the logits' softmax (F09).
static void test_temperature(void)
{
    const float logits[] = {0, 2, -1, 2, -INFINITY, 1};
    const double temperatures[] = {0, 1e-30, 1e-10};
    size_t wrong = 0, count[6] = {0};
    for (int k = 0; k < 3; k++)
        for (uint64_t t = 0; t < 100; t++) {
            const Sampler s = {temperatures[k], 0, 1};
            wrong += sampler_choose(&s, logits, sizeof(float), 6, 0, t) != 1;
        }
    CHECK(!wrong, "%zu choices are not the lowest of the largest", wrong);
    double total = 0;
    for (int i = 0; i < 6; i++)
        total += exp(logits[i] / 0.7);
    const Sampler warm = {0.7, 0, 2}, hot = {1e6, 0, 2};
    for (uint64_t t = 0; t < 100000; t++)
        count[sampler_choose(&warm, logits, sizeof(float), 6, 1, t)]++;
    for (int i = 0; i < 6; i++)
        CHECK(fabs((double)count[i] / 1e5 - exp(logits[i] / 0.7) / total) < 0.006,
              "token %d came %zu times, expected %.0f", i, count[i],
              1e5 * exp(logits[i] / 0.7) / total);
    memset(count, 0, sizeof count);
    for (uint64_t t = 0; t < 50000; t++)
        count[sampler_choose(&hot, logits, sizeof(float), 6, 1, t)]++;
    for (int i = 0; i < 6; i++)
        CHECK(i == 4 ? !count[i] : count[i] > 9400 && count[i] < 10600, "token %d: %zu of 50000", i,
              count[i]);
}

// test_top_k: only the k most likely, of equals the lower; k > V is V.
static void test_top_k(void)
{
    const double logits[] = {1, 3, 2, 3, 3, 0};
    const int ks[] = {1, 2, 3, 4, 5, 6, 7, 1000000000, 0};
    const int kept[] = {2, 10, 26, 30, 31, 63, 63, 63, 63}; // bits of the tokens that may come
    for (int k = 0; k < 9; k++) {
        const Sampler s = {2, ks[k], 4};
        int seen = 0;
        for (uint64_t t = 0; t < 2000; t++)
            seen |= 1 << sampler_choose(&s, logits, sizeof(double), 6, 0, t);
        CHECK(seen == kept[k], "top-k %d: tokens %#x, expected %#x", ks[k], seen, kept[k]);
    }
}

// test_bad_logits: NaN, +Inf, nothing but -Inf (A26); the choice follows seed and position only.
static void test_bad_logits(void)
{
    const double bad[][3] = {{0, NAN, 1}, {NAN, 0, 0}, {0, 0, INFINITY},
                             {-INFINITY, -INFINITY, -INFINITY}};
    const char *const says[] = {"logit of token 1", "logit of token 0",
                                "logit of token 2 at position 0 is inf",
                                "every logit at position 0 is -inf"};
    for (int k = 0; k < 8; k++) {
        Choice c = {bad[k % 4], 3, k / 4};
        expect_die(choose, &c, EXIT_FAIL, says[k % 4]);
    }
    const float even[64] = {0};
    int differ[3] = {0};
    for (uint64_t t = 0; t < 64; t++) {
        const Sampler s = {1, 0, 1}, other = {1, 0, 2};
        int x = sampler_choose(&s, even, sizeof(float), 64, 0, t);
        CHECK(x == sampler_choose(&s, even, sizeof(float), 64, 0, t), "the same again");
        differ[0] += x != sampler_choose(&other, even, sizeof(float), 64, 0, t);
        differ[1] += x != sampler_choose(&s, even, sizeof(float), 64, 1, t);
        differ[2] += x != sampler_choose(&s, even, sizeof(float), 64, 0, t + 1);
    }
    CHECK(differ[0] > 50 && differ[1] > 50 && differ[2] > 50, "%d %d %d of 64 differ", differ[0],
          differ[1], differ[2]);
}

int main(void)
{
    make_dir();
    test_files_plain();
    test_files_bytes();
    test_files_tokens();
    test_files_table();
    test_checksum();
    test_shuffle();
    test_windows();
    test_val_file();
    test_large();
    test_evaluation();
    test_encode();
    test_print();
    test_coins();
    test_tail();
    test_temperature();
    test_top_k();
    test_bad_logits();
    return test_report();
}
