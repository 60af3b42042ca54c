// lowkv-trial PLUGIN [DEVICE]: whether the plug-in fits a ggml that is newer than all it knows or,
// with a device, whether its caches there are right, whatever the ggml. `lowkv run`
// starts it with the program's own ggml before the program itself, and lets the plug-in join that
// only if all here came out right. It writes the version that fits and its LOWKV_TRIED to stdout
// (nothing for one that is known) and ends with 0, or what differs and ends with 1, or 2 where it
// is called wrongly; a ggml whose structures are others may as well end it by a signal.
//
// All is called as llama.cpp calls it, by ggml's public functions: what they return and compute is
// compared with what was asked for, and attention with its definition in double precision. So a
// field, a function or a number that has moved is found by what it does.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "host.h"
#include "platform/system.h"
#include "trial/cache.h"

namespace lowkv::ggml::trial {
namespace {

constexpr int layers = 2;
constexpr std::uint32_t cells = 512, prompt = 330, chunk = 110, answer = 12, shifted = 40;

// A scheme, and how far its attention may be from right, and from itself after a restored state
// (whose first rows are marked in their lowest bits), in parts of its largest number.
struct Tried {
    const char* scheme;
    double error, restored;
};
constexpr Tried exact{"exact", 1e-5, 1e-5}, packed{"lowkv4,window=32", 0.4, 0.02};

// One conversation of a stream: its rows as f16 holds them, and what attention to them is.
class Conversation {
  public:
    Conversation(Heads heads, int stream, std::uint32_t window)
        : heads_(heads), stream_(stream), window_(window), random_(heads.head_dim + stream) {}

    // Tokens written to the cells behind those before; the error of their attention.
    double step(Cache& cache, std::uint32_t tokens) {
        Cells where;
        for (std::uint32_t i = 0; i < tokens; ++i) where.push_back(length_ + i);
        std::normal_distribution<float> normal;
        std::array<std::vector<float>, layers> queries;
        const auto fill = [&](std::size_t input, std::span<float> numbers) {
            for (float& x : numbers) x = normal(random_);
            const std::size_t layer = input / 3;
            if (input % 3 == 2)
                queries[layer].assign(numbers.begin(), numbers.end());
            else
                for (const float x : numbers)
                    rows_[layer][input % 3].push_back(ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)));
        };
        const auto show = [&](std::size_t token, ggml_fp16_t* row) {
            const auto [first, last] = seen(length_ + token);
            std::fill(row + first, row + last, ggml_fp16_t{0});
        };
        require(cache.step(where, fill, show, stream_) == GGML_STATUS_SUCCESS,
                "a graph was not computed");
        double wrong = 0, most = 0;
        // Of a prompt's tokens some, the last among them.
        for (std::size_t layer = 0; layer < layers; ++layer)
            for (std::uint32_t t = (tokens - 1) % 10; t < tokens; t += 10)
                for (int head = 0; head < heads_.queries; ++head) {
                    const std::vector<double> right =
                        attention(layer, queries[layer], tokens, t, head);
                    const float* got =
                        &cache.result()[((layer * tokens + t) *
                                             static_cast<std::size_t>(heads_.queries) +
                                         static_cast<std::size_t>(head)) *
                                        right.size()];
                    for (std::size_t i = 0; i < right.size(); ++i) {
                        wrong = std::max(wrong, std::abs(right[i] - got[i]));
                        most = std::max(most, std::abs(right[i]));
                    }
                }
        length_ += tokens;
        return wrong / most;
    }

    // The keys of its tokens, turned by RoPE as ggml turns neighbours.
    void turn(int positions) {
        const auto d = static_cast<std::size_t>(heads_.head_dim);
        for (auto& layer : rows_)
            for (std::size_t i = 0; i < layer[0].size(); i += 2) {
                const double angle = positions * std::pow(10000.0, -static_cast<double>(i % d) /
                                                                       static_cast<double>(d));
                const double x = layer[0][i], y = layer[0][i + 1];
                layer[0][i] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
                layer[0][i + 1] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
            }
    }

  private:
    Heads heads_;
    int stream_;
    std::uint32_t window_, length_ = 0;
    std::mt19937 random_;
    std::array<std::array<std::vector<float>, 2>, layers> rows_;  // of a layer keys, values

    std::pair<std::size_t, std::size_t> seen(std::size_t token) const {
        return {token >= window_ ? token + 1 - window_ : 0, token + 1};
    }

