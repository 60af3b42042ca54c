// What lowkv_ggml.h tells of several live caches.

#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "ggml_cache.h"

namespace {

using lowkv::test::Cache;

TEST_CASE("the scheme is the newest cache's, wherever that lies in memory") {
    std::vector<std::unique_ptr<Cache>> caches;
    for (int i = 0; i < 8; ++i) caches.push_back(std::make_unique<Cache>("kivi2"));
    CHECK(lowkv::ggml::stats().scheme == "kivi2");
    for (std::size_t i = 0; i < 4; ++i) {  // what is freed is taken again, before the others
        caches[i].reset();
        const char* scheme = i % 2 == 0 ? "kivi4" : "lowkv2";
        caches[i] = std::make_unique<Cache>(scheme);
        CHECK(lowkv::ggml::stats().scheme == scheme);
        CHECK(lowkv::ggml::stats().buffers == caches.size());
    }
    caches.resize(4);
    CHECK(lowkv::ggml::stats().scheme == "lowkv2");
}

}  // namespace
