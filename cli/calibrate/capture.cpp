#include "calibrate/capture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "attention_op.h"
#include "cache_name.h"
#include "common/terminal.h"
#include "ggml.h"
#include "host.h"
#include "lowkv/error.h"
#include "rope_params.h"

namespace lowkv::cli {

namespace {

using calibration::LayerSamples;
using ggml::operation;
namespace op_name = ggml::op_name;

// A tensor's bytes at [i0, i1, i2, 0].
const char* at(const ggml_tensor& tensor, std::int64_t i1, std::int64_t i2 = 0) {
    return static_cast<const char*>(tensor.data) + static_cast<std::size_t>(i1) * tensor.nb[1] +
           static_cast<std::size_t>(i2) * tensor.nb[2];
}

// Receives the nodes as they have been computed. Exceptions wait until the decode has returned.
class Recorder {
  public:
    Recorder(std::uint32_t layers, std::uint32_t context, std::size_t windows, const Scheme& scheme,
             const CaptureOptions& options)
        : layers_(layers), scheme_(scheme), windows_(windows), context_(context) {
        for (std::uint32_t i = 0; i < options.queries; ++i) {
            const std::uint64_t span = context - options.first_query;
            positions_.push_back(static_cast<std::uint32_t>(options.first_query +
                                                            (i + 1) * span / options.queries - 1));
        }
        const auto [first, last] = std::ranges::unique(positions_);
        positions_.erase(first, last);
    }

    static bool observe(ggml_tensor* node, bool ask, void* user) {
        auto& self = *static_cast<Recorder*>(user);
        if (ask) return self.wanted(*node);
        try {
            if (!self.failure_) self.take(*node);
        } catch (...) {
            self.failure_ = std::current_exception();
        }
        return !self.failure_;
    }

    void begin(std::size_t window, std::size_t position) {
        window_ = window;
        position_ = position;
    }

    void rethrow() const {
        if (failure_) std::rethrow_exception(failure_);
    }

    std::vector<LayerSamples> finish() {
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            const LayerSamples& layer = layers_[i];
            const std::string name = concat("layer ", i);
            if (layer.q_heads == 0)
                throw Failure(name +
                              " has no attention that reads a cache of keys and values of "
                              "its own: such models can't be calibrated");
            if (!(layer.shape == layers_.front().shape))
                throw Failure(name +
                              " has another shape than layer 0: such models can't be calibrated");
        }
        return std::move(layers_);
    }

  private:
    static std::optional<ggml::CacheName> cache_of(const ggml_tensor& view) {
        return ggml::parse_cache_name(ggml_get_name(ggml::root(&view)));
    }

    static bool wanted(const ggml_tensor& node) {
        return operation(node) == op_name::flash_attn_ext ||
               (operation(node) == op_name::set_rows && cache_of(node).has_value());
    }

    LayerSamples& layer(const ggml::CacheName& name) {
        const auto index = static_cast<std::size_t>(name.layer);
        if (name.layer < 0 || index >= layers_.size())
            throw Failure(concat("llama.cpp has a cache of layer ", name.layer,
                                 ", which the model doesn't count"));
        return layers_[index];
    }

    void take(const ggml_tensor& node) {
        if (operation(node) == op_name::set_rows)
            take_rows(node, *cache_of(node));
        else
            take_queries(ggml::AttentionOp(node));
    }

    void take_rows(const ggml_tensor& node, const ggml::CacheName& name) {
        const ggml_tensor& rows = *node.src[0];
        const ggml_tensor& cells = *node.src[1];
        LayerSamples& into = layer(name);
        if (rows.type != GGML_TYPE_F32 || cells.type != GGML_TYPE_I64 || rows.ne[2] != 1)
            throw Failure(concat("layer ", name.layer,
                                 " writes its cache in a way that can't be read along"));
        const auto channels = static_cast<std::size_t>(rows.ne[0]);
        const bool keys = name.part == Part::keys;
        std::vector<std::uint16_t>& out = keys ? into.keys : into.values;
        out.resize(windows_ * context_ * channels);
        for (std::int64_t r = 0; r < rows.ne[1]; ++r) {
            std::int64_t cell = 0;
            std::memcpy(&cell, static_cast<const char*>(cells.data) + r * 8, sizeof cell);
            const std::size_t position = position_ + static_cast<std::size_t>(r);
            if (cell != static_cast<std::int64_t>(position))
                throw Failure(concat("llama.cpp put token ", position, " into cell ", cell,
                                     ": such a cache can't be read along"));
            // The cache stores numbers beyond f16's range saturated.
            const auto* row = reinterpret_cast<const float*>(at(rows, r));
            std::vector<float> within(row, row + channels);
            for (float& x : within) x = std::isnan(x) ? 0 : std::clamp(x, -65504.0f, 65504.0f);
            ggml_fp32_to_fp16_row(
                within.data(), out.data() + (window_ * context_ + position) * channels, rows.ne[0]);
        }
        const auto index = static_cast<std::uint32_t>(name.layer);
        if (!keys || !into.rope.frequencies.empty() ||
            scheme_.layer(index).key.stage == Stage::post)
            return;
        if (const ggml_tensor* rope = ggml::rope_above(&rows)) into.rope = ggml::rope_of(*rope);
    }

