// test_images.c: tests of data/images.h: files that are not what they should be, patches and their
// order, which images are trained on and which are evaluated.
//
//     gcc -O2 -fopenmp -Wall -Wextra test_images.c -o build/test_images -lm && build/test_images
//
// [files]    headers, sizes and labels that lie; what is mapped but is no file of images
// [patches]  every pixel once, where it belongs, standardised
// [order]    every image once an epoch, permutations, the images to evaluate on, 5 GiB
// A name like C11 is a row of the list of cases that this project keeps: failures that users of
// other programs have reported.
#include "dev/testing.h" // first: it asks for GNU extensions
#include "data/images.h"

// What a file of images says of itself.
typedef struct {
    uint32_t version, H, W, channels, classes;
    uint64_t train, test;
    double mean[IMAGES_CHANNELS], deviation[IMAGES_CHANNELS];
} Head;

static const Head SMALL = {1, 4, 6, 3, 5, 7, 4, {.5, .25, 0, 0}, {.25, .5, 1, 0}};

// head_write: the header at data (IMAGES_HEADER), field by field.
static void head_write(unsigned char *data, const Head *h)
{
    const uint32_t sizes[] = {h->version, h->H, h->W, h->channels, h->classes, 0};
    const uint64_t counts[] = {h->train, h->test};
    memset(data, 0, IMAGES_HEADER);
    memcpy(data, IMAGES_MAGIC, 8);
    memcpy(data + 8, sizes, sizeof sizes); // little-endian machines only, as util/safetensors.h
    memcpy(data + 32, counts, sizeof counts);
    memcpy(data + 48, h->mean, sizeof h->mean);
    memcpy(data + 80, h->deviation, sizeof h->deviation);
}

// pixel_of: the pixel at an index of all pixels, and the label of image i.
static unsigned char pixel_of(size_t i) { return (unsigned char)(rand_u32(9, 0, i) >> 24); }
static unsigned char label_of(size_t i) { return (unsigned char)rand_below(9, 1, i, 5); }

// file_bytes: a file of `head` in memory, its size in *n; to be freed.
static unsigned char *file_bytes(const Head *head, size_t *n)
{
    const size_t images = (size_t)(head->train + head->test);
    const size_t pixels = images * head->H * head->W * head->channels;
    *n = IMAGES_HEADER + images + pixels;
    unsigned char *data = (unsigned char *)alloc_zero(*n + 64, 1, "file");
    head_write(data, head);
    for (size_t i = 0; i < images; i++)
        data[IMAGES_HEADER + i] = label_of(i);
    for (size_t i = 0; i < pixels; i++)
        data[IMAGES_HEADER + images + i] = pixel_of(i);
    return data;
}

// images_of: options as the command line leaves them.
static Images images_of(const char *path, int patch)
{
    Images im;
    memset(&im, 0, sizeof im);
    im.path = path;
    im.patch = patch;
    return im;
}

typedef struct {
    Images images;
    size_t B;
    int training;
} Opening;

// open_images: images_open in a child.
static void open_images(void *arg)
{
    Opening *o = (Opening *)arg;
    images_open(&o->images, o->B, o->training);
}

// opened: a file of `head`, written, mapped and checked, without the line that images_open prints.
static Images opened(const Head *head, int patch)
{
    static char path[2048];
    size_t n;
    unsigned char *data = file_bytes(head, &n);
    snprintf(path, sizeof path, "%s", in_dir("images"));
    put_file(path, data, n);
    free(data);
    Images im = images_of(path, patch);
    images_map(&im);
    return im;
}

// refused: one check that a file of n bytes is refused so.
static void refused(const void *data, size_t n, const char *substring)
{
    char path[2048];
    snprintf(path, sizeof path, "%s", in_dir("refused"));
    put_file(path, data, n);
    Opening o = {images_of(path, 2), 2, 1};
    expect_die(open_images, &o, EXIT_DATA, substring);
}

// ------------------------------------------------------------------------------------------------
// [files]

