#include "generate/report.h"

#include <algorithm>

#include "common/machine.h"
#include "common/terminal.h"
#include "lowkv/error.h"
#include "lowkv_ggml.h"

namespace lowkv::cli {

namespace {

double rate(std::size_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// One line per cache; the longer bar has the full width.
template <class Figure, class Text>
std::string group(const std::string& title, const Bar& ours, const Bar& stock, Figure figure,
                  Text text) {
    constexpr double width = 40;
    const double most = std::max(figure(ours), figure(stock));
    const std::size_t name_width = std::max(ours.name.size(), stock.name.size());
    std::string out = title + "\n";
    for (const Bar* bar : {&ours, &stock}) {
        const double value = figure(*bar);
        const auto filled = static_cast<std::size_t>(most > 0 ? width * value / most + 0.5 : 0);
        out += concat("  ", bar->name, std::string(name_width - bar->name.size() + 2, ' '));
        for (std::size_t i = 0; i < std::max<std::size_t>(filled, 1); ++i) out += "\u2588";
        out += " " + text(value) + "\n";
    }
    return out;
}

}  // namespace

double Outcome::prompt_rate() const { return rate(prompt, prompt_seconds); }

// The first token of an answer comes with the prompt.
double Outcome::answer_rate() const { return answer > 0 ? rate(answer - 1, answer_seconds) : 0; }

std::string figures(const Outcome& outcome, const Context& context) {
    const ggml::CacheStats stats = ggml::stats();
    const ProcessMemory memory = process_memory();
    const auto line = [](const char* name, std::size_t tokens, double rate) {
        return name + count(tokens) + " tokens, " + (rate > 0 ? fixed(rate, 1) : "-") +
               " tokens/s\n";
    };
    const double held = stats.held_bytes();
    const double f16 = f16_bytes(ggml::layer_reports(), context.size());
    return concat(
        "\n[", outcome.end, "]\n", line("prompt   ", outcome.prompt, outcome.prompt_rate()),
        line("answer   ", outcome.answer, outcome.answer_rate()), "cache    ", bytes(held), " for ",
        count(context.size()), " tokens: ", bytes(stats.packed_bytes), " packed + ",
        bytes(stats.exact_bytes), " exact; f16 would hold ", bytes(f16),
        held > 0 ? " (" + fixed(f16 / held, 1) + "x)" : "", ", scheme ", stats.scheme,
        "\nprocess  ", bytes(memory.resident), " now, ", bytes(memory.peak), " at most\n");
}

std::string bars(const Bar& ours, const Bar& stock) {
    const auto speed = [](double value) { return fixed(value, 1) + " tokens/s"; };
    const auto answer = [](const Bar& bar) { return bar.outcome.answer_rate(); };
    const auto prompt = [](const Bar& bar) { return bar.outcome.prompt_rate(); };
    const auto memory = [](const Bar& bar) { return bar.cache_bytes; };
    std::string out = "\n";
    out += group("answering after " + count(ours.outcome.prompt) + " tokens", ours, stock, answer,
                 speed);
    out += group("reading the prompt", ours, stock, prompt, speed);
    out += group("memory of the cache", ours, stock, memory, [](double x) { return bytes(x); });
    const double faster = answer(stock) > 0 ? answer(ours) / answer(stock) : 0;
    const double smaller = memory(ours) > 0 ? memory(stock) / memory(ours) : 0;
    if (faster <= 0 || smaller <= 0) return out;
    // A few tokens' cache is larger than f16's: it has its fixed parts whatever the length.
    const std::string size = smaller >= 1 ? fixed(smaller, 1) + " times smaller"
                                          : fixed(1 / smaller, 1) + " times larger";
    return out + "So " + ours.name + " answers " + fixed(faster, 1) + " times as fast as " +
           stock.name + ", from a cache " + size + ".\n";
}

}  // namespace lowkv::cli
