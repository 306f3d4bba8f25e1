// images.h: image classification: a flat file of images as sequences of patches, which to train on
// and which to evaluate on, and their labels.
//
// The file, as data/images.py writes it from IDX, CIFAR-10 .bin or .npz files; all little-endian:
//
//   0    "seqimage"
//   8    uint32 version = 1, height H, width W, channels (1 to 4), classes (2 to 256), 0
//   32   uint64 images to train on, uint64 images to evaluate on (they come last)
//   48   float64 mean (4), float64 deviation (4): of x/255 by channel, over the images to train on
//   112  zeros, to 128
//   128  labels, a byte each, then pixels, a byte each: (images, H, W, channels)
//
// It is mapped, not read: it may be larger than the memory. An image is P = (H/p)(W/p) patches of
// p x p pixels, rows of patches first, and a patch D = p p channels numbers: its rows, then its
// columns, then channels, each (x/255 - mean) / deviation. The model reads T = P + 1 tokens: the
// patches and <CLS>, which is last and where the class is asked for. [CausalRN paper, Fig. 7]
//
// Image k of training belongs to epoch e = k / train and is image p_e(k mod train), where p_e, a
// permutation, is a function of seed and epoch, as in text.h: the step number is all that a resumed
// run must know.
#ifndef SEQ_DATA_IMAGES_H
#define SEQ_DATA_IMAGES_H

#include "text.h" // mapped files, their checksums and permutations

enum { IMAGES_HEADER = 128, IMAGES_SIDE = 1024, IMAGES_CHANNELS = 4, IMAGES_CLASSES = 256 };
#define IMAGES_MAGIC "seqimage"

typedef struct {
    const char *path; // options
    int patch;
    TextFile file; // filled by images_open; a token of it is a byte
    size_t H, W, channels, classes, train, test;
    const unsigned char *labels, *pixels;       // (train + test), (train + test, H, W, channels)
    float levels[IMAGES_CHANNELS][256];         // what a pixel of each value becomes
    char checksum[17];
} Images;

