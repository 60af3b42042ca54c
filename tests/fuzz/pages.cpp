// Pages that come from elsewhere, as vLLM's connectors bring them: packed, under a seal.

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "common/target.h"
#include "lowkv/error.h"
#include "lowkv/paged.h"
#include "round.h"

namespace lowkv::fuzz {
namespace {

constexpr std::uint32_t page_tokens = 128, pages = 3;
constexpr const char* schemes[] = {"lowkv2.8,window=0,sinks=4", "kivi2,sinks=0", "lowkv1.5,sinks=2",
                                   "turboquant3,sinks=0",       "int8,sinks=1",  "exact"};

// Pages in the host's memory, page by page as long as they need be.
class Pages {
  public:
    explicit Pages(const char* name)
        : scheme_(parse_scheme(name)),
          plan_(std::make_shared<const Plan>(neutral_plan(scheme_.base, {1, 64}))),
          bytes_(PagedLayer::whole_page_bytes(*plan_, page_tokens, sinks())),
          stride_(round_up<std::size_t>(bytes_, 64)),
          memory_(pages * stride_ / sizeof(Line)),
          layer_(std::make_shared<Store>(), plan_, scheme_.retention, 0, page_tokens,
                 {.data = memory_.front().bytes, .stride = stride_, .pages = pages, .whole = true},
                 1) {}

    std::size_t page_bytes() const { return bytes_; }
    std::span<std::byte> page(std::uint32_t number) {
        return {memory_.front().bytes + number * stride_, bytes_};
    }
    // Of a page, behind its blocks; an exact scheme's have none.
    std::span<std::byte> seal(std::uint32_t number) {
        if (plan_->scheme().exact()) return {};
        return page(number).subspan(page_tokens / plan_->block_tokens() * plan_->packed_bytes(),
                                    sizeof(std::uint64_t));
    }
    // Tokens [first, cells) of a sequence in pages 0, 1, ...
    void write(std::uint32_t first, std::uint32_t cells) {
        std::vector<std::int64_t> slots(cells - first);
        std::iota(slots.begin(), slots.end(), first);
        const std::vector<float> rows = numbers(slots.size() * channels(), cells);
        const Rows data{rows.data(), RowType::f32, channels(), channels()};
        layer_.write(data, data, slots);
    }
    void attend(std::uint32_t cells, std::uint32_t queries) {
        static constexpr std::int32_t order[] = {0, 1, 2};
        const std::vector<float> q = numbers(queries * channels(), 5);
        std::vector<float> out(q.size());
        AttentionIO io;
        io.q = q.data();
        io.out = out.data();
        io.q_token_stride = io.out_token_stride = io.q_head_stride = io.out_head_stride =
            channels();
        io.tokens = queries;
        io.heads = 1;
        const PagedSequence sequence{order, cells, queries, 0};
        AttentionParams params;
        params.scale = 0.125f;
        layer_.attend({&sequence, 1}, io, params, workspace_);
    }

  private:
    struct alignas(64) Line {  // as pages must be
        std::byte bytes[64];
    };

    std::uint32_t sinks() const { return plan_->scheme().exact() ? 0 : scheme_.retention.sinks; }
    std::size_t channels() const { return plan_->shape().channels(); }

    Scheme scheme_;
    std::shared_ptr<const Plan> plan_;
    std::size_t bytes_, stride_;
    std::vector<Line> memory_;
    PagedLayer layer_;
    AttentionWorkspace workspace_;
};

// Pages 0 and 1, packed.
std::unique_ptr<Pages> packed(const char* scheme) {
    auto made = std::make_unique<Pages>(scheme);
    made->write(0, 2 * page_tokens);
    made->attend(2 * page_tokens, 2 * page_tokens);
    return made;
}

}  // namespace

std::vector<Bytes> seeds() {
    std::vector<Bytes> all;
    for (unsigned number = 0; number < std::size(schemes); ++number) {
        const std::unique_ptr<Pages> from = packed(schemes[number]);
        Bytes both;
        for (const std::uint32_t page : {0u, 1u})
            both.insert(both.end(), from->page(page).begin(), from->page(page).end());
        all.push_back(seed({number, 1}, both));
        all.push_back(seed({number, 0}, std::span(both).first(from->page_bytes())));
    }
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    Input input(bytes);
    const char* scheme = schemes[input.below(std::size(schemes))];
    const unsigned how = input.byte();
    const Bytes file = input.rest();
    Pages held(scheme);
    for (std::uint32_t number = 0; number < 2; ++number) {
        const std::size_t first = std::min(file.size(), number * held.page_bytes());
        std::ranges::copy(
            std::span(file).subspan(first, std::min(file.size() - first, held.page_bytes())),
            held.page(number).begin());
    }
    static std::vector<std::optional<Bytes>> seals(std::size(schemes));
    std::optional<Bytes>& right =
        seals[static_cast<std::size_t>(std::ranges::find(schemes, scheme) - std::begin(schemes))];
    if (!right) {
        const std::unique_ptr<Pages> from = packed(scheme);
        right.emplace(from->seal(0).begin(), from->seal(0).end());
    }
    bool sealed = true;
    for (const std::uint32_t number : {0u, 1u}) {
        if ((how & 1) != 0) std::ranges::copy(*right, held.seal(number).begin());
        sealed &= std::ranges::equal(*right, held.seal(number));
    }
    try {
        held.attend(2 * page_tokens, 3);
        held.write(2 * page_tokens, 2 * page_tokens + 2);  // it goes on
        held.attend(2 * page_tokens + 2, 2);
        held.write(2 * page_tokens - 5, 2 * page_tokens + 1);  // a guess that was rejected
        held.attend(2 * page_tokens + 1, 1);
        require(sealed, "a page without its seal is read");
    } catch (const Error& error) {
        // Codes that can't be decoded to be written again.
        require(!sealed || error.code() == ErrorCode::invalid_image, error.what());
    }
}

}  // namespace lowkv::fuzz
