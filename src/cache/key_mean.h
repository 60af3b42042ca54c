#pragma once
// The mean that a sequence's packed keys are less (Centre::sequence). The blocks packed with it
// share it, so that forks, truncation and reopening need no rules of their own; the last one frees
// it.

#include <cstdint>
#include <utility>
#include <vector>

#include "cache/store.h"

namespace lowkv::cache {

class KeyMean {
  public:
    // `halves`: what lowkv::key_mean() made. The store must outlive it.
    KeyMean(Store::Impl& store, std::vector<std::uint16_t> halves) noexcept
        : store_(store), halves_(std::move(halves)) {
        store_.hold_bytes(true, bytes());
    }
    ~KeyMean() { store_.drop_bytes(true, bytes()); }
    KeyMean(const KeyMean&) = delete;
    KeyMean& operator=(const KeyMean&) = delete;

    const std::uint16_t* data() const noexcept { return halves_.data(); }

  private:
    Store::Impl& store_;
    std::vector<std::uint16_t> halves_;

    std::size_t bytes() const noexcept { return halves_.size() * sizeof halves_[0]; }
};

}  // namespace lowkv::cache
