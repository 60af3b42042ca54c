// Random operations on a few sequences that share a store, against a model that is too simple to be
// wrong: per sequence, a map from cell to rows, and block numbers to say who shares what.

#include <doctest/doctest.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include "cache_common.h"
#include "sample.h"
#include "sealed_device.h"

using namespace lowkv;
using namespace cache_test;

namespace {

struct Cell {
    std::optional<Row> key, value;  // what must be read back, exactly
};

struct ModelSequence {
    std::map<std::uint32_t, Cell> cells;
    std::vector<int> blocks;  // ids; 0: absent
    std::uint32_t size = 0;
    bool cut = false;
};

struct Case {
    std::string name;
    LayerScheme scheme;
    Shape shape;
    Retention retention;
};

class Fuzz {
  public:
    Fuzz(const Case& c, unsigned seed)
        : rng_(seed),
          plan_(make_plan(c.scheme, c.shape)),
          store_(lowkv::test::make_store()),
          retention_(c.retention),
          tokens_(plan_->block_tokens()),
          channels_(plan_->shape().channels()),
          threads_(make_thread_executor(2)) {}

    void run(int steps) {
        add(Sequence(store_, plan_, retention_), {});
        for (int step = 0; step < steps; ++step) {
            this->step();
            check_stats();
        }
        sequences_.clear();
        model_.clear();
        check_stats();
    }

  private:
    Rng rng_;
    std::shared_ptr<const Plan> plan_;
    std::shared_ptr<Store> store_;
    Retention retention_;
    std::uint32_t tokens_;
    std::uint32_t channels_;
    std::unique_ptr<Executor> threads_;
    std::vector<Sequence> sequences_;
    std::vector<ModelSequence> model_;  // parallel
    std::map<int, bool> packed_;        // by block id
    int next_id_ = 1;
    std::uint64_t reopened_ = 0, encoded_ = 0;

    std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(rng_() % n); }
    Executor& executor() { return below(2) == 0 ? serial_executor() : *threads_; }

    void add(Sequence sequence, ModelSequence model) {
        sequences_.push_back(std::move(sequence));
        model_.push_back(std::move(model));
    }

    void step() {
        const std::size_t s = below(static_cast<std::uint32_t>(sequences_.size()));
        const std::uint32_t dice = below(100);
        if (dice < 35) {
            append(s);
        } else if (dice < 60) {
            write(s);
        } else if (dice < 68) {
            truncate(s);
        } else if (dice < 80) {
            pack_old(s);
        } else if (dice < 86) {
            pack(s);
        } else if (dice < 92) {
            if (sequences_.size() < 4) add(sequences_[s].fork(), model_[s]);
        } else if (dice < 95) {
            destroy(s);
        } else {
            move(s);
        }
        if (below(3) == 0) check(below(static_cast<std::uint32_t>(sequences_.size())));
    }

    // ---- operations, on the real thing and on the model ----

    void touch(ModelSequence& m, std::uint32_t b) {
        if (b >= m.blocks.size()) m.blocks.resize(b + 1);
        int& id = m.blocks[b];
        const bool shared = id != 0 && references(id) > 1;
        if (id != 0 && packed_[id]) {
            ++reopened_;
            if (!shared) packed_[id] = false;
        }
        if (id == 0 || shared) {
            id = next_id_++;
            packed_[id] = false;
        }
    }

    int references(int id) const {
        int n = 0;
        for (const ModelSequence& m : model_) n += std::ranges::count(m.blocks, id) > 0 ? 1 : 0;
        return n;
    }

    void model_write(ModelSequence& m, bool key, std::uint32_t cell, const float* row) {
        if (cell >= m.size && m.cut) {
            touch(m, m.size / tokens_);
            m.cut = false;
        }
        touch(m, cell / tokens_);
        if (m.cut && cell / tokens_ == m.size / tokens_) m.cut = false;
        Row rounded(row, row + channels_);
        for (float& x : rounded) x = round_to_f16(x);
        (key ? m.cells[cell].key : m.cells[cell].value) = std::move(rounded);
        m.size = std::max(m.size, cell + 1);
    }

