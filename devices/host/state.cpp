#include "state.h"

#include <algorithm>

namespace lowkv::devices {

Handle Grown::of(Queue& queue, std::size_t bytes) {
    if (bytes > bytes_) {
        const std::size_t size = std::max({bytes, 2 * bytes_, std::size_t{4096}});
        buffer_ = Buffer();
        bytes_ = 0;
        buffer_ = queue.buffer(size);
        bytes_ = size;
    }
    return buffer_.get();
}

State::State(std::unique_ptr<Queue> its_queue)
    : owned(std::move(its_queue)),
      staging(queue.tuning().staging_bytes),
      device_staging(queue.buffer(staging.size())) {}

const State::Known& State::known(const Plan& plan) {
    auto& [number, recent] = recent_[plan.number() % recent_.size()];
    if (number == plan.number()) return *recent;
    const std::size_t row = element_bytes(plan.rows()) * plan.shape().channels();
    if (staging.size() < row) {
        device_staging = queue.buffer(row);
        staging.resize(row);
    }
    const Description description = describe(plan);
    const auto found = std::ranges::find_if(known_, [&](const Known& known) {
        return known.layer == plan.layer() && known.description.same(description);
    });
    const Known* known = found == known_.end() ? nullptr : &*found;
    if (known == nullptr) {
        const std::vector<std::uint32_t> text = words_of(plan, description);
        Known made{description, plan.layer(), queue.buffer(text.size() * sizeof(std::uint32_t))};
        queue.write({made.buffer.get()}, text.data(), text.size() * sizeof(std::uint32_t));
        known = &known_.emplace_back(std::move(made));
    }
    number = plan.number();
    recent = known;
    return *known;
}

Handle State::try_plan(const Plan& its_plan) noexcept {
    try {
        return known(its_plan).buffer.get();
    } catch (...) {
        queue.fail("describing a plan");
        return nullptr;
    }
}

}  // namespace lowkv::devices