    std::vector<double> attention(std::size_t layer, std::span<const float> queries,
                                  std::uint32_t tokens, std::uint32_t token, int head) const {
        const auto d = static_cast<std::size_t>(heads_.head_dim);
        const auto [first, last] = seen(length_ + token);
        const float* query = &queries[(static_cast<std::size_t>(head) * tokens + token) * d];
        const auto row = [&](std::size_t part, std::size_t t) {
            const int kv_head = head / (heads_.queries / heads_.kv);
            return &rows_[layer][part][(t * static_cast<std::size_t>(heads_.kv) +
                                        static_cast<std::size_t>(kv_head)) *
                                       d];
        };
        std::vector<double> sum(d);
        double weights = 0;
        for (std::size_t t = first; t < last; ++t) {
            double score = 0;
            for (std::size_t c = 0; c < d; ++c) score += double{query[c]} * row(0, t)[c];
            const double weight = std::exp(heads_.scale() * score);
            weights += weight;
            for (std::size_t c = 0; c < d; ++c) sum[c] += weight * row(1, t)[c];
        }
        for (double& x : sum) x /= weights;
        return sum;
    }
};

// The largest difference, in parts of the largest number.
double distance(std::span<const float> a, std::span<const float> b) {
    double wrong = 0, most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        wrong = std::max(wrong, double{std::abs(a[i] - b[i])});
        most = std::max(most, double{std::abs(a[i])});
    }
    return wrong / most;
}

// Whether a live cache of the plug-in is packed, as the plug-in says.
bool holds_codes(ggml_backend_dev_t device) {
    // The name is a text in the plug-in.
    auto* const stats = reinterpret_cast<std::size_t (*)(char*, std::size_t)>(
        platform::symbol_beside(ggml_backend_dev_name(device), "lowkv_stats_json"));
    require(stats != nullptr, "the plug-in tells no statistics");
    std::array<char, 1024> text{};
    stats(text.data(), text.size());
    constexpr std::string_view name = "\"packed_bytes\": ";
    const std::size_t at = std::string_view(text.data()).find(name);
    return at != std::string_view::npos && text[at + name.size()] != '0';
}

// Another cache, to which all rows of this one are written as llama.cpp restores a state.
Cache restored(ggml_backend_dev_t device, Heads heads, const Cache& cache) {
    Cache other(device, heads, cells, 2, layers);
    other.ask();
    for (std::size_t i = 0; i < cache.tensors().size(); ++i) {
        Bytes rows(ggml_nbytes(cache.tensors()[i]));
        for (int stream = 0; stream < 2; ++stream) {
            const std::size_t at = rows.size() / 2 * static_cast<std::size_t>(stream);
            const std::size_t size = (prompt + answer) * heads.row_bytes();
            ggml_backend_tensor_get(cache.tensors()[i], rows.data(), at, size);
            ggml_backend_tensor_set(other.tensors()[i], rows.data(), at, size);
        }
    }
    return other;
}

void try_attention(ggml_backend_dev_t device, const Tried& tried, Heads heads,
                   std::uint32_t window) {
    const double bound = tried.error;
    Cache cache(device, heads, cells, 2, layers);
    cache.ask();
    std::vector<Conversation> both{{heads, 0, window}, {heads, 1, window}};
    for (std::uint32_t at = 0; at < prompt; at += chunk)
        for (Conversation& one : both)
            require(one.step(cache, chunk) < bound, "attention to a prompt is wrong");
    for (std::uint32_t i = 0; i < answer; ++i)
        for (Conversation& one : both)
            require(one.step(cache, 1) < bound, "attention to an answer's tokens is wrong");
    require(holds_codes(device) != (tried.scheme == exact.scheme), "a cache is not packed");
    Cache other = restored(device, heads, cache);
    std::vector<Conversation> again = both;
    for (std::size_t i = 0; i < both.size(); ++i) {
        require(both[i].step(cache, 1) < bound, "attention after a state was saved is wrong");
        require(again[i].step(other, 1) < bound, "attention after a state was restored is wrong");
        require(distance(cache.result(), other.result()) < tried.restored,
                "a restored state is another");
    }
    require(cache.shift(std::vector<std::int32_t>(2 * cells, shifted)) == GGML_STATUS_SUCCESS,
            "a context shift was not computed");
    for (Conversation& one : both) {
        one.turn(shifted);  // and rounds them once more
        require(one.step(cache, 1) < std::max(bound, 1e-3),
                "attention after a context shift is wrong");
    }
}

