// Conversations of a server's slots in one unified cache: prompts, answers, messages that go on,
// prefixes that are shared, tokens taken back, context shifts; cells found as llama.cpp finds them.
// Each conversation's attention is what it would be alone, and what the cache holds is bounded.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numbers>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ggml_cache.h"

namespace {

using namespace lowkv::test;

constexpr std::size_t f16_bytes = 2 * layers * row_bytes;  // of a token

// Numbers without end, the same for the same seed.
const std::vector<float>& noise() {
    static const std::vector<float> numbers = [] {
        std::vector<float> drawn(1 << 16);
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        for (float& x : drawn) x = normal(random);
        return drawn;
    }();
    return numbers;
}

std::span<const float> numbers(std::uint32_t seed, std::size_t count) {
    std::mt19937 random(seed);
    return std::span(noise()).subspan(random() % (noise().size() - count), count);
}

void turn(std::span<float> head, std::int32_t distance) {
    for (std::size_t pair = 0; pair < head.size(); pair += 2) {
        const double angle = distance * std::pow(10000.0, -static_cast<double>(pair) /
                                                              static_cast<double>(head_dim));
        const double cosine = std::cos(angle), sine = std::sin(angle);
        const double x = head[pair], y = head[pair + 1];
        head[pair] = static_cast<float>(x * cosine - y * sine);
        head[pair + 1] = static_cast<float>(x * sine + y * cosine);
    }
}

struct Token {
    std::uint32_t cell = 0, seed = 0;
    std::int32_t moved = 0;  // by context shifts
};

// Before a cache is made: its size is that of so many conversations.
std::string shared_by(std::uint32_t slots, const char* scheme) {
    setenv("LOWKV_CONVERSATIONS", std::to_string(slots).c_str(), 1);
    return scheme;
}

struct Slot {
    std::vector<Token> tokens;
    std::uint32_t prompt = 0, answer = 0;  // tokens that are yet to come
};

class Server {
  public:
    Server(const char* scheme, std::uint32_t slots, std::uint32_t cells, std::uint32_t block,
           std::uint32_t window, double tolerance)
        : cache_(shared_by(slots, scheme), cells),
          owners_(cells, 0),
          slots_(slots),
          random_(11 + slots),
          block_(block),
          window_(window),
          tolerance_(tolerance) {}

    // Requests until so many have begun, and their answers.
    void serve(int requests, std::uint32_t most_prompt, std::uint32_t most_answer) {
        while (true) {
            bool busy = false;
            for (Slot& slot : slots_) {
                if (slot.prompt + slot.answer == 0 && requests > 0) {
                    --requests;
                    next_request(slot, most_prompt);
                    slot.prompt = 20 + below(most_prompt - 20);
                    slot.answer = 1 + below(most_answer);
                }
                busy |= slot.prompt + slot.answer > 0;
            }
            if (!busy) return;
            step();
        }
    }

    // The most of any step in which each slot has a window's worth of tokens: what is held, in
    // parts of what the live tokens need in whole blocks. Of all, and of what is unquantized.
    double held() const { return held_; }
    double unquantized() const { return unquantized_; }
    // And in parts of the live tokens in f16.
    double of_f16() const { return of_f16_; }

  private:
    Cache cache_;
    std::vector<int> owners_;  // per cell: conversations with a token there
    std::vector<Slot> slots_;
    std::mt19937 random_;
    std::uint32_t block_, window_;
    double tolerance_, held_ = 0, unquantized_ = 0, of_f16_ = 0;
    std::uint32_t head_ = 0, used_ = 0, seeds_ = 0;

    std::uint32_t below(std::uint32_t most) {
        return static_cast<std::uint32_t>(random_()) % std::max(most, 1u);
    }

    void drop(std::span<const Token> tokens) {
        for (const Token& token : tokens) {
            if (--owners_[token.cell] > 0) continue;
            --used_;
            head_ = std::min(head_, token.cell);
        }
    }

    void take_back(Slot& slot, std::size_t left) {
        left = std::min(left, slot.tokens.size());
        drop(std::span(slot.tokens).subspan(left));
        slot.tokens.resize(left);
    }

    // What the slot keeps for its next request.
    void next_request(Slot& slot, std::uint32_t most_prompt) {
        const std::size_t size = slot.tokens.size();
        const bool full = size + most_prompt > owners_.size() / slots_.size();
        const std::uint32_t kind = below(8);
        if (kind < 3 || full) {  // another conversation
            take_back(slot, 0);
        } else if (kind < 5) {  // its next message, the end of the last answer taken back
            take_back(slot, size - std::min<std::size_t>(size, below(20)));
        } else if (kind < 6) {  // another answer
            take_back(slot, below(static_cast<std::uint32_t>(size)));
        } else if (kind < 7) {  // shares what another slot begins with
            const Slot& other = slots_[below(static_cast<std::uint32_t>(slots_.size()))];
            if (&other == &slot) return;
            take_back(slot, 0);
            const auto shared = below(static_cast<std::uint32_t>(other.tokens.size()));
            slot.tokens.assign(other.tokens.begin(), other.tokens.begin() + shared);
            for (const Token& token : slot.tokens) ++owners_[token.cell];
        } else {
            shift(slot);
        }
    }

