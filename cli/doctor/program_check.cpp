// The part of `lowkv doctor` that runs a program: what llama.cpp says with -v of a model's weights
// and caches, and the plug-in of what it packs.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/process.h"
#include "common/program_options.h"
#include "common/terminal.h"
#include "doctor/checks.h"
#include "platform/command.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

using Layers = std::set<unsigned>;

// Returns the text behind the mark, empty if the line lacks it.
std::string_view behind(std::string_view line, std::string_view mark) {
    const std::size_t at = line.find(mark);
    return at == std::string_view::npos ? "" : line.substr(at + mark.size());
}

double number(std::string_view text) { return std::strtod(std::string(text).c_str(), nullptr); }
unsigned layer_in(std::string_view text) { return static_cast<unsigned>(number(text)); }

// "layers 0 to 19, 25", "layer 3"
std::string listed(const Layers& layers) {
    std::vector<std::string> spans;
    for (auto at = layers.begin(); at != layers.end();) {
        const unsigned first = *at;
        unsigned last = first;
        for (++at; at != layers.end() && *at == last + 1; ++at) ++last;
        spans.push_back(span(first, last));
    }
    return (layers.size() == 1 ? "layer " : "layers ") + joined(spans);
}

struct ProgramLog {
    std::map<std::string, double> weights;                        // MiB in each buffer
    std::map<std::string, std::map<std::string, Layers>> placed;  // by buffer, by weight
    Layers layers, cached, sharing, shared;  // `sharing` ones read the caches of `shared` ones
    std::string scheme, where = "in RAM", last;
    std::size_t packed = 0;  // layers; the plug-in's lines may come before llama.cpp's
    bool made = false, ready = false, listens = false;

    // All that is to come has come.
    bool complete() const { return listens || (ready && packed > 0 && packed >= cached.size()); }
    void read(std::string_view line);
    void read_sizes(std::string_view line);
};

void ProgramLog::read_sizes(std::string_view line) {
    const double size = number(behind(line, " buffer size ="));
    if (line.find(" compute buffer size") != std::string_view::npos) ready = made;
    if (line.find(" KV buffer size") != std::string_view::npos) made = size > 0;
    std::string_view name = behind(line, "load_tensors:");
    name = name.substr(0, name.find(" model buffer size"));
    name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
    if (!name.empty()) weights[std::string(name)] += size;
}

void ProgramLog::read(std::string_view line) {
    last = line;
    if (line.find(": loaded meta data") != std::string_view::npos) {  // -fit loads it twice
        weights.clear();
        placed.clear();
        for (Layers* set : {&layers, &cached, &sharing, &shared}) set->clear();
        made = ready = false;
    }
    if (const auto weight = behind(line, "tensor blk."); !weight.empty()) {
        const std::string kind(behind(weight.substr(0, weight.find(' ')), "."));
        const std::string_view buffer = behind(line, "buffer type overridden to ");
        if (!buffer.empty()) placed[std::string(buffer)][kind].insert(layer_in(weight));
    }
    if (const auto layer = behind(line, "load_tensors: layer ");
        behind(layer, "assigned to device ").starts_with("LOWKV,"))
        layers.insert(layer_in(layer));
    if (const auto layer = behind(line, "llama_kv_cache: layer ");
        !behind(layer, ": dev = ").empty())
        cached.insert(layer_in(layer));
    if (const auto other = behind(line, ": reuse layer "); !other.empty()) {
        sharing.insert(layer_in(behind(line, "- layer ")));
        shared.insert(layer_in(other));
    }
    if (line.find(" buffer size =") != std::string_view::npos) read_sizes(line);
    const std::string_view active = behind(line, "lowkv: active: scheme ");
    if (const std::size_t end = active.find(" layers,"); end != std::string_view::npos) {
        const std::size_t comma = active.rfind(',', end);
        scheme = active.substr(0, comma);
        packed += layer_in(active.substr(comma + 1));
        if (const auto device = behind(active, ", on "); !device.empty())
            where = "on " + std::string(device);
    }
    listens = listens || line.find("listening on http") != std::string_view::npos;
}

