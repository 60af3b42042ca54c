// Which words of a scheme each host can't serve. Devices refuse quantizers instead, by
// PackedPart::on_devices().

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include "lowkv/error.h"
#include "lowkv/scheme.h"

namespace lowkv {
namespace {

using enum Host;

struct Row {
    bool (*used)(const Scheme&);
    std::string_view words;
    std::initializer_list<Host> by;
};
const Row rows[] = {
    {[](const Scheme& s) { return s.retention.filter != Filter::none; },
     "filter=, keep= and evict= are not served ",
     {sequence, pages, model_cache, llama_cpp, python, vllm, lmcache}},
    {[](const Scheme& s) { return s.any_layer(&LayerScheme::by_row); },
     "codecs of a token's row of all heads (row, static, reorder) are not served ",
     {python, vllm, lmcache}},
    {[](const Scheme& s) { return s.needs_calibration(); },
     "schemes that need a calibration are not served ",
     {model_cache}},
    {[](const Scheme& s) {
         return s.any_layer([](const auto& layer) { return layer.key.stage == Stage::pre; });
     },
     "keys before RoPE are not served ",
     {pages, model_cache}},
    {[](const Scheme& s) { return s.retention.flush > 0; },
     "the word flush= is not served ",
     {pages, vllm, lmcache}},
    {[](const Scheme& s) { return s.retention.young > 0; },
     "the word young= is not served ",
     {sequence, pages, model_cache, python, vllm, lmcache}},
    {[](const Scheme& s) {
         return s.retention.young > 0 &&
                s.any_layer([](const auto& layer) { return layer.key.stage == Stage::pre; });
     },
     "the word young= with keys before RoPE is not served ",
     {llama_cpp}},
};

// In the order of Host.
constexpr std::string_view where[] = {"in a Sequence (use a FilteredSequence)",
                                      "in a PagedLayer",
                                      "in a KvCache",
                                      "in llama.cpp",
                                      "in Python",
                                      "in vLLM",
                                      "in LMCache's chunks"};
static_assert(std::size(where) == static_cast<std::size_t>(lmcache) + 1);

}  // namespace

std::string unserved(const Scheme& scheme, Host host) {
    for (const Row& row : rows)
        if (std::ranges::count(row.by, host) > 0 && row.used(scheme))
            return concat(row.words, where[static_cast<std::size_t>(host)],
                          "; leave that out, or take another scheme");
    return {};
}

void require_served(const Scheme& scheme, Host host) {
    const std::string why = unserved(scheme, host);
    if (!why.empty()) throw Error(ErrorCode::unsupported, why);
}

}  // namespace lowkv
