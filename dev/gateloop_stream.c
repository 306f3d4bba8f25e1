// gateloop_stream.c: the loss of a GateLoop that was trained on text, over all of another text, in
// the two ways that papers count it: windows of --context tokens that each start from nothing, and
// one stream, whose state goes on from window to window. Perplexity is exp(nats / targets) by token
// and exp(nats / words) by word, whoever counts the words (dev/figures/gateloop_wikitext103.sh).
//
//   make build/gateloop_stream    (includes train_gateloop.c whole)
//   build/gateloop_stream --preset wikitext103 --load CHECKPOINT --val FILE
//
// Options are the trainer's. Every token but the first is a target; the last window may be shorter.

#define TESTING // without the trainer's own main
#include "../train_gateloop.c"

// stream_window: nats of n tokens of the text from `at`, one sequence, given what the states that
// acts.S holds remember, which go on; `fresh`: given nothing.
static double stream_window(Model *m, const TextFile *text, size_t at, size_t n, int fresh)
{
    const Acts *acts = &m->acts;
    for (size_t t = 0; t < n; t++) {
        m->batch.inputs[t] = text_token(text, at + t);
        m->batch.targets[t] = text_token(text, at + t + 1);
    }
    embed_forward(acts->x, m->batch.inputs, m->params.wte, NULL, 1, n, m->C);
    for (size_t l = 0; l < m->L; l++) {
        const Acts k = layer_acts(m, l);
        block_forward(m, k, layer_params(m, &m->params, l), acts->x + (l + 1) * m->T * m->C,
                      fresh ? NULL : k.S, 1, n);
    }
    head_forward(m, acts->logits, acts->last, acts->x + m->L * m->T * m->C, n);
    return (double)n * crossentropy(acts->losses, m->batch.predictions, m->dacts.dlogits,
                                    acts->logits, m->batch.targets, n, m->V);
}

// stream_nats: of all targets of the text; `carry`: as one stream. The first window is fresh.
static double stream_nats(Model *m, const TextFile *text, int carry)
{
    double nats = 0;
    for (size_t at = 0; at + 1 < text->n; at += m->T) {
        const size_t left = text->n - 1 - at;
        nats += stream_window(m, text, at, left < m->T ? left : m->T, !carry || at == 0);
        if (at / m->T % 64 == 63)
            fprintf(stderr, "%s: %zu of %zu tokens\n", carry ? "stream" : "windows", at + m->T,
                    text->n);
    }
    return nats;
}

// main: parse, load, evaluate twice; a RESULT line for each way.
int main(int argc, char **argv)
{
    static Model m;
    static Options options;
    training_begin();
    config_options(&options, &config);
    options_parse(&options, PRESETS, argc, argv,
                  "gateloop_stream: the loss of a trained GateLoop over a text, two ways.",
                  preset_cost);
    config_check(&config);
    const Text *text = &config.task_options.text;
    if (TASKS[config.task].symbols || !text->val_path || !config.training.load)
        die(EXIT_USAGE, "expected --task text, --val FILE and --load CHECKPOINT");
    config.training.batch_size = 1, config.training.steps = 0;
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    model_plan(&m, &config);
    model_alloc(&m);
    training_load(&config.training, &m.weights, &options, ARCHITECTURE);
    for (int carry = 0; carry < 2; carry++) {
        const double nats = stream_nats(&m, &text->val, carry), n = (double)(text->val.n - 1);
        if (!is_finite_bits(nats))
            die(EXIT_FAIL, "%s: the loss is %g; expected a number", text->val_path, nats);
        printf("RESULT state=%s context=%zu targets=%.0f nats=%.9g loss=%.6f token_ppl=%.4f\n",
               carry ? "carried" : "fresh", m.T, n, nats, nats / n, exp(nats / n));
    }
    model_free(&m);
    return training_end();
}
