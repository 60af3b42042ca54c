#include "row/rope_table.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "lowkv/error.h"
#include "round.h"

namespace lowkv::codec {
namespace {

constexpr std::uint32_t widest_vector = 16;

}  // namespace

RopeTable::RopeTable(const Rope& rope)
    : rope_(rope),
      halves_(rope.pairs == Rope::Pairs::halves),
      pairs_(static_cast<std::uint32_t>(rope.frequencies.size())),
      padded_(round_up(pairs_, widest_vector)),
      turns_(std::size_t{3} * digit * 2 * padded_),
      offsets_(std::size_t{pairs_} * 2 * tile) {
    double unit = 1;
    for (std::uint32_t d = 0; d < 3; ++d, unit *= digit) {
        const double magnitude = d == 0 ? rope.magnitude : 1.0;
        for (std::uint32_t v = 0; v < digit; ++v) {
            float* cos = turns_.data() + (std::size_t{d} * digit + v) * 2 * padded_;
            for (std::uint32_t i = 0; i < pairs_; ++i) {
                const double angle = unit * v * static_cast<double>(rope.frequencies[i]);
                cos[i] = static_cast<float>(magnitude * std::cos(angle));
                cos[padded_ + i] = static_cast<float>(magnitude * std::sin(angle));
            }
        }
    }
    for (std::uint32_t i = 0; i < pairs_; ++i) {
        float* cos = offsets_.data() + std::size_t{i} * 2 * tile;
        for (std::uint32_t t = 0; t < tile; ++t) {
            const double angle = t * static_cast<double>(rope.frequencies[i]);
            cos[t] = static_cast<float>(std::cos(angle));
            cos[tile + t] = static_cast<float>(std::sin(angle));
        }
    }
}

std::shared_ptr<const RopeTable> RopeTable::of(const Rope& rope, std::uint32_t head_dim) {
    if (2 * rope.frequencies.size() > std::min(head_dim, 2 * max_pairs)) {
        throw Error(ErrorCode::invalid_argument, "a rope of ", rope.frequencies.size(),
                    " pairs does not fit into head_dim ", head_dim);
    }
    const auto usable = [](float x) { return std::isfinite(x); };
    bool legal = usable(rope.magnitude) && rope.magnitude > 0;
    for (const float f : rope.frequencies) legal = legal && usable(f);
    if (!legal) {
        throw Error(ErrorCode::invalid_argument,
                    "a rope needs finite frequencies and a finite magnitude above 0");
    }
    static std::mutex mutex;
    static std::vector<std::weak_ptr<const RopeTable>> tables;
    const std::lock_guard lock(mutex);
    std::erase_if(tables, [](const auto& table) { return table.expired(); });
    for (const auto& table : tables) {
        if (auto found = table.lock(); found && found->rope() == rope) return found;
    }
    auto made = std::make_shared<const RopeTable>(rope);
    tables.push_back(made);
    return made;
}

void RopeTable::angles(std::int32_t position, float* cos, float* sin) const noexcept {
    auto p = static_cast<std::uint32_t>(position);
    const float* units = turns(0, p % digit);
    std::copy_n(units, pairs_, cos);
    std::copy_n(units + padded_, pairs_, sin);
    for (std::uint32_t d = 1; d < 3; ++d) {
        p /= digit;
        const float* more = turns(d, p % digit);
        for (std::uint32_t i = 0; i < pairs_; ++i) {
            const float c = cos[i] * more[i] - sin[i] * more[padded_ + i];
            sin[i] = sin[i] * more[i] + cos[i] * more[padded_ + i];
            cos[i] = c;
        }
    }
}

void RopeTable::apply(std::int32_t position, float* x) const noexcept {
    float cos[max_pairs], sin[max_pairs];
    angles(position, cos, sin);
    for (std::uint32_t i = 0; i < pairs_; ++i) {
        const float a = x[first(i)], b = x[second(i)];
        x[first(i)] = a * cos[i] - b * sin[i];
        x[second(i)] = a * sin[i] + b * cos[i];
    }
}

void RopeTable::undo(std::int32_t position, float* x) const noexcept {
    float cos[max_pairs], sin[max_pairs];
    angles(position, cos, sin);
    const float inverse = 1.0f / (rope_.magnitude * rope_.magnitude);
    for (std::uint32_t i = 0; i < pairs_; ++i) {
        const float a = x[first(i)] * inverse, b = x[second(i)] * inverse;
        x[first(i)] = a * cos[i] + b * sin[i];
        x[second(i)] = b * cos[i] - a * sin[i];
    }
}

}  // namespace lowkv::codec