    void append(std::size_t s) {
        const std::uint32_t n = below(3) == 0 ? 1 : below(3 * tokens_);
        const Row keys = random_rows(rng_, n, channels_), values = random_rows(rng_, n, channels_);
        const std::uint32_t first = model_[s].size;
        sequences_[s].append(keys.data(), values.data(), n);
        for (std::uint32_t i = 0; i < n; ++i) {
            model_write(model_[s], true, first + i, &keys[std::size_t{i} * channels_]);
            model_write(model_[s], false, first + i, &values[std::size_t{i} * channels_]);
        }
    }

    // Runs, single cells, cells named twice, holes.
    void write(std::size_t s) {
        std::vector<std::uint32_t> cells;
        const std::uint32_t range = model_[s].size + 1 + (below(4) == 0 ? 3 * tokens_ : 0);
        for (std::uint32_t runs = 1 + below(3); runs > 0; --runs) {
            std::uint32_t cell = below(range);
            for (std::uint32_t n = 1 + below(below(2) == 0 ? 3 : tokens_); n > 0; --n) {
                cells.push_back(cell++);
            }
        }
        const std::size_t stride = channels_ + below(3);
        const bool key = below(2) == 0;
        const Row rows = random_rows(rng_, cells.size(), channels_, stride);
        if (key) {
            sequences_[s].write_keys(cells, rows.data(), stride);
        } else {
            sequences_[s].write_values(cells, rows.data(), stride);
        }
        for (std::size_t i = 0; i < cells.size(); ++i) {
            model_write(model_[s], key, cells[i], &rows[i * stride]);
        }
    }

    void truncate(std::size_t s) {
        ModelSequence& m = model_[s];
        const std::uint32_t back = below(2) == 0 ? below(5) : below(2 * tokens_);
        const std::uint32_t size = m.size > back ? m.size - back : 0;
        sequences_[s].truncate(size);
        if (size == m.size) return;
        m.size = size;
        m.cells.erase(m.cells.lower_bound(size), m.cells.end());
        m.blocks.resize((size + tokens_ - 1) / tokens_);
        m.cut = size % tokens_ != 0 && m.blocks.back() != 0;
    }

    bool full(const ModelSequence& m, std::uint32_t b) const {
        for (std::uint32_t cell = b * tokens_; cell < (b + 1) * tokens_; ++cell) {
            const auto found = m.cells.find(cell);
            if (found == m.cells.end() || !found->second.key || !found->second.value) return false;
        }
        return true;
    }

    // Calls `pack` on the real thing; those of the named blocks that can be packed then are.
    template <class F>
    void pack_both(std::size_t s, const std::set<std::uint32_t>& blocks, F pack) {
        const ModelSequence& m = model_[s];
        std::vector<std::uint32_t> due;
        for (const std::uint32_t b : blocks) {
            if (plan_->scheme().exact() || b >= m.blocks.size() || !full(m, b)) continue;
            if (!packed_[m.blocks[b]]) due.push_back(b);
        }
        pack();
        for (const std::uint32_t b : due) {
            const int id = m.blocks[b];
            packed_[id] = true;
            ++encoded_;
            // The new truth, for all who share the block: what is read now, if it is near enough.
            for (std::size_t other = 0; other < model_.size(); ++other) {
                if (b < model_[other].blocks.size() && model_[other].blocks[b] == id) {
                    pack_from(other, b);
                }
            }
        }
    }

    void pack_old(std::size_t s) {
        std::set<std::uint32_t> old;
        const Retention& r = retention_;
        const std::uint32_t size = model_[s].size;
        std::uint32_t boundary = size > r.window ? size - r.window : 0;
        if (r.flush > 0) boundary = boundary / r.flush * r.flush;
        for (std::uint32_t b = 0; (b + 1) * tokens_ <= boundary; ++b) {
            if (b * tokens_ >= r.sinks) old.insert(b);
        }
        pack_both(s, old, [&] { sequences_[s].pack(executor()); });
    }

    void pack(std::size_t s) {
        std::vector<std::uint32_t> blocks;
        for (int i = 0; i < 4; ++i) {
            blocks.push_back(below(static_cast<std::uint32_t>(model_[s].blocks.size()) + 2));
        }
        pack_both(s, {blocks.begin(), blocks.end()},
                  [&] { sequences_[s].pack(blocks, executor()); });
    }

