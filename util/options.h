// options.h: the command line as one table. A row names an option, says where its value goes, its
// default, its range and its unit; the same table drives parsing (getopt_long), --help, the printed
// configuration, the log's header and the metadata of checkpoints.
//
// A preset is a named string of options ("--string-size 32 --layers 2"); what the user types
// overrides it. Every mistake is one error with exit code 2 that names the option, what was
// expected and what it got.
#ifndef SEQ_UTIL_OPTIONS_H
#define SEQ_UTIL_OPTIONS_H

#include "check.h"
#include <ctype.h>
#include <getopt.h>

typedef enum {
    OPT_INT,    // int; min and max inclusive
    OPT_U64,    // uint64_t
    OPT_REAL,   // double; min and max inclusive
    OPT_CHOICE, // int: the index of the word in `unit`, words separated by '|'
    OPT_STRING, // const char *; default NULL
    OPT_FLAG    // int: 1 if given; takes no value
} OptionType;

// What an option is about. Those that define model, data and training are stored in checkpoints;
// RUNTIME ones (paths, threads, intervals) are not. --load needs the model's to agree, --resume all
// of them.
enum { RUNTIME = 0, DEFINES_TRAINING = 1, DEFINES_DATA = 2, DEFINES_MODEL = 3 };

typedef struct {
    const char *name;
    OptionType type;
    void *value;      // int *, uint64_t *, double * or const char **, by type
    const char *def;  // the default, as one would type it; NULL for strings and flags
    double min, max;  // of OPT_INT and OPT_REAL
    const char *unit; // shown in --help; of OPT_CHOICE: the words
    int defines;      // RUNTIME or DEFINES_...
    const char *help;
} Option;

typedef struct {
    const char *name, *options, *help;
} Preset;

enum { OPTIONS_MAX = 80, OPTION_VALUE_MAX = 256 };

// A command line: its rows, added table by table.
typedef struct {
    Option rows[OPTIONS_MAX];
    int n, typed[OPTIONS_MAX]; // typed: by the user, not by a preset
    const char *data_checksum; // of the file trained on and of its part; NULL: there is none
} Options;

// options_add: append n rows to the command line.
static inline void options_add(Options *options, const Option *rows, size_t n)
{
    if ((size_t)options->n + n > OPTIONS_MAX)
        die(EXIT_FAIL, "more than %d options\nhint: raise OPTIONS_MAX", OPTIONS_MAX);
    memcpy(options->rows + options->n, rows, n * sizeof *rows);
    options->n += (int)n;
}

// option_word: copy word i of "a|b|c" into word; 0 if there is none.
static inline int option_word(const char *words, int i, char *word, size_t size)
{
    while (i-- > 0) {
        words = strchr(words, '|');
        if (!words)
            return 0;
        words++;
    }
    snprintf(word, size, "%.*s", (int)strcspn(words, "|"), words);
    return 1;
}

// option_format: the option's present value as one would type it. A real keeps 17 digits only if it
// needs them.
static inline void option_format(const Option *o, char *text, size_t size)
{
    if (o->type == OPT_INT || o->type == OPT_FLAG)
        snprintf(text, size, "%d", *(int *)o->value);
    else if (o->type == OPT_U64)
        snprintf(text, size, "%llu", (unsigned long long)*(uint64_t *)o->value);
    else if (o->type == OPT_CHOICE)
        option_word(o->unit, *(int *)o->value, text, size);
    else if (o->type == OPT_STRING)
        snprintf(text, size, "%s", *(const char **)o->value ? *(const char **)o->value : "");
    else {
        snprintf(text, size, "%.9g", *(double *)o->value);
        if (strtod(text, NULL) != *(double *)o->value)
            snprintf(text, size, "%.17g", *(double *)o->value);
    }
}

// option_set_number: parse an integer or a real: the whole string, in range, never NaN.
static inline void option_set_number(const Option *o, const char *text)
{
    char *end = NULL;
    int looks_decimal =
        isdigit((unsigned char)text[0]) || ((text[0] == '-' || text[0] == '.') && text[1]);
    const char *expected = o->type == OPT_REAL ? "a number" : "a whole number";
    errno = 0;
    double x = strtod(text, &end);
    if (o->type == OPT_REAL) {
        if (!looks_decimal || *end || strpbrk(text, "xXnN"))
            die(EXIT_USAGE, "--%s: expected %s, got \"%.200s\"", o->name, expected, text);
        if (errno == ERANGE || !is_finite_bits(x))
            die(EXIT_USAGE, "--%s: \"%.200s\" does not fit a double precision number", o->name,
                text);
        if (!(x >= o->min && x <= o->max))
            die(EXIT_USAGE, "--%s: expected %s from %g to %g, got %.200s", o->name, expected,
                o->min, o->max, text);
        *(double *)o->value = x;
        return;
    }
    const char *digits = text + (text[0] == '-');
    if (!*digits || strspn(digits, "0123456789") != strlen(digits))
        die(EXIT_USAGE, "--%s: expected %s, got \"%.200s\"", o->name, expected, text);
    if (o->type == OPT_U64) {
        unsigned long long u = strtoull(text, &end, 10);
        if (errno == ERANGE || text[0] == '-')
            die(EXIT_USAGE, "--%s: expected %s from 0 to 18446744073709551615, got %.200s", o->name,
                expected, text);
        *(uint64_t *)o->value = u;
        return;
    }
    if (!(x >= o->min && x <= o->max))
        die(EXIT_USAGE, "--%s: expected %s from %.0f to %.0f, got %.200s", o->name, expected,
            o->min, o->max, text);
    *(int *)o->value = (int)x;
}