bool in_host_memory(std::string_view buffer) {
    return buffer.starts_with("CPU") || buffer.ends_with("_Host");
}

void report_weights(Findings& findings, const ProgramLog& log, const ProgramCheck& check) {
    std::vector<std::string> said, astray;
    Layers missing = log.layers;
    for (const auto& [buffer, size] : log.weights) {
        Layers here;
        if (const auto found = log.placed.find(buffer); found != log.placed.end())
            for (const auto& [kind, layers] : found->second)
                here.insert(layers.begin(), layers.end());
        said.push_back(buffer + " " + fixed(size, 1) + " MiB" +
                       (here.empty() ? "" : " with " + listed(here)));
    }
    for (const auto& [buffer, kinds] : log.placed)
        for (auto [kind, layers] : kinds) {
            for (const unsigned layer : layers) missing.erase(layer);
            if (!in_host_memory(buffer)) continue;
            // Attention of layers that read another's cache is where their queries' norm is.
            if (kind.starts_with("attn_q_norm"))
                std::erase_if(layers, [&](unsigned layer) { return log.sharing.contains(layer); });
            if (!layers.empty()) astray.push_back(kind + " of " + listed(layers));
        }
    if (!missing.empty()) astray.push_back("all of " + listed(missing));
    if (log.weights.empty())
        findings.bad("weights", "the program's messages don't say where they are",
                     "leave out what turns them off (--log-disable)");
    else if (!check.weights_elsewhere || astray.empty())
        findings.good("weights", joined(said));
    else if (has_any(program_of(check.command), {"-ot", "--override-tensor", "-cmoe", "--cpu-moe",
                                                 "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn"}))
        findings.good("weights", joined(said) + "; in RAM by your options: " + joined(astray));
    else
        findings.bad("weights", joined(said),
                     "these are in RAM, not where --weights-on says: " + joined(astray));
}

void report_cache(Findings& findings, const ProgramLog& log, const ProgramCheck& check) {
    const std::string said = "scheme " + log.scheme + ": " + count(log.packed) + " of " +
                             count(log.cached.size()) + " layers' keys and values packed " +
                             log.where;
    if (log.packed > 0 && log.packed == log.cached.size())
        findings.good("cache", said);
    else
        findings.bad("cache", log.packed == 0 ? "nothing was packed" : said, log.last);
    if (!log.sharing.empty())
        findings.note("cache",
                      listed(log.sharing) + " have none: they read that of " + listed(log.shared));
    Layers rest = log.layers;
    // The output is numbered behind them, and is there where no other device was named.
    if (!check.weights_elsewhere && !rest.empty()) rest.erase(std::prev(rest.end()));
    std::erase_if(rest, [&](unsigned layer) {
        return log.cached.contains(layer) || log.sharing.contains(layer);
    });
    if (!rest.empty()) findings.note("cache", listed(rest) + " have no keys and values");
}

}  // namespace

void look_at_program(Findings& findings, const ProgramCheck& check) {
    std::vector<std::string> words = {platform::text_of(executable_file()), "run"};
    words.insert(words.end(), check.run_options.begin(), check.run_options.end());
    words.emplace_back("--");
    words.insert(words.end(), check.command.begin(), check.command.end());
    words.emplace_back("-v");
    int messages = -1, status = 0;
    const pid_t child = start_child(words, messages, true);
    ProgramLog log;
    std::string unread;
    bool enough = false;
    int quiet = 0;  // for so many turns
    while (!enough) {
        const std::optional<std::string> text = read_some(messages, 200);
        if (!text) break;
        unread += *text;
        take_lines(unread, [&](std::string_view line) { log.read(line); });
        quiet = text->empty() ? quiet + 1 : 0;
        // A server whose messages are turned off still shows the plug-in's.
        enough = log.complete() || (log.packed > 0 && log.weights.empty() && quiet > 10);
    }
    stop_reading(messages);
    status = enough ? stop_child(child) : (wait_for(child, status, 0), status);
    forget_child();
    if (!enough && status != 0)
        return findings.bad("program", check.command[0] + " failed", log.last);
    report_weights(findings, log, check);
    report_cache(findings, log, check);
}

}  // namespace lowkv::cli
