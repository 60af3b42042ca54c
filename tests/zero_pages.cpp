// release_zeros(): what is read stays the same, and pages of zeros take no memory. A page of a file
// or of shared memory that were dropped would read as the file's. And forbid_memory().

#include <doctest/doctest.h>

#include "platform/memory.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace {

const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t pages = 24;

using Bytes = std::vector<unsigned char>;

// Those of the pages that take memory. To read a page would make it one of them.
std::size_t resident(const std::byte* memory) {
    Bytes state(pages);
    REQUIRE(mincore(const_cast<std::byte*>(memory), pages * page, state.data()) == 0);
    std::size_t count = 0;
    for (const unsigned char one : state) count += one & 1;
    return count;
}

std::byte* map(int flags, int file = -1) {
    void* memory = mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, flags, file, 0);
    REQUIRE(memory != MAP_FAILED);
    return static_cast<std::byte*>(memory);
}

Bytes read(const std::byte* memory) {
    Bytes bytes(pages * page);
    std::memcpy(bytes.data(), memory, bytes.size());
    return bytes;
}

// Some pages of zeros, some with a single other byte, some full.
Bytes random_pages(std::mt19937& random, std::vector<bool>& zero) {
    Bytes bytes(pages * page, 0);
    zero.assign(pages, true);
    for (std::size_t p = 0; p < pages; ++p) {
        const auto kind = random() % 4;
        if (kind < 2) continue;
        zero[p] = false;
        if (kind == 2)
            bytes[p * page + random() % page] = static_cast<unsigned char>(1 + random() % 255);
        else
            std::memset(&bytes[p * page], 7, page);
    }
    return bytes;
}

// A file full of sevens, unlinked.
int file_of_sevens() {
    std::FILE* file = std::tmpfile();
    REQUIRE(file != nullptr);
    const Bytes sevens(pages * page, 7);
    REQUIRE(std::fwrite(sevens.data(), 1, sevens.size(), file) == sevens.size());
    std::fflush(file);
    return fileno(file);
}

TEST_CASE("zeros of the process's own memory are given back, and nothing else changes") {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        std::byte* memory = map(MAP_PRIVATE | MAP_ANONYMOUS);
        std::vector<bool> zero;
        const Bytes bytes = random_pages(random, zero);
        std::memcpy(memory, bytes.data(), bytes.size());
        REQUIRE(resident(memory) == pages);
        const std::size_t begin = random() % (bytes.size() / 2);
        const std::size_t size = 1 + random() % (bytes.size() - begin);
        lowkv::platform::release_zeros(memory + begin, size);
        std::size_t kept = 0;
        for (std::size_t p = 0; p < pages; ++p)
            kept += !zero[p] || p * page < begin || (p + 1) * page > begin + size;
        CHECK(resident(memory) == kept);
        CHECK(read(memory) == bytes);
        memory[begin] = std::byte{9};  // it is memory as before
        CHECK(memory[begin] == std::byte{9});
        munmap(memory, bytes.size());
    }
}

TEST_CASE("memory of other kinds reads as before") {
    const int file = file_of_sevens();
    for (const int flags : {MAP_PRIVATE, MAP_SHARED, MAP_SHARED | MAP_ANONYMOUS,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED}) {
        const bool is_file = (flags & MAP_ANONYMOUS) == 0;
        std::byte* memory = map(flags, is_file ? file : -1);
        std::memset(memory, 0, pages * page / 2);
        std::memset(memory + pages * page / 2, 5, pages * page / 2);
        const Bytes before = read(memory);
        lowkv::platform::release_zeros(memory, pages * page);
        CHECK(read(memory) == before);
        munmap(memory, pages * page);
    }
    close(file);
}

TEST_CASE("a range over several mappings is taken piece by piece") {
    const int file = file_of_sevens();
    std::byte* memory = map(MAP_PRIVATE | MAP_ANONYMOUS);
    std::byte* middle = memory + pages / 3 * page;
    REQUIRE(mmap(middle, pages / 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file,
                 0) == middle);
    std::memset(memory, 0, pages * page);
    lowkv::platform::release_zeros(memory, pages * page);
    CHECK(resident(memory) == pages / 3);
    CHECK(read(memory) == Bytes(pages * page, 0));
    munmap(memory, pages * page);
    close(file);
}

TEST_CASE("nothing, and less than a page") {
    std::byte* memory = map(MAP_PRIVATE | MAP_ANONYMOUS);
    std::memset(memory, 0, pages * page);
    lowkv::platform::release_zeros(nullptr, 0);
    lowkv::platform::release_zeros(memory, 0);
    lowkv::platform::release_zeros(memory + 1, 2 * page - 2);
    CHECK(resident(memory) == pages);
    munmap(memory, pages * page);
}

TEST_CASE("whole pages inside a range are forbidden, and named") {
    std::byte* memory = map(MAP_PRIVATE | MAP_ANONYMOUS);
    const auto is = [](std::span<const std::byte> found, const std::byte* first,
                       std::size_t count) {
        CHECK(found.data() == first);
        CHECK(found.size() == count * page);
    };
    is(lowkv::platform::forbid_memory(memory, page), memory, 1);
    is(lowkv::platform::forbid_memory(memory + 2 * page + 1, 3 * page), memory + 3 * page, 2);
    CHECK(lowkv::platform::forbid_memory(memory + 6 * page + 1, 2 * page - 2).empty());
    // What is around them is memory as before; they are it again when they are made so.
    for (const std::size_t p : {1, 2, 5, 6, 7}) memory[p * page] = std::byte{1};
    REQUIRE(lowkv::platform::set_accessible(memory + 3 * page, 2 * page, true));
    memory[3 * page] = std::byte{1};
    munmap(memory, pages * page);
}

}  // namespace
#endif