    void destroy(std::size_t s) {
        const auto at = static_cast<std::ptrdiff_t>(s);
        sequences_.erase(sequences_.begin() + at);
        model_.erase(model_.begin() + at);
        if (sequences_.empty()) add(Sequence(store_, plan_, retention_), {});
    }

    void move(std::size_t s) {
        Sequence taken = std::move(sequences_[s]);
        Sequence other(store_, plan_, retention_);
        const Row row(channels_, 1.0f);
        other.append(row.data(), row.data(), 1);
        other = std::move(taken);
        sequences_[s] = std::move(other);
    }

    // ---- checks ----

    // Loose: the codecs' own tests hold the laws. Here it must be seen that the right rows came
    // back.
    void check_near(const Codec& codec, const Row& was, const Row& is, float largest) const {
        const float levels = codec.exact() ? 1.0f : static_cast<float>(codec.level_count() - 1);
        const float metadata = codec.metadata == Metadata::fp16 ? 0.01f : 0.25f;
        // A transform shares an outlier's error out among its neighbours.
        const bool mixed = codec.axis == Axis::sorted || codec.rotation != Rotate::none;
        const float bound = codec.exact() ? 0.0f
                            : mixed       ? 0.5f * largest
                                          : largest / levels * 1.01f + metadata * largest;
        bool near = true;
        for (std::size_t c = 0; c < was.size(); ++c) near &= std::abs(was[c] - is[c]) <= bound;
        if (!near) FAIL_CHECK("a packed row is too far from what was written");
    }

    void pack_from(std::size_t s, std::uint32_t b) {
        float largest_key = 0, largest_value = 0;
        const auto largest = [](float& so_far, const Row& row) {
            for (const float x : row) so_far = std::max(so_far, std::abs(x));
        };
        // A fork may have been cut: its missing cells still count for the groups' ranges.
        for (const ModelSequence& m : model_) {
            if (b >= m.blocks.size() || m.blocks[b] != model_[s].blocks[b]) continue;
            for (auto& [cell, rows] : m.cells) {
                if (cell / tokens_ != b) continue;
                if (rows.key) largest(largest_key, *rows.key);
                if (rows.value) largest(largest_value, *rows.value);
            }
        }
        std::vector<std::uint16_t> decoded(plan_->exact_bytes() / 2);
        std::vector<std::byte> copy;
        const BlockView view = lowkv::test::readable(sequences_[s], b, copy);
        decode_block(*plan_, view.keys, reinterpret_cast<std::byte*>(decoded.data()));
        const std::uint16_t* keys = decoded.data();
        const std::uint16_t* values = keys + std::size_t{channels_} * tokens_;
        for (auto& [cell, rows] : model_[s].cells) {
            if (cell / tokens_ != b) continue;
            const std::uint32_t t = cell % tokens_;
            Row key(channels_), value(channels_);
            for (std::uint32_t c = 0; c < channels_; ++c) {
                key[c] = f16_value(keys[std::size_t{c} * tokens_ + t]);
                value[c] = f16_value(values[std::size_t{t} * channels_ + c]);
            }
            if (rows.key) {
                check_near(plan_->scheme().key, *rows.key, key, largest_key);
                rows.key = key;
            }
            if (rows.value) {
                check_near(plan_->scheme().value, *rows.value, value, largest_value);
                rows.value = value;
            }
        }
    }

    void check(std::size_t s) {
        const Sequence& sequence = sequences_[s];
        const ModelSequence& m = model_[s];
        REQUIRE(sequence.size() == m.size);
        REQUIRE(sequence.blocks() == m.blocks.size());
        for (std::uint32_t b = 0; b < m.blocks.size(); ++b) {
            const BlockView view = sequence.view(b);
            const bool packed = m.blocks[b] != 0 && packed_.at(m.blocks[b]);
            const bool same = (view.keys != nullptr) == (m.blocks[b] != 0) &&
                              sequence.full(b) == full(m, b) && sequence.packed(b) == packed &&
                              view.packed == packed;
            if (!same) FAIL("block ", b, " of ", m.blocks.size());
        }
        const Row zeros(channels_, 0.0f);
        for (std::uint32_t cell = 0; cell < m.size + tokens_; ++cell) {
            // Each read of a packed cell decodes its block: a few will do.
            if (cell < m.size && sequence.packed(cell / tokens_) && below(tokens_) != 0) continue;
            const auto found = m.cells.find(cell);
            const Cell rows = found == m.cells.end() ? Cell{} : found->second;
            const Row& key = rows.key ? *rows.key : zeros;
            const Row& value = rows.value ? *rows.value : zeros;
            const bool same = read_key(sequence, cell) == key &&
                              read_value(sequence, cell) == value &&
                              lies_as_documented(sequence, cell, key, value);
            if (!same) FAIL("cell ", cell, " of ", m.size);
        }
    }

