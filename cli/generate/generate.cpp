// lowkv generate: an answer, streamed from a packed cache.

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/model.h"
#include "common/options.h"
#include "common/terminal.h"
#include "generate/report.h"
#include "lowkv/scheme.h"
#include "lowkv_ggml.h"
#include "platform/command.h"

namespace lowkv::cli {

namespace {

constexpr const char* footer = R"(Examples:
  lowkv generate -m model.gguf -p "Why is the sky blue?"
  lowkv generate -m model.gguf -f report.txt -p "Summarise this report." --scheme kivi4
  lowkv generate -m model.gguf -f report.txt -p "Summarise this report." --stock f16
  cat story.txt | lowkv generate -m model.gguf --no-chat -n 200 --temp 0

The prompt is --file's text, then --prompt's; with neither, what stdin holds. The answer goes to
stdout, everything else to stderr. Ctrl-C ends the answer and still prints the figures;
while the prompt is read it ends the command, with status 130.)";

struct Options {
    std::string model, prompt, file, system, stock, scheme = chosen_scheme();
    std::vector<std::string> calibrations;
    int answer = 512;
    std::uint32_t context = 0, chunk = 512;
    unsigned threads = 0;
    float temperature = 0.8f, top_p = 0.95f, min_p = 0.05f;
    int top_k = 40;
    std::uint32_t seed = LLAMA_DEFAULT_SEED;
    bool chat = true, verbose = false, quiet = false;
};

volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C ends the answer, a second one the process.
class InterruptGuard {
  public:
    InterruptGuard() {
        before_ = std::signal(SIGINT, [](int) {
            interrupted = 1;
            std::signal(SIGINT, SIG_DFL);
        });
    }
    ~InterruptGuard() { std::signal(SIGINT, before_); }
    InterruptGuard(const InterruptGuard&) = delete;
    InterruptGuard& operator=(const InterruptGuard&) = delete;

  private:
    void (*before_)(int);
};

llama_sampler_ptr make_sampler(const Options& options) {
    llama_sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain.get(), sampler); };
    if (options.temperature <= 0) {
        add(llama_sampler_init_greedy());
        return chain;
    }
    if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
    if (options.top_p < 1) add(llama_sampler_init_top_p(options.top_p, 1));
    if (options.min_p > 0) add(llama_sampler_init_min_p(options.min_p, 1));
    add(llama_sampler_init_temp(options.temperature));
    add(llama_sampler_init_dist(options.seed));
    return chain;
}

std::string prompt_text(const Options& options) {
    std::string text;
    if (!options.file.empty()) text = read_text(options.file);
    if (options.file.empty() && options.prompt.empty()) {
        if (is_terminal(stdin))
            throw UsageError("there is no prompt: give -p TEXT or -f FILE, or pipe a text in");
        text = read_text("-");
    }
    if (!text.empty() && !options.prompt.empty()) text += "\n\n";
    text += options.prompt;
    if (text.empty()) throw UsageError("the prompt is empty");
    return text;
}

std::vector<llama_token> prompt_tokens(const Model& model, const Options& options) {
    const std::string text = prompt_text(options);
    if (!options.chat) {
        auto tokens =
            model.tokenize(options.system.empty() ? text : options.system + "\n\n" + text, true);
        if (tokens.empty()) throw UsageError("the prompt is empty");
        return tokens;
    }
    const std::optional<std::string> chat = model.chat(options.system, text);
    if (!chat) {
        throw UsageError(
            "this model has no chat template that llama.cpp knows: use --no-chat (the prompt as it "
            "is)");
    }
    // A template may spell out the beginning-of-sequence token; it must not come twice.
    const llama_token bos = llama_vocab_bos(model.vocab());
    const char* spelled =
        bos == LLAMA_TOKEN_NULL ? nullptr : llama_vocab_get_text(model.vocab(), bos);
    const bool has_bos = spelled != nullptr && *spelled != '\0' && chat->rfind(spelled, 0) == 0;
    return model.tokenize(*chat, !has_bos);
}

// Cells for the prompt and the answer; refuses before anything is computed.
std::uint32_t context_cells(const Model& model, const Options& options, std::size_t prompt) {
    const std::uint32_t trained = model.train_context();
    if (options.context > trained) {
        std::fprintf(
            stderr, "lowkv: the model was trained on %u tokens, beyond them it may talk nonsense\n",
            trained);
    }
    const std::uint32_t limit = options.context != 0 ? options.context : trained;
    if (prompt >= limit) {
        throw Failure("the prompt has " + count(prompt) + " tokens and the context " +
                      count(limit) + ": nothing was computed. " +
                      (options.context != 0 && options.context < trained
                           ? "Use a larger -c (the model was trained on " + count(trained) + ")"
                           : std::string("Shorten the prompt, or force a larger -c")));
    }
    if (options.context != 0) return options.context;
    if (options.answer < 0) return trained;
    const std::size_t wanted =
        (prompt + static_cast<std::size_t>(options.answer) + 255) / 256 * 256;
    return static_cast<std::uint32_t>(std::min<std::size_t>(wanted, trained));
}