// test_files_sizes: files that lie about their size, or end too early (C11).
static void test_files_sizes(void)
{
    size_t n;
    unsigned char *data = file_bytes(&SMALL, &n);
    Head h = SMALL;
    refused(data, 0, "got an empty file");
    refused(data, 4, "expected a file of images");
    refused(data, 8, "expected a header of 128 bytes, the file has 8");
    refused(data, IMAGES_HEADER - 1, "the file has 127");
    refused(data, IMAGES_HEADER, "says 7 + 4 images of 73 bytes with their labels; the file holds "
            "0, and 0 bytes more");
    refused(data, IMAGES_HEADER + 11, "the file holds 0, and 11 bytes more");
    refused(data, n - 1, "the file holds 10, and 72 bytes more");
    refused(data, n - 73, "the file holds 10, and 0 bytes more");
    refused(data, n + 1, "the file holds 11, and 1 bytes more");
    const uint64_t counts[][2] = {{6, 4}, {8, 4}, {7, 3}, {7, 5}, {UINT64_MAX, 12},
                                  {12, UINT64_MAX}, {UINT64_MAX - 3, 15},
                                  {(uint64_t)1 << 63, (uint64_t)1 << 63},
                                  {11 + ((uint64_t)1 << 32), 4}, {UINT64_MAX / 73 + 8, 4}};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        h = SMALL;
        h.train = counts[k][0];
        h.test = counts[k][1];
        head_write(data, &h);
        refused(data, n, "the file holds 11, and 0 bytes more");
    }
    h.train = 0;
    h.test = 11;
    head_write(data, &h);
    refused(data, n, "need 1 image to train on and 1 to evaluate on, have 0 and 11");
    h.train = 11;
    h.test = 0;
    head_write(data, &h);
    refused(data, n, "have 11 and 0");
    h = SMALL;
    h.H = 6;
    h.W = 4; // as many bytes: only who made it knows
    head_write(data, &h);
    put_file(in_dir("turned"), data, n);
    Opening turned = {images_of(in_dir("turned"), 2), 2, 1};
    CHECK(run_child(open_images, &turned).code == 0, "6 x 4 for 4 x 6");
    free(data);
}

// test_files_values: every field of the header out of range; labels that no class has.
static void test_files_values(void)
{
    static const struct {
        size_t field; // of Head
        uint32_t value;
        const char *says;
    } rows[] = {
        {offsetof(Head, version), 0, "expected version 1, got 0"},
        {offsetof(Head, version), 2, "expected version 1, got 2"},
        {offsetof(Head, version), 1u << 24, "got 16777216"}, // in big-endian order
        {offsetof(Head, H), 0, "height 0; expected 1 to 1024"},
        {offsetof(Head, H), 1025, "height 1025; expected"},
        {offsetof(Head, W), 0, "width 0; expected 1 to 1024"},
        {offsetof(Head, W), UINT32_MAX, "width 4294967295"},
        {offsetof(Head, channels), 0, "channels 0; expected 1 to 4"},
        {offsetof(Head, channels), 5, "channels 5"},
        {offsetof(Head, classes), 0, "classes 0; expected 2 to 256"},
        {offsetof(Head, classes), 1, "classes 1"},
        {offsetof(Head, classes), 257, "classes 257"},
        {offsetof(Head, classes), 4, "is 4; expected one from 0 to 3"}, // label_of gives 0 to 4
    };
    static const double numbers[][2] = {{NAN, 1}, {-.1, 1}, {1.1, 1}, {INFINITY, 1}, {0, 0},
                                        {0, -1}, {0, NAN}, {0, INFINITY}, {0, 1e-5}, {125, 63}};
    size_t n;
    unsigned char *data = file_bytes(&SMALL, &n);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        Head h = SMALL;
        memcpy((char *)&h + rows[k].field, &rows[k].value, 4);
        head_write(data, &h);
        refused(data, n, rows[k].says);
    }
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
        char says[64];
        Head h = SMALL;
        h.mean[k % 3] = numbers[k][0];
        h.deviation[k % 3] = numbers[k][1];
        head_write(data, &h);
        snprintf(says, sizeof says, "channel %zu has mean", k % 3);
        refused(data, n, says);
    }
    head_write(data, &SMALL);
    const size_t at[] = {0, 6, 7, 10}; // first and last of both parts
    for (int k = 0; k < 4; k++) {
        char says[64];
        const unsigned char kept = data[IMAGES_HEADER + at[k]];
        data[IMAGES_HEADER + at[k]] = (unsigned char)(k % 2 ? 255 : 5);
        snprintf(says, sizeof says, "label %zu is %d; expected one from 0 to 4", at[k],
                 k % 2 ? 255 : 5);
        refused(data, n, says);
        data[IMAGES_HEADER + at[k]] = kept;
    }
    free(data);
}