    // A context shift, where no token is another slot's too.
    void shift(Slot& slot) {
        const bool alone = std::ranges::all_of(
            slot.tokens, [&](const Token& token) { return owners_[token.cell] == 1; });
        if (!alone || slot.tokens.size() < 300) return;
        const auto size = static_cast<std::uint32_t>(slot.tokens.size());
        const std::uint32_t keep = below(size / 2), count = 1 + below(size / 2);
        const auto first = slot.tokens.begin() + keep;
        drop(std::span(slot.tokens).subspan(keep, count));
        slot.tokens.erase(first, first + count);
        std::vector<std::int32_t> shifts(owners_.size(), 0);
        for (std::size_t i = keep; i < slot.tokens.size(); ++i) {
            slot.tokens[i].moved -= static_cast<std::int32_t>(count);
            shifts[slot.tokens[i].cell] = -static_cast<std::int32_t>(count);
        }
        REQUIRE(cache_.shift(shifts) == fine);
    }

    // llama_kv_cache::find_slot()
    Cells find_cells(std::size_t count) {
        const auto size = static_cast<std::uint32_t>(owners_.size());
        if (head_ > used_ + 2 * count) head_ = 0;
        Cells found;
        for (std::uint32_t tested = 0; found.size() < count && tested < 2 * size; ++tested) {
            if (head_ >= size) head_ = 0;
            if (owners_[head_] == 0) found.push_back(head_);
            ++head_;
        }
        REQUIRE(found.size() == count);
        return found;
    }

    // A token of each answer, and 512 tokens of prompts at most.
    void step() {
        std::vector<std::size_t> of;  // the slot of each token
        for (std::size_t s = 0; s < slots_.size(); ++s) {
            if (slots_[s].prompt > 0 || slots_[s].answer == 0) continue;
            --slots_[s].answer;
            of.push_back(s);
        }
        for (std::size_t s = 0; s < slots_.size(); ++s)
            for (; slots_[s].prompt > 0 && of.size() < 512; --slots_[s].prompt) of.push_back(s);
        const Cells where = find_cells(of.size());
        std::vector<std::size_t> place(of.size());  // in its conversation
        for (std::size_t i = 0; i < of.size(); ++i) {
            std::vector<Token>& tokens = slots_[of[i]].tokens;
            place[i] = tokens.size();
            tokens.push_back({where[i], ++seeds_, 0});
            ++owners_[where[i]];
            ++used_;
        }
        const auto status = cache_.step(
            where,
            [&](std::size_t input, std::span<float> all) {
                for (std::size_t i = 0; i < of.size(); ++i)
                    fill(input, slots_[of[i]].tokens[place[i]].seed, i, all);
            },
            [&](std::size_t i, ggml_fp16_t* row) {
                for (std::size_t t = 0; t <= place[i]; ++t) row[slots_[of[i]].tokens[t].cell] = 0;
            });
        REQUIRE(status == fine);
        for (std::size_t i = 0; i < of.size(); ++i)
            if ((i + 1 == of.size() || of[i + 1] != of[i]) && below(of.size() > 64 ? 2 : 16) == 0)
                check(slots_[of[i]], i, of.size());
        count_bytes();
    }

    static std::uint32_t seed_of(std::uint32_t token, std::size_t input) {
        return token * 64 + static_cast<std::uint32_t>(input);
    }

    // Keys, values or queries of the step's token number i.
    static void fill(std::size_t input, std::uint32_t seed, std::size_t i, std::span<float> all) {
        if (input % 3 < 2) {
            std::ranges::copy(numbers(seed_of(seed, input), channels),
                              all.begin() + static_cast<std::ptrdiff_t>(i * channels));
            return;
        }
        const auto row = numbers(seed_of(seed, input), heads * head_dim);
        const std::size_t stride = all.size() / heads;
        for (std::size_t h = 0; h < heads; ++h)
            std::copy_n(row.begin() + static_cast<std::ptrdiff_t>(h * head_dim), head_dim,
                        all.begin() + static_cast<std::ptrdiff_t>(h * stride + i * head_dim));
    }