// Reads the prompt and streams an answer to stdout.
Outcome answer(const Model& model, Context& context, const std::vector<llama_token>& prompt,
               std::size_t chunk, const Options& options) {
    const llama_sampler_ptr sampler = make_sampler(options);
    const InterruptGuard guard;
    Outcome outcome;
    outcome.end = "stopped by Ctrl-C";
    {
        Progress progress("reading the prompt:", !options.quiet);
        const Stopwatch watch;
        for (std::size_t at = 0; at < prompt.size() && interrupted == 0; at += chunk) {
            const std::size_t n = std::min(chunk, prompt.size() - at);
            context.decode({prompt.data() + at, n});
            outcome.prompt += n;
            progress.show(
                outcome.prompt, prompt.size(),
                fixed(static_cast<double>(outcome.prompt) / watch.seconds(), 0) + " tokens/s");
        }
        outcome.prompt_seconds = watch.seconds();
    }
    std::string pending;  // half of a UTF-8 character is never shown
    const Stopwatch watch;
    outcome.read = outcome.prompt == prompt.size();
    while (outcome.read && interrupted == 0) {
        if (options.answer >= 0 && outcome.answer >= static_cast<std::size_t>(options.answer)) {
            outcome.end = "end: -n tokens";
            break;
        }
        const llama_token token = llama_sampler_sample(sampler.get(), context.get(), -1);
        if (llama_vocab_is_eog(model.vocab(), token)) {
            outcome.end = "end of the answer";
            break;
        }
        pending += model.piece(token);
        const std::size_t whole = complete_utf8(pending);
        show(pending.substr(0, whole));
        pending.erase(0, whole);
        ++outcome.answer;
        if (context.size() == context.cells()) {
            outcome.end = "the context is full: the answer was cut here; use a larger -c";
            break;
        }
        context.decode({&token, 1});
    }
    outcome.answer_seconds = watch.seconds();
    show(pending + "\n");
    return outcome;
}

int generate(const Options& options) {
    for (const float value : {options.temperature, options.top_p, options.min_p})
        if (!std::isfinite(value)) throw UsageError("--temp, --top-p and --min-p must be numbers");
    ContextOptions settings;
    if (!options.stock.empty()) settings.stock = cache_type("--stock", options.stock);
    route_logs(options.verbose);
    const bool calibrated = parse_scheme(options.scheme).needs_calibration();
    const Model model(options.model);
    model.use_calibrations(options.calibrations, calibrated);
    const std::vector<llama_token> prompt = prompt_tokens(model, options);
    settings.cells = context_cells(model, options, prompt.size());
    settings.chunk = std::min(options.chunk, settings.cells);
    settings.threads = options.threads;

    Bar ours, stock;
    {
        settings.scheme = options.scheme;
        Context context(model, settings);
        ours.outcome = answer(model, context, prompt, settings.chunk, options);
        if (!options.quiet) std::fputs(figures(ours.outcome, context).c_str(), stderr);
        if (!ours.outcome.read) return 128 + SIGINT;
        ours.name = options.scheme;
        ours.cache_bytes = ggml::stats().held_bytes();
    }
    if (options.stock.empty() || interrupted != 0) return 0;
    settings.scheme.reset();
    Context context(model, settings);
    stock.name = "stock " + options.stock;
    if (!options.quiet)
        std::fprintf(stderr, "\n== The same by llama.cpp's own %s cache\n", options.stock.c_str());
    stock.outcome = answer(model, context, prompt, settings.chunk, options);
    if (!stock.outcome.read) return 128 + SIGINT;
    stock.cache_bytes = static_cast<double>(llama_state_seq_get_size(context.get(), 0));
    std::fputs(bars(ours, stock).c_str(), stderr);
    return 0;
}

}  // namespace

void add_generate(Command app, int& status) {
    auto options = std::make_shared<Options>();
    Command command =
        app.add_command("generate", "An answer from a model, streamed from a packed cache", footer);
    add_model(command, options->model);
    command.option("-p,--prompt", &options->prompt, "The prompt, or what follows --file's text");
    command.option("-f,--file", &options->file,
                   "A text file that the prompt starts with; - is stdin");
    command.option("--system", &options->system, "The system message");
    command.defaulted("-n,--tokens", &options->answer,
                      "At most so many tokens of answer; -1: until it ends");
    add_scheme(command, options->scheme);
    add_calibrations(command, options->calibrations);
    command.defaulted(
        "-c,--context", &options->context,
        "Cells of the cache; 0: as many as prompt and answer need, within the model's context");
    add_threads(command, options->threads);
    add_chunk(command, options->chunk, "Prompt tokens computed at once");
    command.defaulted("--temp", &options->temperature, "Temperature; 0 takes the likeliest token",
                      {range(0.0f, 100.0f)});
    command.defaulted("--top-k", &options->top_k, "Sample from the k likeliest tokens; 0: all");
    command.defaulted("--top-p", &options->top_p, "... from the likeliest that make up p; 1: all",
                      {range(0.0f, 1.0f)});
    command.defaulted("--min-p", &options->min_p,
                      "... from those at least p times as likely as the best", {range(0.0f, 1.0f)});
    command.option("--seed", &options->seed,
                   "Seed of the sampler (default: another one each time)");
    command.flag("--chat,!--no-chat", &options->chat,
                 "Put the model's chat template around the prompt (default); --no-chat: the "
                 "prompt as it is");
    command.option("--stock", &options->stock,
                   "Then answer with llama.cpp's own cache of this type (f16, q8_0, ...) too, and "
                   "compare speed and memory");
    command.flag("-q,--quiet", &options->quiet, "No progress and no figures");
    add_verbose(command, options->verbose);
    command.callback([options, &status] { status = generate(*options); });
}

}  // namespace lowkv::cli
