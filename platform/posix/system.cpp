#include "platform/system.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#endif

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace lowkv::platform {
namespace {

// 0, or the error's number.
int sync(const std::filesystem::path& path, int flags) noexcept {
    const int file = open(path.c_str(), flags | O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno;
    const int failed = fsync(file) == 0 ? 0 : errno;
    close(file);
    return failed;
}

}  // namespace

std::string plain_name(const std::filesystem::path& file) { return file.string(); }

bool lets_use_tiles() noexcept {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long request_permission = 0x1023, tile_data = 18;  // asm/prctl.h, Linux 5.16
    static const bool lets = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return lets;
#else
    return false;
#endif
}

const char list_separator = ':';

void sync_file(const std::filesystem::path& file) {
    if (const int failed = sync(file, 0)) throw std::system_error(failed, std::generic_category());
}

// Some file systems have no such thing for folders.
void sync_folder(const std::filesystem::path& folder) noexcept { sync(folder, O_DIRECTORY); }

std::string file_of(const void* address) {
    Dl_info info = {};
    return dladdr(address, &info) == 0 || info.dli_fname == nullptr ? "" : info.dli_fname;
}

void* symbol_beside(const void* address, const char* name) {
    void* library = dlopen(file_of(address).c_str(), RTLD_LAZY | RTLD_NOLOAD);
    void* found = dlsym(library == nullptr ? RTLD_DEFAULT : library, name);
    if (library != nullptr) dlclose(library);
    return found;
}

void keep_loaded(const void* address) {
    dlopen(file_of(address).c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

std::string load_problem(const std::string& path) {
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return "";
    const char* why = dlerror();
    return why == nullptr ? "dlopen failed" : why;
}

std::string last_problem() { return std::strerror(errno); }

bool at_exit(void (*call)(int status)) {
#ifdef __GLIBC__
    const auto handler = [](int status, void* function) {
        reinterpret_cast<void (*)(int)>(function)(status);
    };
    return on_exit(handler, reinterpret_cast<void*>(call)) == 0;
#else
    static void (*function)(int) = nullptr;
    function = call;
    return std::atexit([] { function(0); }) == 0;
#endif
}

unsigned long process_number() { return static_cast<unsigned long>(getpid()); }

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

void set_environment(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

}  // namespace lowkv::platform