    // A head of the step's token number i, the conversation's newest, against the truth.
    void check(const Slot& slot, std::size_t i, std::size_t step_tokens) {
        const std::size_t layer = below(layers), head = below(heads);
        const std::size_t channel = head * kv_heads / heads * head_dim;
        const auto query =
            numbers(seed_of(slot.tokens.back().seed, layer * 3 + 2), heads * head_dim)
                .subspan(head * head_dim, head_dim);
        std::vector<double> expected(head_dim, 0.0);
        double total = 0;
        for (const Token& token : slot.tokens) {
            const auto row = numbers(seed_of(token.seed, layer * 3), channels);
            std::vector<float> key(row.begin() + static_cast<std::ptrdiff_t>(channel),
                                   row.begin() + static_cast<std::ptrdiff_t>(channel) + head_dim);
            if (token.moved != 0) turn(key, token.moved);
            double score = 0;
            for (std::size_t c = 0; c < key.size(); ++c) score += double{query[c]} * key[c];
            const double weight = std::exp(score * 0.125);
            total += weight;
            const auto value =
                numbers(seed_of(token.seed, layer * 3 + 1), channels).subspan(channel, head_dim);
            for (std::size_t c = 0; c < value.size(); ++c) expected[c] += weight * value[c];
        }
        const float* got =
            cache_.result().data() + ((layer * step_tokens + i) * heads + head) * head_dim;
        double difference = 0, size = 0;
        for (std::size_t c = 0; c < expected.size(); ++c) {
            difference += std::pow(expected[c] / total - double{got[c]}, 2);
            size += std::pow(expected[c] / total, 2);
        }
        CHECK(std::sqrt(difference / size) < tolerance_);
    }

    // The first block and those from the window on unquantized, the others packed, all whole; a
    // shared token once.
    void count_bytes() {
        const auto stats = lowkv::ggml::stats();
        std::vector<std::uint8_t> counted(owners_.size(), 0);
        std::size_t exact = 0, packed = 0;
        for (const Slot& slot : slots_) {
            const std::size_t size = slot.tokens.size();
            const std::size_t old = size > window_ ? (size - window_) / block_ : 0;
            for (std::size_t b = 0; b * block_ < size; ++b)
                if (!std::exchange(counted[slot.tokens[b * block_].cell], std::uint8_t{1}))
                    ++(b > 0 && b < old ? packed : exact);
        }
        const auto told = static_cast<double>(ggml_backend_buffer_get_size(cache_.buffer()));
        CHECK(stats.held_bytes() <= told);
        const auto unquantized = static_cast<double>(exact * block_ * f16_bytes);
        const double codes = static_cast<double>(packed * block_) * stats.packed_bytes_per_token;
        if (used_ > 128 * slots_.size()) {
            held_ = std::max(held_, stats.held_bytes() / (unquantized + codes));
            of_f16_ =
                std::max(of_f16_, stats.held_bytes() / static_cast<double>(used_ * f16_bytes));
            unquantized_ =
                std::max(unquantized_, static_cast<double>(stats.exact_bytes) / unquantized);
        }
        if (std::getenv("LOWKV_TEST_TRACE") != nullptr)
            std::printf("%6u tokens: unquantized %zu, packed %zu, needed %.0f + %.0f, f16 %zu\n",
                        used_, stats.exact_bytes, stats.packed_bytes, unquantized, codes,
                        used_ * f16_bytes);
    }
};

}  // namespace

TEST_CASE("a conversation between others is what it is alone") {
    struct Load {
        const char* scheme;
        std::uint32_t slots, cells, prompt, answer;  // tokens, at most
        double tolerance;
        std::uint32_t block = 128, window = 128;
    };
    for (const Load& load :
         {Load{"exact", 1, 2048, 400, 60, 2e-3}, Load{"exact", 8, 8192, 400, 60, 2e-3},
          Load{"int8,window=128,sinks=4", 4, 8192, 800, 200, 0.04},
          Load{"lowkv4", 8, 16384, 1500, 500, 0.3},
          Load{"kivi4,window=16,sinks=5", 4, 8192, 800, 200, 0.5, 32, 16},
          Load{"lowkv2.8", 32, 16384, 300, 100, 0.5},
          Load{"lowkv4,young=32", 8, 16384, 1500, 500, 0.3},
          Load{"int8,young=32", 32, 16384, 300, 100, 0.3, 32}}) {
        CAPTURE(load.scheme);
        CAPTURE(load.slots);
        Server server(load.scheme, load.slots, load.cells, load.block, load.window, load.tolerance);
        server.serve(static_cast<int>(3 * load.slots), load.prompt, load.answer);
        MESSAGE("held: ", server.held(), " of what is needed, unquantized: ", server.unquantized(),
                ", of f16: ", server.of_f16());
        if (std::string(load.scheme) == "exact") continue;  // rows that ended are not packed
        CHECK(server.held() < 1.5);  // with codes of what has ended, in cells not written again yet
        CHECK(server.unquantized() < 1.3);
        if (std::string(load.scheme) == "lowkv4,young=32") CHECK(server.of_f16() < 0.5);
    }
}
