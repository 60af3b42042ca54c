#include "run/watcher.h"

#include <algorithm>

#include "common/terminal.h"

namespace lowkv::cli {

std::string Watcher::read(std::string_view text) {
    unseen_ += text;
    for (std::size_t at = 0; (at = unseen_.find(mark_, at)) != std::string::npos;)
        unseen_.erase(at, mark_.size());
    std::size_t kept = std::min(unseen_.size(), mark_.size() - 1);
    while (!mark_.starts_with(std::string_view(unseen_).substr(unseen_.size() - kept))) --kept;
    std::string seen = unseen_.substr(0, unseen_.size() - kept);
    unseen_.erase(0, seen.size());

    line_ += text;
    take_lines(line_, [&](std::string_view line) { serves_ ? judge_server(line) : judge(line); });
    if (line_.size() > 65536) line_.clear();  // no message of llama.cpp is that long
    return seen + std::exchange(told_, "");
}

std::string Watcher::end() {
    judge(line_);
    line_.clear();
    return std::exchange(unseen_, "");
}

void Watcher::judge(std::string_view line) {
    constexpr std::string_view some = " for ", other_memory = ": the KV cache is in ",
                               all_of_it = ", none on the device LOWKV",
                               nothing = ": nothing is packed";
    const std::size_t end = line.find(mark_);
    const std::string_view own = end != std::string_view::npos ? line.substr(0, end) : "";
    if (own.find("lowkv: active") != std::string_view::npos) active_ = true;
    if (const std::size_t denial = own.find(denial_mark); denial != std::string_view::npos) {
        const std::string_view said = own.substr(denial + denial_mark.size());
        if (said.starts_with(some)) {
            denial_ = said.substr(some.size());
        } else if (said.starts_with(nothing)) {
            nothing_ = true;
        } else if (said.starts_with(other_memory)) {
            elsewhere_ = said.substr(2);  // without ": "
            none_ours_ = said.find(all_of_it) != std::string_view::npos;
        } else if (said.starts_with(": ")) {
            refused_ = said.substr(2);
        }
    }
    if (!active_) judge_start(line);
}

// With -v, and in older versions without, a context names the buffers of its caches, one by one,
// and then its compute buffers: only then is it known that none is ours. A cache in several
// memories is the plug-in's to complain of.
void Watcher::judge_start(std::string_view line) {
    const auto says = [&](std::string_view words) {
        return line.find(words) != std::string_view::npos;
    };
    if (says(" KV buffer size") && !says(" 0.00 MiB")) {  // that is of a trial of -fit's
        if (says("LOWKV"))
            ours_ = true;
        else if (other_.empty())
            other_ = line;
    }
    if (ours_ || !stranger_.empty()) {
        waits_ = waits_ || (ours_ && says("listening on http"));
        return;
    }
    if (says(" compute buffer size") && !other_.empty()) stranger_ = other_;
    const bool listens = says("listening on http") || says("all slots are idle");
    if (listens && late_start_)
        waits_ = true;
    else if (listens || (waits_ && says("stop processing:")))  // it has served a request
        stranger_ = line;
}

// Its own words, which have the mark, can have it stopped; any other line may be a client's, which
// the log quotes.
void Watcher::judge_server(std::string_view line) {
    const bool own = line.find(mark_) != std::string_view::npos;
    const std::size_t begin = line.find('['), end = line.find("] ");
    if (begin > end || end == std::string_view::npos) return;
    if (!own && line.find("listening on http") == std::string_view::npos) return;
    const std::string name(line.substr(begin, end + 1 - begin));
    auto server = std::ranges::find(servers_, name, &Watcher::name_);
    if (own && server == servers_.end()) {
        server = servers_.emplace(server, true, false, "", mark_);
        server->name_ = name;
    }
    if (own) return server->judge(line);
    const std::string why = name + " has no packed cache; an encoder has none to pack";
    if (server == servers_.end() || !server->active_) told_ += "lowkv: " + why + "\n";
}

std::string Watcher::problem(bool partial) const {
    for (const Watcher& server : servers_)
        if (const std::string problem = server.problem(partial); !problem.empty())
            return "its server " + server.name_ + ": " + problem;
    if (!partial && !denial_.empty())
        return "lowkv can't pack " + denial_ + "; --partial lets it run all the same";
    if (!partial && active_ && !elsewhere_.empty())
        return "lowkv can't pack every layer: " + elsewhere() +
               "; --partial lets it run all the same";
    if (one_cache_ && nothing_ && !active_ && !denial_.empty())
        return "lowkv can't pack " + denial_ + "; --partial is for some layers, not for all";
    if (one_cache_ && !active_ && (none_ours_ || !refused_.empty())) return lack(false);
    if (active_ || stranger_.empty()) return "";
    return "it started to work, and no KV cache of it is lowkv's (\"" + stranger_ +
           "\"). `lowkv doctor -m MODEL` may tell why" +
           (other_.empty() ? "; an encoder, as for embeddings and reranking, has none: start it "
                             "without lowkv run"
                           : "");
}

// The plug-in's words, with the option at fault in place of all that may be.
std::string Watcher::elsewhere() const {
    if (advice_.empty()) return elsewhere_;
    return elsewhere_.substr(0, elsewhere_.find(" (")) + " (" + advice_ + ")";
}

std::string Watcher::lack(bool succeeded) const {
    if (active_ || serves_) return "";
    if (!denial_.empty()) return "lowkv can't pack " + denial_;
    if (!elsewhere_.empty()) return "lowkv can't pack any layer: " + elsewhere();
    if (!refused_.empty()) return "lowkv can't pack any layer: " + refused_;
    return succeeded ? "its cache was never lowkv's: there was no \"lowkv: active\" line" : "";
}

}  // namespace lowkv::cli
