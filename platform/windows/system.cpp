#include "platform/system.h"

#include <windows.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace lowkv::platform {
namespace {

HMODULE module_of(const void* address, DWORD flags) {
    HMODULE module = nullptr;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | flags,
                       static_cast<const wchar_t*>(address), &module);
    return module;
}

}  // namespace

std::string plain_name(const std::filesystem::path& file) {
    const std::wstring name = file.wstring();
    if (std::ranges::all_of(name, [](wchar_t c) { return c < 128; })) return text_of(file);
    std::wstring brief(name.size() + 32768, L'\0');
    brief.resize(GetShortPathNameW(name.c_str(), brief.data(), static_cast<DWORD>(brief.size())));
    return text_of(brief.empty() ? file : std::filesystem::path(brief));
}

bool lets_use_tiles() noexcept { return false; }  // it would have to be asked, too

const char list_separator = ';';

void sync_file(const std::filesystem::path& file) {
    const HANDLE handle = CreateFileW(file.c_str(), GENERIC_WRITE, FILE_SHARE_READ, nullptr,
                                      OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
    const bool done = handle != INVALID_HANDLE_VALUE && FlushFileBuffers(handle) != 0;
    const auto failed = static_cast<int>(GetLastError());
    if (handle != INVALID_HANDLE_VALUE) CloseHandle(handle);
    if (!done) throw std::system_error(failed, std::system_category());
}

void sync_folder(const std::filesystem::path& /*folder*/) noexcept {}

std::string file_of(const void* address) {
    const HMODULE module = module_of(address, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT);
    if (module == nullptr) return "";
    std::wstring path(32768, L'\0');  // the longest there is
    path.resize(GetModuleFileNameW(module, path.data(), static_cast<DWORD>(path.size())));
    return text_of(path);
}

void* symbol_beside(const void* address, const char* name) {
    const HMODULE module = module_of(address, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT);
    return reinterpret_cast<void*>(GetProcAddress(module, name));
}

void keep_loaded(const void* address) { module_of(address, GET_MODULE_HANDLE_EX_FLAG_PIN); }

std::string load_problem(const std::string& path) {
    const std::wstring file = std::filesystem::absolute(path_of(path)).make_preferred().wstring();
    return LoadLibraryExW(file.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH) == nullptr
               ? last_problem()
               : "";
}

std::string last_problem() {
    const DWORD number = GetLastError();
    wchar_t* text = nullptr;
    const DWORD length = FormatMessageW(
        FORMAT_MESSAGE_ALLOCATE_BUFFER | FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS,
        nullptr, number, 0, reinterpret_cast<wchar_t*>(&text), 0, nullptr);
    std::wstring said(text == nullptr ? L"" : text, length);
    LocalFree(text);
    while (!said.empty() && said.back() <= L' ') said.pop_back();
    return text_of(said) + " (error " + std::to_string(number) + ")";
}

unsigned long process_number() { return GetCurrentProcessId(); }

std::string environment(const char* name) {
    std::wstring value(32768, L'\0');
    value.resize(GetEnvironmentVariableW(path_of(name).c_str(), value.data(),
                                         static_cast<DWORD>(value.size())));
    return text_of(value);
}

bool at_exit(void (*call)(int status)) {
    static void (*function)(int) = nullptr;
    function = call;
    return std::atexit([] { function(0); }) == 0;
}

// The system's, which children get, and the C library's own copy, which getenv() reads.
void set_environment(const char* name, const std::string& value) {
    _wputenv_s(path_of(name).c_str(), path_of(value).c_str());
}

}  // namespace lowkv::platform
