// The output of a program under `lowkv run`, which quotes its clients: however it comes in pieces,
// the same is shown and the same is made of it.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "common/target.h"
#include "run/watcher.h"

namespace lowkv::fuzz {
namespace {

constexpr const char* mark = "\x1fmark";

struct Judged {
    std::string shown;
    cli::Watcher watcher;

    Judged(unsigned how, std::string_view text, std::size_t piece)
        : watcher((how & 1) != 0, (how & 2) != 0, (how & 4) != 0 ? "-ngl 3" : "", mark,
                  (how & 8) != 0) {
        for (std::size_t at = 0; at < text.size(); at += piece)
            shown += watcher.read(text.substr(at, piece));
        shown += watcher.end();
    }
};

}  // namespace

std::vector<Bytes> seeds() {
    const std::string logs[] = {
        "llama_kv_cache:        CPU KV buffer size =    10.00 MiB\n"
        "sched_reserve:        CPU compute buffer size =    10.00 MiB\n"
        "main: server is listening on http://127.0.0.1:8080\n",
        "llama_kv_cache:      LOWKV KV buffer size =    10.00 MiB\n"
        "lowkv: active: scheme lowkv2.8, 30 layers\x1fmark\n"
        "slot release: id 0 | task 0 | stop processing: n_tokens = 9\n",
        "lowkv: NOT active for 1 of 30 layers: a head\x1fmark\nall slots are idle\n",
        "lowkv: NOT active: the KV cache is in CUDA0 (-ngl 3), none on the device LOWKV\x1fmark\n",
        "lowkv: NOT active: nothing is packed\x1fmark\n",
        "[50123] lowkv: active: scheme kivi2\x1fmark\n"
        "[50124] main: server is listening on http://127.0.0.1:50124\n"};
    std::vector<Bytes> all;
    for (unsigned how = 0; how < 16; how += 3)
        for (const std::string& log : logs) all.push_back(seed({how, 7}, log));
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const unsigned how = input.byte();
    const std::size_t piece = 1 + input.below(64);
    std::string text = input.text();
    text.resize(std::min<std::size_t>(text.size(), 60000));  // no line is longer
    const Judged whole(how, text, text.size() + 1), pieces(how, text, piece);
    // Something is told of a router's servers, too; and only the plug-in knows the mark.
    if ((how & 8) == 0 && text.find(mark) == std::string::npos)
        require(whole.shown == text && pieces.shown == text, "not all of a text is shown");
    for (const bool flag : {false, true}) {
        require(whole.watcher.problem(flag) == pieces.watcher.problem(flag), "another problem");
        require(whole.watcher.lack(flag) == pieces.watcher.lack(flag), "another lack");
    }
    require(whole.watcher.active() == pieces.watcher.active() &&
                whole.watcher.waits() == pieces.watcher.waits() &&
                whole.watcher.has_no_cache() == pieces.watcher.has_no_cache(),
            "another judgement of pieces");
}

}  // namespace lowkv::fuzz
