#include "queue.h"

#include "lowkv/error.h"

namespace lowkv::devices {

Buffer::~Buffer() {
    if (handle_ != nullptr) queue_->give(handle_);
}

Queue::Queue(std::string interface, const std::string& name)
    : interface_(std::move(interface)), title_(interface_ + " device '" + name + "'") {}

void Queue::use_stream(void*) {
    throw Error(ErrorCode::unsupported, title_, " takes no stream of a caller's");
}

Buffer Queue::buffer(std::size_t bytes) {
    check();
    Buffer made = try_buffer(bytes);
    if (made.get() == nullptr) {
        throw Error(ErrorCode::device_failed, title_, " has no ", bytes,
                    " bytes of memory left to work with");
    }
    return made;
}

void Queue::run(Kernel kernel, const Grid& grid, const Memories* memories,
                std::span<const Argument> arguments) noexcept {
    if (failed() || grid.x * grid.y * grid.z == 0) return;
    keep(do_run(kernel, grid, memories, arguments), kernel_names[static_cast<std::size_t>(kernel)]);
}

void Queue::fail(const char* doing, int status) noexcept {
    if (failed()) return;
    status_ = status;
    doing_ = doing;
}

void Queue::check() const {
    if (!failed()) return;
    const std::string error = status_ == 0 ? "" : " (" + told(status_) + ")";
    throw Error(ErrorCode::device_failed, title_, " was lost or failed in ", doing_, error,
                ": what its memory holds is not to be relied on; ", remedy(status_));
}

std::string Queue::told(int status) const { return concat(interface_, "'s error ", status); }

}  // namespace lowkv::devices