    void take_queries(const ggml::AttentionOp& attention) {
        const auto name = cache_of(*attention.k);
        if (!name) return;
        LayerSamples& into = layer(*name);
        const std::string what = concat("layer ", name->layer);
        if (const std::string why = attention.unsupported_heads(); !why.empty())
            throw Failure(what + " can't be calibrated: " + why);
        if (attention.shape().latent())
            throw Failure(what +
                          " can't be calibrated: its values are part of its keys "
                          "(multi-head latent attention)");
        const ggml_tensor& q = *attention.q;
        if (q.type != GGML_TYPE_F32 || q.ne[3] != 1 || attention.mask == nullptr ||
            attention.mask->type != GGML_TYPE_F16)
            throw Failure(what + " has an attention that can't be read along");
        into.shape = attention.shape();
        if (into.keys.size() != windows_ * context_ * into.shape.channels() ||
            into.values.size() != into.keys.size())
            throw Failure(what + " reads another cache than it writes");
        into.q_heads = static_cast<std::uint32_t>(q.ne[2]);
        into.context = static_cast<std::uint32_t>(context_);
        into.scale = attention.scale;
        into.softcap = attention.softcap;
        into.slopes = attention.slopes();
        if (attention.sinks != nullptr) {
            const auto* sinks = static_cast<const float*>(attention.sinks->data);
            into.sinks.assign(sinks, sinks + into.q_heads);
        }
        for (const std::uint32_t position : positions_) {
            const auto token =
                static_cast<std::int64_t>(position) - static_cast<std::int64_t>(position_);
            if (token >= 0 && token < q.ne[1]) take_query(attention, position, token, into);
        }
    }

    void take_query(const ggml::AttentionOp& attention, std::uint32_t position, std::int64_t token,
                    LayerSamples& into) const {
        into.query_rows.push_back(static_cast<std::uint32_t>(window_ * context_) + position);
        for (std::int64_t h = 0; h < attention.q->ne[2]; ++h) {
            const auto* q = reinterpret_cast<const float*>(at(*attention.q, token, h));
            into.queries.insert(into.queries.end(), q, q + attention.q->ne[0]);
        }
        const auto* mask = reinterpret_cast<const ggml_fp16_t*>(at(*attention.mask, token));
        for (std::size_t t = 0; t < context_; ++t) {
            const bool there = static_cast<std::int64_t>(t) < attention.mask->ne[0];
            into.mask.push_back(there ? ggml_fp16_to_fp32(mask[t]) : -INFINITY);
        }
    }

    std::vector<LayerSamples> layers_;
    const Scheme& scheme_;
    std::size_t windows_, context_;
    std::vector<std::uint32_t> positions_;  // of the queries to take
    std::size_t window_ = 0, position_ = 0;
    std::exception_ptr failure_;
};

}  // namespace

std::vector<LayerSamples> capture(const Model& model,
                                  const std::vector<std::vector<llama_token>>& windows,
                                  const Scheme& scheme, const CaptureOptions& options,
                                  const std::function<void(std::size_t)>& tick) {
    const std::size_t length = windows.front().size();
    Recorder recorder(model.layers(), static_cast<std::uint32_t>(length), windows.size(), scheme,
                      options);
    ContextOptions stock;
    stock.cells = static_cast<std::uint32_t>(length);
    stock.chunk = options.chunk;
    stock.threads = options.threads;
    stock.whole_windows = true;  // token i is in cell i
    stock.observe = Recorder::observe;
    stock.observer = &recorder;
    Context context(model, stock);
    for (std::size_t w = 0; w < windows.size(); ++w) {
        context.clear();
        each_chunk(windows[w], options.chunk, [&](std::size_t position, Tokens chunk) {
            recorder.begin(w, position);
            context.decode(chunk);
            recorder.rethrow();
            tick(chunk.size());
        });
    }
    return recorder.finish();
}

}  // namespace lowkv::cli