    // Attention reads exact blocks where they lie.
    bool lies_as_documented(const Sequence& sequence, std::uint32_t cell, const Row& key,
                            const Row& value) const {
        if (cell >= sequence.size()) return true;
        const std::uint32_t t = cell % tokens_;
        std::vector<std::byte> copy;
        const BlockView view = lowkv::test::readable(sequence, cell / tokens_, copy);
        if (view.keys == nullptr || view.packed) return true;
        const auto* keys = reinterpret_cast<const std::uint16_t*>(view.keys);
        const auto* values = reinterpret_cast<const std::uint16_t*>(view.values);
        bool same = true;
        for (std::uint32_t c = 0; c < channels_; ++c) {
            same &= f16_value(keys[std::size_t{c} * tokens_ + t]) == key[c];
            same &= f16_value(values[std::size_t{t} * channels_ + c]) == value[c];
        }
        return same;
    }

    void check_stats() const {
        std::set<int> live;
        for (const ModelSequence& m : model_) live.insert(m.blocks.begin(), m.blocks.end());
        live.erase(0);
        std::size_t packed = 0;
        for (const int id : live) {
            packed += packed_.at(id) ? 1 : 0;
        }
        const StoreStats stats = store_->stats();
        REQUIRE(stats.packed_blocks == packed);
        REQUIRE(stats.exact_blocks == live.size() - packed);
        REQUIRE(stats.packed_bytes == packed * plan_->packed_bytes());
        REQUIRE(stats.exact_bytes == (live.size() - packed) * plan_->exact_bytes());
        REQUIRE(stats.peak_bytes >= stats.exact_bytes + stats.packed_bytes);
        REQUIRE(stats.reserved_bytes >= stats.exact_bytes + stats.packed_bytes);
        REQUIRE(stats.reopened_blocks == reopened_);
        REQUIRE(stats.encoded_blocks == encoded_);
    }
};

}  // namespace

TEST_CASE("random operations against a model") {
    const Case cases[] = {
        {"kivi2", kivi2, {2, 16}, {.window = 32, .sinks = 5, .flush = 0}},
        {"flush", kivi2, {1, 16}, {.window = 40, .sinks = 0, .flush = 64}},
        {"no window", kivi2, {1, 32}, {.window = 0, .sinks = 0, .flush = 0}},
        {"long groups",
         {uniform_codec(4, Axis::channel, 64), uniform_codec(3, Axis::token, 32)},
         {1, 16},
         {.window = 10, .sinks = 64, .flush = 0}},
        {"fp8",
         {uniform_codec(8, Axis::token, 32, Metadata::fp8_e4m3),
          uniform_codec(4, Axis::channel, 128)},
         {1, 16},
         {.window = 0, .sinks = 1, .flush = 0}},
        {"exact keys",
         {Codec{}, uniform_codec(2, Axis::token, 64)},
         {3, 16},
         {.window = 64, .sinks = 33, .flush = 32}},
        {"exact", exact, {2, 16}, {.window = 0, .sinks = 0, .flush = 0}},
        {"lowkv2.8",
         parse_scheme("lowkv2.8").base,
         {2, 64},
         {.window = 10, .sinks = 1, .flush = 0}},
    };
    for (const Case& c : cases) {
        for (unsigned seed = 1; seed <= 4; ++seed) {
            if (!lowkv::test::in_sample(seed - 1)) continue;
            CAPTURE(c.name);
            CAPTURE(seed);
            Fuzz(c, seed).run(200);
        }
    }
}