// test_files_kinds: what is no file of images, and no file (G06); batches and patches that do not
// fit.
static void test_files_kinds(void)
{
    static const char idx[] = "\0\0\x08\x03\0\0\xea\x60\0\0\0\x1c\0\0\0\x1c and pixels";
    static char path[2048];
    size_t n;
    unsigned char *data = file_bytes(&SMALL, &n);
    refused(idx, sizeof idx, "got an IDX file");
    refused("\0\0\x08\x01\0\0\xea\x60", 8, "got an IDX file");
    refused("\x1f\x8b\x08 and more", 12, "got a gzip file");
    refused("PK\3\4 and more", 12, "got a zip file, perhaps .npz");
    refused("some text that is no image at all", 33, "got plain text");
    refused("\x40\x01\0\0\0\0\0\0{\"a\":1}", 15, "got a safetensors file");
    refused("seqimagf", 8, "got plain text");
    snprintf(path, sizeof path, "%s", in_dir("absent"));
    Opening o = {images_of(path, 2), 2, 1};
    expect_die(open_images, &o, EXIT_DATA, "absent: cannot read: No such file");
    o.images.path = dir;
    expect_die(open_images, &o, EXIT_DATA, "expected a file, got a directory");
    mkfifo(in_dir("fifo"), 0600);
    o.images.path = in_dir("fifo");
    expect_die(open_images, &o, EXIT_DATA, "got something else of that name");
    o.images.path = NULL;
    expect_die(open_images, &o, EXIT_USAGE, "needs --images FILE");
    snprintf(path, sizeof path, "%s", in_dir("closed"));
    put_file(path, data, n);
    chmod(path, 0);
    o.images.path = path;
    if (getuid())
        expect_die(open_images, &o, EXIT_DATA, "cannot read: Permission denied");
    chmod(path, 0600);
    o.B = 8;
    expect_die(open_images, &o, EXIT_DATA, "need 8 images for a batch, have 7 to train on");
    o.training = 0;
    CHECK(run_child(open_images, &o).code == 0, "7 images do to evaluate");
    o.training = 1;
    o.B = 7;
    Outcome out = run_child(open_images, &o);
    CHECK(out.code == 0 && strstr(out.text, "7 to train on, 4 to evaluate on, 4 x 6 x 3, 5 "
                                  "classes; 6 patches of 12 numbers"), "%d: %s", out.code,
          out.text);
    const int patches[] = {3, 4, 1024};
    for (int k = 0; k < 3; k++) {
        o.images.patch = patches[k];
        expect_die(open_images, &o, EXIT_USAGE, "are 4 x 6; expected a patch that divides both");
    }
    free(data);
}

// shorten: read from an image of a file that became shorter; in a child.
static void shorten(void *unused)
{
    float patches[4 * 6 * 3];
    Images im = opened(&SMALL, 1);
    (void)unused;
    if (!truncate(im.path, 0))
        printf("label %d\n", images_fill(&im, 0, STREAM_TRAIN, patches));
}

// test_checksum: another bit anywhere, or another division of the same images, another checksum.
static void test_checksum(void)
{
    enum { FLIPPED = 4, FILES = FLIPPED + 3 }; // then the same file twice, and another division
    char sums[FILES][17];
    size_t n;
    unsigned char *data = file_bytes(&SMALL, &n);
    const size_t at[FLIPPED] = {48, IMAGES_HEADER, IMAGES_HEADER + 11, n - 1};
    for (int k = 0; k < FILES; k++) {
        Head h = SMALL;
        if (k == FILES - 1) {
            h.train++;
            h.test--;
        }
        head_write(data, &h);
        if (k < FLIPPED)
            data[at[k]] ^= 1;
        put_file(in_dir("sum"), data, n);
        Images im = images_of(in_dir("sum"), 2);
        images_map(&im);
        strcpy(sums[k], im.checksum);
        CHECK(strlen(sums[k]) == 16, "checksum %s", sums[k]);
        for (int j = 0; j < k; j++)
            CHECK((strcmp(sums[j], sums[k]) == 0) == (j == FLIPPED && k == FLIPPED + 1),
                  "files %d and %d: %s, %s", j, k, sums[j], sums[k]);
        images_close(&im);
        if (k < FLIPPED)
            data[at[k]] ^= 1;
    }
    free(data);
    expect_die(shorten, NULL, EXIT_DATA, "--text or --images: changed while it was read");
}

// ------------------------------------------------------------------------------------------------
// [patches]