// images_options: add the options of images to the command line.
static inline void images_options(Options *options, Images *im)
{
    const Option rows[] = {
        {"images", OPT_STRING, &im->path, NULL, 0, 0, "FILE", RUNTIME,
         "images: a file of data/images.py, to train and to evaluate on"},
        {"patch", OPT_INT, &im->patch, "2", 1, IMAGES_SIDE, "pixels", DEFINES_DATA,
         "images: side of a patch, which is a token"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

// images_P: patches of an image.
static inline size_t images_P(const Images *im)
{
    return im->H / (size_t)im->patch * (im->W / (size_t)im->patch);
}

// images_D: numbers of a patch.
static inline size_t images_D(const Images *im)
{
    return (size_t)im->patch * (size_t)im->patch * im->channels;
}

// images_kind: what a file that is no file of images seems to be, in words for errors.
static inline const char *images_kind(const unsigned char *p, size_t n)
{
    if (n >= 4 && !memcmp(p, "\0\0\x08", 3) && (p[3] == 1 || p[3] == 3))
        return "an IDX file";
    if (n >= 4 && !memcmp(p, "PK\3\4", 4))
        return "a zip file, perhaps .npz";
    if (n >= 2 && !memcmp(p, "\x1f\x8b", 2))
        return "a gzip file";
    return text_kind(p, n);
}

// images_u64: the little-endian 64-bit number at p.
static inline uint64_t images_u64(const unsigned char *p)
{
    return text_u32(p) | (uint64_t)text_u32(p + 4) << 32;
}

// images_size: read the sizes in the header; dies unless they are in range and those of the file.
static inline void images_size(Images *im)
{
    const TextFile *f = &im->file;
    const unsigned char *p = f->map;
    const char *const names[] = {"height", "width", "channels", "classes"};
    const uint32_t least[] = {1, 1, 1, 2};
    const uint32_t most[] = {IMAGES_SIDE, IMAGES_SIDE, IMAGES_CHANNELS, IMAGES_CLASSES};
    size_t *const fields[] = {&im->H, &im->W, &im->channels, &im->classes};
    const size_t n_magic = strlen(IMAGES_MAGIC);
    if (f->bytes < n_magic || memcmp(p, IMAGES_MAGIC, n_magic))
        die(EXIT_DATA, "--images %s: expected a file of images (it begins with %s), got %s\n"
            "hint: data/images.py makes one of IDX, CIFAR-10 .bin and .npz files", im->path,
            IMAGES_MAGIC, images_kind(p, f->bytes));
    if (f->bytes < IMAGES_HEADER)
        die(EXIT_DATA, "--images %s: expected a header of %d bytes, the file has %zu", im->path,
            IMAGES_HEADER, f->bytes);
    if (text_u32(p + 8) != 1)
        die(EXIT_DATA, "--images %s: expected version 1, got %u", im->path, text_u32(p + 8));
    for (int i = 0; i < 4; i++) {
        const uint32_t value = text_u32(p + 12 + 4 * i);
        if (value < least[i] || value > most[i])
            die(EXIT_DATA, "--images %s: its header says %s %u; expected %u to %u", im->path,
                names[i], value, least[i], most[i]);
        *fields[i] = value;
    }
    const uint64_t train = images_u64(p + 32), test = images_u64(p + 40);
    const size_t each = 1 + im->H * im->W * im->channels, body = f->bytes - IMAGES_HEADER;
    const size_t held = body / each, rest = body % each; // no product of what the header says
    if (!train || !test)
        die(EXIT_DATA, "--images %s: need 1 image to train on and 1 to evaluate on, have %llu and "
            "%llu", im->path, (unsigned long long)train, (unsigned long long)test);
    if (train > held || train + test != held || rest) // a sum that wraps has two large parts
        die(EXIT_DATA, "--images %s: its header says %llu + %llu images of %zu bytes with their "
            "labels; the file holds %zu, and %zu bytes more\nhint: the file is cut off, or damaged",
            im->path, (unsigned long long)train, (unsigned long long)test, each, held, rest);
    im->train = (size_t)train;
    im->test = (size_t)test;
}

// images_map: map the file and find its labels and pixels; dies over one that is not what its
// header says.
static inline void images_map(Images *im)
{
    double numbers[2][IMAGES_CHANNELS]; // mean, deviation
    im->file = text_map("--images", im->path);
    images_size(im);
    memcpy(numbers, im->file.map + 48, sizeof numbers);
    for (size_t c = 0; c < im->channels; c++) {
        const double mean = numbers[0][c], deviation = numbers[1][c];
        if (!(mean >= 0 && mean <= 1) || !(deviation >= 1e-4 && deviation <= 1))
            die(EXIT_DATA, "--images %s: channel %zu has mean %g and deviation %g; expected 0 to 1 "
                "and 0.0001 to 1, for pixels of 0 to 1", im->path, c, mean, deviation);
        for (int x = 0; x < 256; x++)
            im->levels[c][x] = (float)((x / 255.0 - mean) / deviation);
    }
    const size_t n = im->train + im->test;
    im->labels = im->file.map + IMAGES_HEADER;
    im->pixels = im->labels + n;
    for (size_t i = 0; i < n; i++)
        if (im->labels[i] >= im->classes)
            die(EXIT_DATA, "--images %s: label %zu is %d; expected one from 0 to %zu", im->path, i,
                im->labels[i], im->classes - 1);
    im->file.first = IMAGES_HEADER;
    im->file.n = im->file.bytes - IMAGES_HEADER;
    text_checksum(&im->file, im->checksum);
}

// images_open: map the file and say what it holds. With `training` there must be a batch of B
// images to train on. Ends with images_close.
static inline void images_open(Images *im, size_t B, int training)
{
    char name[4096];
    const size_t p = (size_t)im->patch;
    if (!im->path)
        die(EXIT_USAGE, "--task images needs --images FILE\n"
            "hint: data/fashion_mnist.sh and data/cifar10.sh make one");
    images_map(im);
    if (im->H % p || im->W % p)
        die(EXIT_USAGE, "--patch %zu: the images of %s are %zu x %zu; expected a patch that "
            "divides both", p, im->path, im->H, im->W);
    if (training && im->train < B)
        die(EXIT_DATA, "--images %s: need %zu images for a batch, have %zu to train on\n"
            "hint: a smaller --batch-size", im->path, B, im->train);
    printf("images: %s, checksum %s: %zu to train on, %zu to evaluate on, %zu x %zu x %zu, %zu "
           "classes; %zu patches of %zu numbers, <CLS> last\n",
           masked(im->path, name, sizeof name), im->checksum, im->train, im->test, im->H, im->W,
           im->channels, im->classes, images_P(im), images_D(im));
}

// images_close: give everything back.
static inline void images_close(Images *im)
{
    if (im->file.map)
        munmap((void *)im->file.map, im->file.bytes);
    memset(&im->file, 0, sizeof im->file);
    im->labels = im->pixels = NULL;
}

// images_index: where in the file the image of a stream is: for STREAM_TRAIN + k that of number k
// of training, for STREAM_EVAL + k the one number k to evaluate on, in an order that no seed
// changes: any first ones are a fair sample. Returns train + test if k is past the last of these.
static inline size_t images_index(const Images *im, uint64_t seed, uint64_t stream)
{
    if (stream >= STREAM_EVAL) {
        const uint64_t k = stream - STREAM_EVAL;
        return k < im->test ? im->train + text_shuffle(0, STREAM_EVAL, k, im->test)
                            : im->train + im->test;
    }
    const uint64_t k = stream - STREAM_TRAIN;
    return text_shuffle(seed, STREAM_TRAIN + k / im->train, k % im->train, im->train);
}

// images_fill: patches (P,D) = those of the image of a stream, standardised; returns its label, or
// -1, patches unchanged, if the stream is past the last image to evaluate on.
static inline int images_fill(const Images *im, uint64_t seed, uint64_t stream, float *patches)
{
    const size_t i = images_index(im, seed, stream), p = (size_t)im->patch;
    const size_t H = im->H, W = im->W, channels = im->channels;
    if (i >= im->train + im->test)
        return -1;
    const unsigned char *x = im->pixels + i * H * W * channels;
    for (size_t row = 0; row < H; row += p)
        for (size_t column = 0; column < W; column += p)
            for (size_t y = row; y < row + p; y++)
                for (size_t k = 0; k < p * channels; k++)
                    *patches++ = im->levels[k % channels][x[(y * W + column) * channels + k]];
    return im->labels[i];
}

#endif