// A tensor as ggml made it, read through the structure that this program was compiled with.
void try_structures() {
    const Context context = new_context();
    ggml_context* c = context.get();
    ggml_tensor* base = ggml_new_tensor_3d(c, GGML_TYPE_F16, 64, 10, 3);
    ggml_set_name(base, "cache_k_l7");
    ggml_tensor* view = ggml_view_2d(c, base, 32, 5, base->nb[1], 2 * base->nb[1]);
    ggml_set_input(base);
    require(base->type == GGML_TYPE_F16 && base->ne[0] == 64 && base->ne[1] == 10 &&
                base->ne[2] == 3 && base->ne[3] == 1 && base->nb[1] == 128 && base->nb[2] == 1280,
            "a tensor's shape lies elsewhere");
    require(std::string_view(base->name) == "cache_k_l7", "a tensor's name lies elsewhere");
    require(view->view_src == base && view->view_offs == 256, "a view lies elsewhere");
    require((base->flags & GGML_TENSOR_FLAG_INPUT) != 0, "a tensor's flags lie elsewhere");
    ggml_tensor* by = ggml_new_tensor_1d(c, GGML_TYPE_I32, 10);
    ggml_tensor* turned =
        ggml_rope_ext(c, ggml_view_3d(c, base, 64, 1, 10, 128, 128, 0), by, nullptr, 64,
                      GGML_ROPE_TYPE_NEOX, 0, 10000.0f, 1, 0, 1, 32, 1);
    require(turned->src[1] == by && turned->op_params[1] == 64 &&
                turned->op_params[2] == GGML_ROPE_TYPE_NEOX,
            "an operation's sources and parameters lie elsewhere");
    require(std::string_view(ggml_op_name(turned->op)) == "ROPE", "an operation's number is wrong");
}

// The device, its buffers and its backend, each by the functions that programs call.
void try_tables(ggml_backend_dev_t device) {
    const std::string_view name = ggml_backend_dev_name(device);
    require(name == "LOWKV" && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU &&
                std::string_view(ggml_backend_dev_description(device)).starts_with("lowkv"),
            "the device's table is another");
    ggml_backend_dev_props props{};
    ggml_backend_dev_get_props(device, &props);
    require(props.name == name && props.caps.mmap_support && !props.caps.async,
            "the device's properties are others");
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    ggml_backend_buffer_type_t host = ggml_backend_cpu_buffer_type();
    const std::size_t alignment = ggml_backend_buft_get_alignment(type);
    require(type != nullptr && ggml_backend_buft_get_device(type) == device &&
                !ggml_backend_buft_is_host(type) && alignment >= 16 && alignment <= 4096 &&
                ggml_backend_buft_get_max_size(type) > (std::size_t{1} << 30),
            "the buffer type's table is another");
    require(ggml_backend_dev_supports_buft(device, type) &&
                ggml_backend_dev_supports_buft(device, host),
            "the device refuses its buffers");
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    require(backend != nullptr && ggml_backend_get_device(backend.get()) == device &&
                ggml_backend_get_default_buffer_type(backend.get()) == type,
            "the backend's table is another");
    ggml_backend_synchronize(backend.get());
    Cache cache(device, {64, 4, 2}, cells, 1, 1);
    Bytes bytes(1280, std::byte{0x3c}), back(1280);
    ggml_backend_tensor_set(cache.keys(0), bytes.data(), 2560, bytes.size());
    ggml_backend_tensor_get(cache.keys(0), back.data(), 2560, back.size());
    require(ggml_backend_buffer_get_type(cache.buffer()) == type &&
                ggml_backend_buffer_get_size(cache.buffer()) > 0 && back == bytes,
            "the buffer's table is another");
    cache.clear();
}

ggml_backend_dev_t load(const char* plugin, const char* scheme) {
    platform::set_environment("LOWKV_SCHEME", scheme);
    if (const std::string problem = platform::load_problem(plugin); !problem.empty())
        throw std::runtime_error("does not load: " + problem);
    require(ggml_backend_load(plugin) != nullptr, "the plug-in refused");
    ggml_backend_dev_t device = ggml_backend_dev_by_name("LOWKV");
    require(device != nullptr, "the plug-in's device is not there");
    return device;
}

void try_all(const char* plugin, const char* on) {
    for (const char* name : {"LOWKV_BUDGET", "LOWKV_CALIBRATION", "LOWKV_STATES", "LOWKV_STATS",
                             "LOWKV_CONVERSATIONS"})
        platform::set_environment(name, "");
    platform::set_environment("LOWKV_DEVICE", on);
    platform::set_environment("LOWKV_TRIED", hash_of(ggml_library()));
    ggml_backend_load_all();
    try_structures();
    try_tables(load(plugin, "exact"));
    constexpr std::array heads{Heads{64, 4, 2}, Heads{128, 4, 1}, Heads{256, 2, 1}};
    for (const Tried& tried : {exact, packed})
        for (const Heads& one : heads)
            for (const std::uint32_t window : {cells, 200u})
                try_attention(load(plugin, tried.scheme), tried, one, window);
}

}  // namespace
}  // namespace lowkv::ggml::trial

int main(int argc, char** argv) {
    if (argc < 2 || argc > 3) {
        std::fputs("usage: lowkv-trial PLUGIN [DEVICE] (lowkv run and lowkv doctor start it)\n",
                   stderr);
        return 2;
    }
    try {
        if (argc == 2 && !lowkv::ggml::is_newer_than_known(ggml_version())) return 0;
        lowkv::ggml::trial::try_all(argv[1], argc == 3 ? argv[2] : "");
        std::printf("%s %s\n", ggml_version(),
                    lowkv::ggml::hash_of(lowkv::ggml::ggml_library()).c_str());
        return 0;
    } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