// test_patches: every number of every patch against its pixel, found from its place in the patch.
static void test_patches(void)
{
    static const struct {
        uint32_t H, W, channels;
        int patch;
    } rows[] = {{4, 6, 3, 2}, {4, 6, 3, 1}, {6, 4, 1, 2}, {9, 3, 4, 3}, {8, 8, 2, 8}, {1, 5, 1, 1},
                {28, 28, 1, 2}, {32, 32, 3, 2}};
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        const size_t p = (size_t)rows[k].patch, W = rows[k].W, channels = rows[k].channels;
        Head h = SMALL;
        h.H = rows[k].H;
        h.W = rows[k].W;
        h.channels = rows[k].channels;
        h.mean[3] = .125;
        h.deviation[3] = .75;
        Images im = opened(&h, rows[k].patch);
        const size_t P = images_P(&im), D = images_D(&im), each = h.H * W * channels;
        CHECK(P * D == each && D == p * p * channels, "%zu patches of %zu", P, D);
        float *patches = (float *)alloc_zero(each, sizeof(float), "patches");
        for (uint64_t n = 0; n < 4; n++) {
            const size_t image = images_index(&im, 3, STREAM_TRAIN + n);
            size_t wrong = 0;
            const int label = images_fill(&im, 3, STREAM_TRAIN + n, patches);
            for (size_t i = 0; i < each; i++) {
                const size_t patch = i / D, y = i % D / (p * channels), x = i / channels % p;
                const size_t c = i % channels, row = patch / (W / p) * p + y;
                const size_t column = patch % (W / p) * p + x;
                const unsigned char u = pixel_of(image * each + (row * W + column) * channels + c);
                wrong += fabs(patches[i] - (u / 255.0 - h.mean[c]) / h.deviation[c]) > 1e-6;
            }
            CHECK(!wrong && label == label_of(image), "shape %zu, image %zu: %zu numbers differ, "
                  "label %d", k, image, wrong, label);
        }
        free(patches);
        images_close(&im);
    }
}

// ------------------------------------------------------------------------------------------------
// [order]

// test_order: each epoch is a permutation of the images to train on, another one for another epoch
// or seed; those to evaluate on are the others, once, whatever the seed, and then there are none.
static void test_order(void)
{
    enum { TRAIN = 50, TEST = 30, EPOCHS = 4 };
    Head h = SMALL;
    h.train = TRAIN;
    h.test = TEST;
    Images im = opened(&h, 2);
    float patches[2][4 * 6 * 3];
    size_t same[3] = {0}; // as the epoch before, as another seed, as the file
    for (uint64_t e = 0; e < EPOCHS; e++) {
        int seen[TRAIN + TEST] = {0}, once = 0;
        for (uint64_t k = 0; k < TRAIN; k++) {
            const size_t i = images_index(&im, 1, STREAM_TRAIN + e * TRAIN + k);
            seen[i]++;
            same[0] += e && i == images_index(&im, 1, STREAM_TRAIN + (e - 1) * TRAIN + k);
            same[1] += i == images_index(&im, 2, STREAM_TRAIN + e * TRAIN + k);
            same[2] += i == k;
        }
        for (int i = 0; i < TRAIN; i++)
            once += seen[i] == 1;
        CHECK(once == TRAIN, "epoch %d: %d of %d images once", (int)e, once, TRAIN);
    }
    for (int k = 0; k < 3; k++)
        CHECK(same[k] < TRAIN / 2, "%zu of %d images in the same place", same[k], EPOCHS * TRAIN);
    int seen[TRAIN + TEST] = {0}, once = 0;
    size_t in_place = 0;
    for (uint64_t k = 0; k < TEST; k++) {
        const size_t i = images_index(&im, k, STREAM_EVAL + k);
        CHECK(i >= TRAIN && i < TRAIN + TEST && i == images_index(&im, 7, STREAM_EVAL + k),
              "image %zu to evaluate on", i);
        seen[i]++;
        in_place += i == TRAIN + k;
        CHECK(images_fill(&im, 5, STREAM_EVAL + k, patches[0]) == label_of(i) &&
                  images_fill(&im, 6, STREAM_EVAL + k, patches[1]) == label_of(i) &&
                  !memcmp(patches[0], patches[1], sizeof patches[0]), "image %zu twice", i);
    }
    for (int i = TRAIN; i < TRAIN + TEST; i++)
        once += seen[i] == 1;
    CHECK(once == TEST && in_place < TEST / 2, "%d of %d once, %zu in place", once, TEST, in_place);
    const uint64_t past[] = {TEST, TEST + 1, 1000, (uint64_t)1 << 40};
    for (int k = 0; k < 4; k++) {
        patches[0][0] = 99;
        CHECK(images_fill(&im, 1, STREAM_EVAL + past[k], patches[0]) == -1 && patches[0][0] == 99,
              "past the last image");
    }
    images_close(&im);
    CHECK(!im.file.map && !im.pixels, "closed");
    images_close(&im); // twice is nothing
}

