// ggml's view of CacheBuffer: the two tables of functions.

#include <cstring>
#include <exception>

#include "buffer.h"
#include "cache_size.h"
#include "host.h"
#include "lowkv/error.h"
#include "report.h"
#include "unit_codes.h"

namespace lowkv::ggml {
namespace {

CacheBuffer& self(ggml_backend_buffer_t buffer) {
    return *static_cast<CacheBuffer*>(buffer->context);
}

// Nothing may be thrown through ggml, and these calls can't fail in its eyes: the buffer remembers,
// and what is computed on it next fails.
template <class F>
void guarded(CacheBuffer& buffer, const char* what, F&& f) noexcept {
    try {
        f();
    } catch (const std::exception& error) {
        buffer.fail(what, error.what());
    }
}

void read(const CacheTensor& t, std::size_t offset, std::size_t size, void* out) {
    t.buffer->save(t, offset, size, static_cast<std::byte*>(out));
}

void write(const CacheTensor& t, std::size_t offset, std::size_t size, const void* in) {
    t.buffer->restore(t, offset, size, static_cast<const std::byte*>(in));
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    ggml_status status = GGML_STATUS_FAILED;
    guarded(self(buffer), "can't set a tensor up", [&] {
        self(buffer).init_tensor(*tensor);
        status = GGML_STATUS_SUCCESS;
    });
    return status;
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, std::uint8_t value,
                   std::size_t offset, std::size_t size) {
    const CacheTensor* t = cache_tensor(tensor);
    if (t == nullptr) {
        std::memset(static_cast<std::byte*>(tensor->data) + offset, value, size);
        return;
    }
    guarded(*t->buffer, "can't fill cache rows", [&] {
        const std::vector<std::byte> bytes(size, std::byte{value});
        write(*t, tensor->view_offs + offset, size, bytes.data());
    });
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, std::size_t offset,
                std::size_t size) {
    const CacheTensor* t = cache_tensor(tensor);
    if (t == nullptr) {
        std::memcpy(static_cast<std::byte*>(tensor->data) + offset, data, size);
        return;
    }
    guarded(*t->buffer, "can't write cache rows",
            [&] { write(*t, tensor->view_offs + offset, size, data); });
}

// Rows that can't be read: llama.cpp saves them all the same, and none may be seen when they are
// restored.
void write_bad_rows(const CacheTensor& t, std::size_t offset, std::size_t size, std::byte* data) {
    const std::size_t bytes = t.layer->row_bytes(t.part);
    std::memset(data, 0, size);
    for (std::size_t at = (bytes - offset % bytes) % bytes; at + bytes <= size; at += bytes)
        write_bad_row({data + at, bytes});
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, std::size_t offset,
                std::size_t size) {
    const CacheTensor* t = cache_tensor(tensor);
    if (t == nullptr) {
        std::memcpy(data, static_cast<const std::byte*>(tensor->data) + offset, size);
        return;
    }
    guarded(*t->buffer, "can't read cache rows", [&] {
        try {
            // States are read from the tensors and their rows; what a graph reads has heads.
            if (tensor->view_src != nullptr && tensor->ne[2] * tensor->ne[3] > 1)
                t->buffer->read(*t, tensor->view_offs + offset, size,
                                static_cast<std::byte*>(data));
            else
                read(*t, tensor->view_offs + offset, size, data);
        } catch (...) {
            write_bad_rows(*t, tensor->view_offs + offset, size, static_cast<std::byte*>(data));
            throw;
        }
        // Attention takes the cache's views permuted; states are read from the tensors.
        if (operation(*tensor) == op_name::permute && t->part == Part::keys)
            t->buffer->copied_by_graph(*t, tensor->view_offs + offset, size);
    });
}

// A whole stream of one layer onto another (llama.cpp's copy of a sequence between streams): the
// blocks are shared, nothing is decoded. llama.cpp copies keys and values right after each other;
// either call copies both.
bool copy_stream(const CacheTensor& from, std::size_t from_offset, const CacheTensor& to,
                 std::size_t to_offset, std::size_t size) {
    if (from.layer != to.layer || from.part != to.part) return false;
    if (from.layer->mode() == LayerCache::Mode::undecided) return true;  // nothing was ever written
    if (from.layer->mode() != LayerCache::Mode::packed) return false;
    const std::size_t stream = from.layer->row_bytes(from.part) * from.layer->cells();
    if (size != stream || from_offset % stream != 0 || to_offset % stream != 0) return false;
    to.buffer->copy_stream(to, static_cast<std::uint32_t>(from_offset / stream),
                           static_cast<std::uint32_t>(to_offset / stream));
    return true;
}

bool cpy_tensor(ggml_backend_buffer_t, const ggml_tensor* src, ggml_tensor* dst) {
    const CacheTensor* from = cache_tensor(src);
    const CacheTensor* to = cache_tensor(dst);
    if (from == nullptr && to == nullptr) return false;  // ggml's own copy is right
    if (!ggml_is_contiguous(src) || !ggml_is_contiguous(dst)) return false;
    const std::size_t size = ggml_nbytes(src);
    bool done = false;
    guarded(to != nullptr ? *to->buffer : *from->buffer, "can't copy cache rows", [&] {
        if (from != nullptr && to != nullptr) {
            if (copy_stream(*from, src->view_offs, *to, dst->view_offs, size)) {
                done = true;
                return;
            }
            std::vector<std::byte> bytes(size);
            read(*from, src->view_offs, size, bytes.data());
            write(*to, dst->view_offs, size, bytes.data());
        } else if (from != nullptr) {
            read(*from, src->view_offs, size, dst->data);
        } else if (src->buffer->buft == buffer_type()) {
            write(*to, dst->view_offs, size, src->data);
        } else {
            return;
        }
        done = true;
    });
    return done;
}

void clear(ggml_backend_buffer_t buffer, std::uint8_t) {
    guarded(self(buffer), "can't clear the cache", [&] { self(buffer).clear(); });
}

constexpr ggml_backend_buffer_i buffer_interface = [] {
    ggml_backend_buffer_i served{};
    served.free_buffer = [](ggml_backend_buffer_t buffer) { delete &self(buffer); };
    served.get_base = [](ggml_backend_buffer_t buffer) -> void* { return self(buffer).base(); };
    served.init_tensor = init_tensor;
    served.memset_tensor = memset_tensor;
    served.set_tensor = set_tensor;
    served.get_tensor = get_tensor;
    served.cpy_tensor = cpy_tensor;
    served.clear = clear;
    return served;
}();

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, std::size_t size) {
    const auto chosen = setting();
    if (chosen == nullptr) {
        report_once(GGML_LOG_LEVEL_ERROR, setting_error());
        return nullptr;
    }
    // llama.cpp asks for the memory of a context's graphs when it has planned the first of them:
    // the last moment at which no context is made of it. What is wrong has been said.
    if (any_refused()) return nullptr;
    try {
        auto buffer = std::make_unique<CacheBuffer>(size, chosen);
        return ggml_backend_buffer_init(type, buffer_interface, buffer.release(), size);
    } catch (const std::exception& error) {
        report(GGML_LOG_LEVEL_ERROR,
               concat("can't allocate a buffer of ", size, " bytes: ", error.what()));
        return nullptr;
    }
}

std::size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
    const auto chosen = setting();
    return chosen == nullptr ? ggml_nbytes(tensor) : size_answers().bytes(*tensor, *chosen);
}