// option_set: give the option the value typed as `text`.
static inline void option_set(const Option *o, const char *text)
{
    char word[OPTION_VALUE_MAX];
    if (o->type == OPT_STRING) {
        if (!*text)
            die(EXIT_USAGE, "--%s: expected %s, got an empty string", o->name, o->unit);
        *(const char **)o->value = text;
    } else if (o->type == OPT_CHOICE) {
        int i = 0;
        for (; option_word(o->unit, i, word, sizeof word); i++)
            if (!strcmp(word, text)) {
                *(int *)o->value = i;
                return;
            }
        die(EXIT_USAGE, "--%s: expected one of %s, got \"%.200s\"", o->name, o->unit, text);
    } else if (o->type == OPT_FLAG)
        *(int *)o->value = 1;
    else
        option_set_number(o, text);
}

// edit_distance: the number of single-character edits from a to b (both under 64 characters).
static inline int edit_distance(const char *a, const char *b)
{
    int row[64], n = (int)strlen(b);
    if (n > 63 || strlen(a) > 63)
        return 64;
    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

// options_unknown: die over an option that is not in the table, naming the nearest that is.
SEQ_NORETURN
static inline void options_unknown(const Options *options, const char *got)
{
    char name[64];
    const char *nearest = "help";
    snprintf(name, sizeof name, "%s", got + strspn(got, "-"));
    name[strcspn(name, "=")] = 0;
    for (int i = 0; i < options->n; i++)
        if (edit_distance(name, options->rows[i].name) < edit_distance(name, nearest))
            nearest = options->rows[i].name;
    die(EXIT_USAGE,
        "unknown option \"%.200s\": the nearest is --%s\nhint: --help lists all options", got,
        nearest);
}

// options_find: the row of that name, NULL if there is none.
static inline const Option *options_find(const Options *options, const char *name)
{
    for (int i = 0; i < options->n; i++)
        if (!strcmp(options->rows[i].name, name))
            return &options->rows[i];
    return NULL;
}

// options_parse_words: apply argv[1..argc) to the table; `source` names them in errors ("" = the
// command line).
static inline void options_parse_words(const Options *options, int argc, char **argv,
                                       const char *source)
{
    struct option longs[OPTIONS_MAX + 1];
    int seen[OPTIONS_MAX] = {0};
    memset(longs, 0, sizeof longs);
    for (int i = 0; i < options->n; i++) {
        longs[i].name = options->rows[i].name;
        longs[i].has_arg = options->rows[i].type == OPT_FLAG ? no_argument : required_argument;
        longs[i].val = 256 + i;
    }
    for (int i = 1; i < argc; i++) { // whole names only, which getopt_long would not insist on
        size_t length = strcspn(argv[i], "="), known = strncmp(argv[i], "--", 2) || length == 2;
        for (int k = 0; k < options->n && !known; k++)
            known = strlen(options->rows[k].name) == length - 2 &&
                    !strncmp(options->rows[k].name, argv[i] + 2, length - 2);
        if (!known)
            options_unknown(options, argv[i]);
    }
    opterr = 0;
    optind = 0; // 0 asks glibc to start afresh; macOS reads it as 1 once optreset is set
#ifdef __APPLE__
    optreset = optind = 1;
#endif
    for (int code; (code = getopt_long(argc, argv, "+:h", longs, NULL)) != -1;) {
        if (code == 'h') {
            option_set(options_find(options, "help"), "");
            continue;
        }
        int i = (code == ':' ? optopt : code) - 256;
        if (code == '?' && optopt >= 256)
            die(EXIT_USAGE, "--%s takes no value", options->rows[optopt - 256].name);
        if (code == '?') { // a single dash: getopt_long is still at "-abc" but past "-a"
            int here =
                optopt && optind < argc && argv[optind][0] == '-' && argv[optind][1] == optopt;
            options_unknown(options, argv[here ? optind : optind - 1]);
        }
        if (code == ':' || (optarg && !strncmp(optarg, "--", 2)))
            die(EXIT_USAGE, "--%s needs a value (%s)%s%s", options->rows[i].name,
                options->rows[i].unit, code == ':' ? "" : ", got the option ",
                code == ':' ? "" : optarg);
        if (seen[i]++)
            die(EXIT_USAGE, "--%s is given twice%s%s\nhint: keep one of them",
                options->rows[i].name, *source ? " in " : "", source);
        option_set(&options->rows[i], optarg ? optarg : "");
    }
    if (optind < argc)
        die(EXIT_USAGE,
            "unexpected word \"%.200s\": options are written --name value\nhint: --help lists all "
            "options",
            argv[optind]);
}

// options_apply_preset: apply a preset's string of options to the table.
static inline void options_apply_preset(const Options *options, const Preset *preset)
{
    static char text[1024]; // values of string options keep pointing here
    char *words[2 * OPTIONS_MAX] = {(char *)"preset"};
    int count = 1;
    snprintf(text, sizeof text, "%s", preset->options);
    for (char *w = strtok(text, " "); w && count < 2 * OPTIONS_MAX; w = strtok(NULL, " "))
        words[count++] = w;
    options_parse_words(options, count, words, preset->name);
}

// options_default: give an option of the table another default.
static inline void options_default(Options *options, const char *name, const char *def)
{
    for (int i = 0; i < options->n; i++)
        if (!strcmp(options->rows[i].name, name))
            options->rows[i].def = def;
}

// options_reset: give every option that has a default its default.
static inline void options_reset(const Options *options)
{
    for (int i = 0; i < options->n; i++)
        if (options->rows[i].def)
            option_set(&options->rows[i], options->rows[i].def);
}

// options_help: print every option with type, default and unit, and every preset. `cost` (may be
// NULL) gives a preset's cost as text: it is called with the preset's options applied.
static inline void options_help(const Options *options, const Preset *presets, const char *usage,
                                void (*cost)(char *text, size_t size))
{
    printf("%s\n\nOptions (--name value or --name=value):\n", usage);
    for (int i = 0; i < options->n; i++) {
        char left[128];
        const Option *o = &options->rows[i];
        snprintf(left, sizeof left, "--%s %s", o->name, o->type == OPT_FLAG ? "" : o->unit);
        printf("  %-46s %s", left, o->help);
        if (o->def)
            printf(" [%s]", o->def);
        printf("\n");
    }
    printf("\nPresets (--preset NAME; other options given override it; \"small\", where there is\n"
           "one, runs without --task and --preset):\n");
    for (const Preset *p = presets; p && p->name; p++) {
        char text[64] = "";
        options_reset(options);
        options_apply_preset(options, p);
        if (cost)
            cost(text, sizeof text);
        printf("  %-16s %s%s%s\n  %-16s   %s\n", p->name, p->help, *text ? "; " : "", text, "",
               p->options);
    }
}

// options_typed: whether argv[1..argc) gives the option of that name.
static inline int options_typed(int argc, char **argv, const char *name)
{
    const size_t n = strlen(name);
    for (int i = 1; i < argc; i++)
        if (!strncmp(argv[i], "--", 2) && !strncmp(argv[i] + 2, name, n) &&
            (!argv[i][2 + n] || argv[i][2 + n] == '='))
            return 1;
    return 0;
}

// options_parse: set the defaults, then the preset named by --preset, then what the user typed;
// `typed` =.
// Without --preset and --task it is the preset "small", where there is one: the sizes of what runs
// without arguments are not those of every task. --help prints and exits 0. The table holds --help
// and --preset like any other option. `presets` ends with a NULL name.
static inline void options_parse(Options *options, const Preset *presets, int argc, char **argv,
                                 const char *usage, void (*cost)(char *text, size_t size))
{
    const Option *help = options_find(options, "help"), *preset = options_find(options, "preset");
    options_reset(options);
    options_parse_words(options, argc, argv, "");
    for (int i = 0; i < options->n; i++)
        options->typed[i] = options_typed(argc, argv, options->rows[i].name);
    if (help && *(int *)help->value) {
        options_help(options, presets, usage, cost);
        exit(fflush(stdout) || ferror(stdout) ? EXIT_DATA : 0);
    }
    const char *typed = preset ? *(const char **)preset->value : NULL;
    const char *name = typed ? typed : options_typed(argc, argv, "task") ? NULL : "small";
    for (const Preset *p = presets; name && p->name; p++)
        if (!strcmp(p->name, name)) {
            options_apply_preset(options, p);
            options_parse_words(options, argc, argv, "");
            return;
        }
    if (typed)
        die(EXIT_USAGE, "--preset: there is no preset \"%.200s\"\nhint: --help lists them", typed);
}

// options_print: the whole configuration on `file`, each line starting with `prefix`.
static inline void options_print(FILE *file, const char *prefix, const Options *options)
{
    char value[OPTION_VALUE_MAX];
    fputs(prefix, file);
    for (int i = 0, width = 0; i < options->n; i++) {
        if (options->rows[i].type == OPT_STRING || options->rows[i].type == OPT_FLAG)
            continue;
        option_format(&options->rows[i], value, sizeof value);
        width += (int)(strlen(options->rows[i].name) + strlen(value)) + 2;
        if (width > 96) {
            fprintf(file, "\n%s", prefix);
            width = 0;
        }
        fprintf(file, " %s=%s", options->rows[i].name, value);
    }
    if (options->data_checksum)
        fprintf(file, " data_checksum=%s", options->data_checksum);
    fputc('\n', file);
}

#endif