// test_large: a sparse file of 5 GiB with marks at its end: counted right, and read there (C17).
static void test_large(void)
{
    enum { N = 1280, TEST = 1 };
    const size_t each = (size_t)1 << 22;
    Head h = {1, 1024, 1024, 4, 2, N - TEST, TEST, {0, 0, 0, 0}, {1, 1, 1, 1}};
    unsigned char head[IMAGES_HEADER];
    static char path[2048];
    const size_t n = IMAGES_HEADER + N + N * each;
    snprintf(path, sizeof path, "%s", in_dir("large"));
    head_write(head, &h);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)n) || pwrite(fd, head, IMAGES_HEADER, 0) != IMAGES_HEADER ||
        pwrite(fd, "\1", 1, IMAGES_HEADER + N - 1) != 1 ||
        pwrite(fd, "\1\2\3\377", 4, (off_t)n - 4) != 4 ||
        pwrite(fd, "\7", 1, (off_t)(n - 2 * each)) != 1 || close(fd)) {
        printf("SKIP a file of 5 GiB: %s\n", strerror(errno));
        unlink(path);
        return;
    }
    Images im = images_of(path, 1024);
    images_map(&im);
    float *patch = (float *)alloc_zero(each, sizeof(float), "patch");
    int label = images_fill(&im, 1, STREAM_EVAL, patch);
    const float *last = patch + each - 4;
    CHECK(label == 1 && last[0] == (float)(1 / 255.0) && last[1] == (float)(2 / 255.0) &&
              last[2] == (float)(3 / 255.0) && last[3] == 1 && last[-1] == 0, "the last image");
    uint64_t k = 0;
    while (images_index(&im, 1, STREAM_TRAIN + 3 * (N - TEST) + k) != N - TEST - 1)
        k++;
    label = images_fill(&im, 1, STREAM_TRAIN + 3 * (N - TEST) + k, patch); // resumed in epoch 3
    CHECK(label == 0 && patch[0] == (float)(7 / 255.0) && patch[1] == 0, "the last to train on");
    free(patch);
    images_close(&im);
    unlink(path);
}

// test_fashion_mnist: the real file, where there is one: its size, its classes, and numbers that
// have mean 0 and variance 1 over all the images to train on.
static void test_fashion_mnist(void)
{
    const char *path = getenv("FASHION_MNIST");
    if (!path) {
        printf("SKIP the real images: set FASHION_MNIST=fashion_mnist.images\n");
        return;
    }
    Images im = images_of(path, 2);
    images_map(&im);
    CHECK(im.train == 60000 && im.test == 10000 && im.H == 28 && im.W == 28 && im.channels == 1 &&
              im.classes == 10 && images_P(&im) == 196 && images_D(&im) == 4, "its shape");
    float patches[196 * 4];
    double sum = 0, squares = 0;
    size_t labels[2][10] = {{0}};
    for (uint64_t k = 0; k < 60000; k++) {
        labels[0][images_fill(&im, 1, STREAM_TRAIN + k, patches)]++;
        for (int i = 0; i < 196 * 4; i++) {
            sum += patches[i];
            squares += (double)patches[i] * patches[i];
        }
    }
    for (uint64_t k = 0; k < 10000; k++)
        labels[1][images_fill(&im, 1, STREAM_EVAL + k, patches)]++;
    for (int c = 0; c < 10; c++)
        CHECK(labels[0][c] == 6000 && labels[1][c] == 1000, "class %d: %zu and %zu images", c,
              labels[0][c], labels[1][c]);
    sum /= 60000 * 784.0;
    squares /= 60000 * 784.0;
    CHECK(fabs(sum) < 1e-5 && fabs(squares - 1) < 1e-5, "mean %g, mean square %g", sum, squares);
    CHECK(im.labels[0] == 9 && im.labels[60000] == 9, "both parts begin with a boot");
    images_close(&im);
}

int main(void)
{
    make_dir();
    test_files_sizes();
    test_files_values();
    test_files_kinds();
    test_checksum();
    test_patches();
    test_order();
    test_large();
    test_fashion_mnist();
    return test_report();
}