// ggml_backend_buffer_type as programs of ggml's backend API 2 have it: without the two functions
// that take several tensors at once.
struct OlderBufferType {
    using Interface = ggml_backend_buffer_type_i;
    decltype(Interface::get_name) get_name;
    decltype(Interface::alloc_buffer) alloc_buffer;
    decltype(Interface::get_alignment) get_alignment;
    decltype(Interface::get_max_size) get_max_size;
    decltype(Interface::get_alloc_size) get_alloc_size;
    decltype(Interface::is_host) is_host;
    ggml_backend_dev_t device;
    void* context;
};

// For the program's API.
ggml_backend_buffer_type_t make_type() {
    const auto serve = [](auto& table, auto& type) {
        table.get_name = [](ggml_backend_buffer_type_t) { return "LOWKV"; };
        table.alloc_buffer = alloc_buffer;
        table.get_alignment = [](ggml_backend_buffer_type_t) { return std::size_t{64}; };
        table.get_alloc_size = get_alloc_size;
        // The CPU backend would read packed bytes as f16.
        table.is_host = [](ggml_backend_buffer_type_t) { return false; };
        type.device = device();
        return reinterpret_cast<ggml_backend_buffer_type_t>(&type);
    };
    static OlderBufferType older = {};
    static ggml_backend_buffer_type type = {};
    return host_api() < 3 ? serve(older, older) : serve(type.iface, type);
}

}  // namespace

ggml_backend_buffer_type_t buffer_type() {
    static const ggml_backend_buffer_type_t type = make_type();
    return type;
}

}  // namespace lowkv::ggml
