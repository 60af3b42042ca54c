#include "memory.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "lowkv/error.h"
#include "platform/memory.h"

namespace lowkv::devices {
namespace {

constexpr std::size_t unit = LOWKV_ADDRESS_UNIT;
// A new buffer has the largest of: least_bytes, all of the device's memory / least_part, half of
// what the others have. So sixteen of them reach 80 GiB, and little is taken in advance.
constexpr std::size_t least_bytes = std::size_t{64} << 20, least_part = 512;
// If the device has less, a smaller one will do. The fewer buffers are left, the larger it must be:
// the last one has what the others have / least_growth at least.
constexpr std::size_t least_growth = 8;
constexpr std::size_t most_bytes = std::size_t{LOWKV_ADDRESS_OFFSET} * unit;

}  // namespace

Memory::~Memory() {
    for (Segment& segment : segments_) close(segment);
}

void Memory::close(Segment& segment) noexcept {
    if (segment.reserved != nullptr) platform::unmap_memory(segment.reserved, segment.bytes);
    segment.reserved = nullptr;
    segment.bytes = 0;
    segment.ranges.clear();
    segment.buffer = Buffer();
}

std::size_t Memory::total() const noexcept {
    std::size_t bytes = 0;
    for (const Segment& segment : segments_) bytes += segment.bytes;
    return bytes;
}

std::byte* Memory::allocate(std::size_t bytes) {
    queue_.check();
    if (bytes > most_bytes) bytes = std::numeric_limits<std::size_t>::max() / 2;
    bytes = (std::max(bytes, unit) + unit - 1) / unit * unit;
    for (Segment& segment : segments_)
        if (std::byte* found = take(segment, bytes)) return found;
    return take(add(bytes), bytes);
}

std::byte* Memory::take(Segment& segment, std::size_t bytes) {
    for (auto at = segment.ranges.begin(); at != segment.ranges.end(); ++at) {
        Range& range = at->second;
        if (!range.free || range.bytes < bytes) continue;
        if (range.bytes > bytes)
            segment.ranges.emplace_hint(std::next(at), at->first + bytes,
                                        Range{range.bytes - bytes, true});
        range = {bytes, false};
        return segment.reserved + at->first;
    }
    return nullptr;
}

Memory::Segment& Memory::add(std::size_t bytes) {
    const auto slot = std::ranges::find(segments_, nullptr, &Segment::reserved);
    const std::size_t held = total(), all = queue_.memory_bytes();
    std::size_t size = std::max({bytes, least_bytes, all / least_part, held / 2}) / unit * unit;
    size = std::min({size, queue_.largest_buffer(), most_bytes});
    const auto left = static_cast<std::size_t>(
        std::max<std::ptrdiff_t>(1, std::ranges::count(segments_, nullptr, &Segment::reserved)));
    const std::size_t least =
        std::max(bytes, std::min(size, held / (least_growth * left) / unit * unit));
    for (; slot != segments_.end() && size >= least;
         size = size > least ? std::max(size / 2 / unit * unit, least) : 0) {
        if (held + size > all) continue;
        Buffer buffer = queue_.try_buffer(size);
        if (buffer.get() == nullptr) continue;
        slot->reserved = platform::reserve_addresses(size);
        slot->buffer = std::move(buffer);
        slot->bytes = size;
        slot->ranges.emplace(0, Range{size, true});
        return *slot;
    }
    throw Error(ErrorCode::device_failed, queue_.title(), " has too little memory: of its ", all,
                " bytes (at most ", queue_.largest_buffer(), " at once) the cache has taken ", held,
                " and needs more; keep fewer or shorter sequences, or give the store a budget");
}

void Memory::deallocate(const std::byte* memory) noexcept {
    auto* segment = const_cast<Segment*>(segment_of(memory));
    if (segment == nullptr) return;
    auto& ranges = segment->ranges;
    auto at = ranges.find(static_cast<std::size_t>(memory - segment->reserved));
    if (at == ranges.end()) return;
    at->second.free = true;
    const auto after = std::next(at);
    if (after != ranges.end() && after->second.free) {
        at->second.bytes += after->second.bytes;
        ranges.erase(after);
    }
    if (at != ranges.begin() && std::prev(at)->second.free) {
        std::prev(at)->second.bytes += at->second.bytes;
        ranges.erase(at);
    }
    if (ranges.size() == 1) close(*segment);
}

// Mostly the one that was asked for last: a call has thousands of blocks.
const Memory::Segment* Memory::segment_of(const std::byte* address) const noexcept {
    const auto number = reinterpret_cast<std::uintptr_t>(address);
    const auto has = [number](const Segment& segment) {
        const auto first = reinterpret_cast<std::uintptr_t>(segment.reserved);
        return first != 0 && number >= first && number - first < segment.bytes;
    };
    if (has(segments_[last_])) return &segments_[last_];
    for (const Segment& segment : segments_) {
        if (!has(segment)) continue;
        last_ = static_cast<std::size_t>(&segment - segments_.data());
        return &segment;
    }
    return nullptr;
}

const Memory::Segment* Memory::required_segment(const std::byte* address) const noexcept {
    const Segment* segment = segment_of(address);
    if (segment == nullptr) queue_.fail("looking up an address outside its memory");
    return segment;
}

Place Memory::place(const std::byte* address) const noexcept {
    const Segment* segment = required_segment(address);
    if (segment == nullptr) return {};
    return {segment->buffer.get(), static_cast<std::size_t>(address - segment->reserved)};
}

std::uint32_t Memory::address(const std::byte* address) const noexcept {
    const Segment* segment = required_segment(address);
    if (segment == nullptr) return LOWKV_NOWHERE;
    const auto at = static_cast<std::size_t>(address - segment->reserved);
    if (at % unit != 0) queue_.fail("finding a block, which is no multiple of 64");
    return static_cast<std::uint32_t>(segment - segments_.data()) << LOWKV_ADDRESS_BITS |
           static_cast<std::uint32_t>(at / unit);
}

// The segment is looked up again only where a block lies in another one.
void Memory::addresses(std::span<const BlockView> blocks, std::uint32_t* to) const noexcept {
    std::uintptr_t first = 0;
    std::size_t bytes = 0;
    std::uint32_t number = 0;
    for (const BlockView& block : blocks) {
        for (const std::byte* part : {block.keys, block.values}) {
            std::uint32_t found = LOWKV_NOWHERE;
            const std::size_t at = reinterpret_cast<std::uintptr_t>(part) - first;
            if (at < bytes && at % unit == 0) {
                found = number | static_cast<std::uint32_t>(at / unit);
            } else if (part != nullptr) {
                found = address(part);
                const Segment& segment = segments_[last_];
                first = reinterpret_cast<std::uintptr_t>(segment.reserved);
                bytes = segment.bytes;
                number = static_cast<std::uint32_t>(last_) << LOWKV_ADDRESS_BITS;
            }
            *to++ = found;
        }
    }
}

Memories Memory::all() const noexcept {
    Memories memories{};
    std::ranges::transform(segments_, memories.begin(),
                           [](const Segment& segment) { return segment.buffer.get(); });
    const auto any =
        std::ranges::find_if(memories, [](Handle buffer) { return buffer != nullptr; });
    if (any != memories.end()) std::ranges::replace(memories, nullptr, Handle{*any});
    return memories;
}

}  // namespace lowkv::devices
