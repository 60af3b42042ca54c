#include "stats_file.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "devices.h"
#include "live_buffers.h"
#include "lowkv/error.h"
#include "platform/system.h"
#include "report.h"

namespace lowkv::ggml {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto interval = std::chrono::seconds(1);

struct Cache {
    std::size_t number;
    const LiveBuffer* buffer;  // null: freed
    CacheStats stats;
};

struct Book {
    std::mutex mutex;
    std::size_t made = 0;
    std::vector<Cache> caches;
    Clock::time_point written = Clock::now() - interval;
    // Writes once when the interval is over, as the host may rest by then. Ends with the last cache
    // at the latest: a process that ends must not leave half a file beside the path.
    std::thread writer;
    bool waits = false;
    std::condition_variable ended;
};

// Statics of this file are never destroyed: a host's own globals may free caches when the process
// ends.
Book& book() {
    static auto& instance = *new Book;
    return instance;
}

// The model that this process serves, as far as its command line tells: its alias, or what it is
// loaded from; without what neither a label nor a file's name may have.
std::string model_name() {
    std::ifstream words("/proc/self/cmdline", std::ios::binary);
    std::string name = platform::environment("LLAMA_ARG_ALIAS"),
                from = platform::environment("LLAMA_ARG_MODEL");
    for (std::string before, word; std::getline(words, word, '\0'); before = word) {
        if (before == "-a" || before == "--alias") name = word;
        if (before == "-m" || before == "--model" || before == "-hf") from = word;
    }
    if (name.empty()) name = platform::text_of(platform::path_of(from).filename());
    if (name.ends_with(".gguf")) name.resize(name.rfind('.'));
    std::ranges::replace_if(
        name, [](unsigned char c) { return c < ' ' || std::strchr("\"/\\", c); }, '_');
    return name;
}

// Servers with one environment don't share a file: %p stands for the number of the process, %m for
// the model.
std::string named() {
    std::string name = platform::environment("LOWKV_STATS");
    for (const auto& [word, text] : {std::pair{"%p", std::to_string(platform::process_number())},
                                     std::pair{"%m", model_name()}})
        if (const std::size_t at = name.find(word); at != std::string::npos)
            name.replace(at, 2, text);
    return name;
}

const std::string& path() {
    static const auto& value = *new std::string(named());
    return value;
}

struct Figure {
    std::string_view state;  // the label of that name; empty: none
    std::uint64_t CacheStats::* number;
};
struct Metric {
    std::string_view name, help;  // ends with "_total": it counts
    std::initializer_list<Figure> figures;
};
const Metric metrics[] = {
    {"lowkv_cache_bytes",
     "Memory of the cells that hold something, by how they are held.",
     {{"packed", &CacheStats::packed_bytes}, {"exact", &CacheStats::exact_bytes}}},
    {"lowkv_cache_peak_bytes",
     "Highest sum of packed and exact bytes so far.",
     {{"", &CacheStats::peak_bytes}}},
    {"lowkv_cache_told_bytes",
     "The most that packed and exact bytes are between steps, as llama.cpp was told.",
     {{"", &CacheStats::told_bytes}}},
    {"lowkv_cache_cells",
     "Cells that hold something, by how they are held.",
     {{"packed", &CacheStats::cells_packed}, {"exact", &CacheStats::cells_exact}}},
    {"lowkv_cache_layers",
     "Layers served packed, and layers kept as plain f16.",
     {{"packed", &CacheStats::layers}, {"plain", &CacheStats::plain_layers}}},
    {"lowkv_cache_encoded_blocks_total",
     "Blocks packed, those that had been packed before included.",
     {{"", &CacheStats::encoded_blocks}}},
    {"lowkv_cache_reopened_blocks_total",
     "Packed blocks decoded to change rows in them, and packed once more.",
     {{"", &CacheStats::reopened_blocks}}},
    {"lowkv_cache_restarted_statistics_total",
     "Blocks whose keys did not fit the statistics of those before, and made their own.",
     {{"", &CacheStats::restarted_statistics}}},
    {"lowkv_cache_moved_blocks_total",
     "Packed blocks moved by context shifts, their codes unchanged.",
     {{"", &CacheStats::moved_blocks}}},
    {"lowkv_cache_coarsened_blocks_total",
     "Packed blocks packed once more with fewer bits, because LOWKV_BUDGET was full.",
     {{"", &CacheStats::coarsened_blocks}}},
    {"lowkv_cache_repacked_cells_total",
     "Cells of restored states that had been packed when saved, and were packed once more.",
     {{"", &CacheStats::repacked_cells}}},
};

std::string heading(std::string_view name, std::string_view help) {
    return concat("# HELP ", name, " ", help, "\n# TYPE ", name,
                  name.ends_with("_total") ? " counter\n" : " gauge\n");
}

// A scheme's canonical text has no character that a label would have to escape.
std::string text_of(const std::vector<Cache>& caches) {
    static const auto& model = *new std::string(model_name());
    std::string text;
    for (const auto& [name, help, figures] : metrics) {
        text += heading(name, help);
        for (const Cache& cache : caches)
            for (const auto& [state, number] : figures) {
                text.append(name).append(concat("{cache=\"", cache.number, "\",model=\"", model,
                                                "\",scheme=\"", cache.stats.scheme, "\""));
                if (!state.empty()) text.append(",state=\"").append(state).append("\"");
                text += concat("} ", cache.stats.*number, "\n");
            }
    }
    return concat(
        text,
        heading(
            "lowkv_elsewhere_layers",
            "Layers whose cache is in other memory, as plain f16: what -ngl or -nkvo keep there."),
        "lowkv_elsewhere_layers ", layers_elsewhere(), "\n",
        heading("lowkv_saturated_numbers_total",
                "Numbers of keys and values that were NaN, infinite, or at an f16's end."),
        "lowkv_saturated_numbers_total ", saturated_numbers(), "\n");
}

// One request's overflow: it harms that request alone, which is worth one line.
void report_saturated() {
    if (saturated_numbers() == 0) return;
    static std::once_flag said;
    std::call_once(said, [] {
        report(GGML_LOG_LEVEL_WARN,
               "a model's keys or values are NaN (stored as 0), infinite or above 65504 (stored "
               "as 65504); other requests are not affected");
    });
}

void write(Book& b) {
    b.written = Clock::now();
    try {
        platform::replace_file(platform::path_of(path()), text_of(b.caches), false);
    } catch (const std::exception& error) {
        report_once(GGML_LOG_LEVEL_WARN, "LOWKV_STATS=" + path() + " can't be written (" +
                                             error.what() +
                                             "): name a file in a folder that is there");
    }
}

void write_later(Book& b) {
    if (b.waits) return;
    if (b.writer.joinable()) b.writer.join();  // it has let the mutex go for good
    b.waits = true;
    b.writer = std::thread([&b] {
        std::unique_lock lock(b.mutex);
        b.ended.wait_until(lock, b.written + interval, [&] { return !b.waits; });
        if (b.waits) write(b);
        b.waits = false;
    });
}

// Freed caches stay in the file until a new one is made: a process that ends leaves its last
// figures, one that makes a cache per task does not pile them up.
Cache& entry(Book& b, const LiveBuffer& buffer) {
    const auto known = std::find_if(b.caches.begin(), b.caches.end(),
                                    [&](const Cache& c) { return c.buffer == &buffer; });
    if (known != b.caches.end()) return *known;
    std::erase_if(b.caches, [](const Cache& c) { return c.buffer == nullptr; });
    return b.caches.emplace_back(Cache{b.made++, &buffer, {}});
}

void write_stats(const LiveBuffer& buffer, bool last) {
    if (path().empty()) return;
    Book& b = book();
    std::unique_lock lock(b.mutex);
    Cache& cache = entry(b, buffer);
    cache.stats = {};
    buffer.add_stats(cache.stats);
    if (last) cache.buffer = nullptr;
    if (last || Clock::now() - b.written >= interval) return write(b);
    try {
        write_later(b);
    } catch (const std::system_error&) {  // no thread can be had
        b.waits = false;
        write(b);
    }
}

// No thread of ours runs on when the last cache is gone.
void end_writer() {
    Book& b = book();
    std::unique_lock lock(b.mutex);
    if (std::ranges::any_of(b.caches, [](const Cache& c) { return c.buffer != nullptr; })) return;
    b.waits = false;
    b.ended.notify_all();
    std::thread writer = std::move(b.writer);
    lock.unlock();
    if (writer.joinable()) writer.join();
}

}  // namespace

void write_stats_if_due(const LiveBuffer& buffer) {
    report_saturated();
    write_stats(buffer, false);
}
void write_last_stats(const LiveBuffer& buffer) {
    write_stats(buffer, true);
    end_writer();
}

}  // namespace lowkv::ggml
