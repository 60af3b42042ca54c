#include "platform/command.h"

#include <fcntl.h>
#include <io.h>
#include <windows.h>
// After windows.h:
#include <psapi.h>
#include <shellapi.h>

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "common/machine.h"
#include "common/process.h"
#include "common/saved_states.h"
#include "common/terminal.h"
#include "platform/system.h"
#include "run/keep.h"

namespace lowkv::cli {

namespace {

MEMORYSTATUSEX memory_status() {
    MEMORYSTATUSEX status{};
    status.dwLength = sizeof status;
    GlobalMemoryStatusEx(&status);
    return status;
}

// 0 where the system doesn't say.
unsigned physical_cores() {
    DWORD size = 0;
    GetLogicalProcessorInformation(nullptr, &size);
    std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> list(
        size / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
    if (list.empty() || GetLogicalProcessorInformation(list.data(), &size) == 0) return 0;
    unsigned cores = 0;
    for (const auto& item : list) cores += item.Relationship == RelationProcessorCore ? 1 : 0;
    return cores;
}

}  // namespace

void begin(int& argc, char**& argv) {
    SetConsoleOutputCP(CP_UTF8);
    for (std::FILE* file : {stdin, stdout, stderr}) _setmode(_fileno(file), _O_BINARY);
    static std::vector<std::string> words;
    static std::vector<char*> pointers;
    wchar_t** wide_words = CommandLineToArgvW(GetCommandLineW(), &argc);
    for (int i = 0; i < argc; ++i) words.push_back(platform::text_of(wide_words[i]));
    LocalFree(wide_words);
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    argv = pointers.data();
}

std::filesystem::path executable_file() {
    std::wstring path(32768, L'\0');
    path.resize(GetModuleFileNameW(nullptr, path.data(), static_cast<DWORD>(path.size())));
    return path;
}

Processors processors() {
    Processors here;
    here.processors = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    const unsigned cores = physical_cores();
    here.cores = here.usable_cores = cores > 0 ? cores : here.processors;
    DWORD_PTR own = 0, all = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &own, &all) != 0 && own != all) {
        const auto usable = static_cast<unsigned>(std::popcount(own));
        here.usable_cores = std::max(usable * here.cores / here.processors, 1U);
    }
    return here;
}

int busy_processors() { return 0; }

ProcessMemory process_memory() {
    PROCESS_MEMORY_COUNTERS counters{};
    counters.cb = sizeof counters;
    if (K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters) == 0) return {};
    return {counters.WorkingSetSize, counters.PeakWorkingSetSize};
}

std::string processor_name() {
    wchar_t name[256] = L"unknown";
    DWORD size = sizeof name;
    RegGetValueW(HKEY_LOCAL_MACHINE, L"HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\0",
                 L"ProcessorNameString", RRF_RT_REG_SZ, nullptr, name, &size);
    return platform::text_of(name);
}

std::size_t system_memory() { return memory_status().ullTotalPhys; }

std::size_t available_memory() { return memory_status().ullAvailPhys; }

bool is_terminal(std::FILE* file) { return _isatty(_fileno(file)) != 0; }

bool may_write(const std::filesystem::path& path) {
    constexpr int write = 2;
    return _waccess(path.c_str(), write) == 0;
}

bool may_run(const std::filesystem::path& program) { return std::filesystem::exists(program); }

const std::string_view plugin_file = "ggml-lowkv.dll";

std::string program_file(const std::string& name) {
    return name.ends_with(".exe") ? name : name + ".exe";
}

// Windows looks beside the program first.
std::filesystem::path ggml_of(const std::filesystem::path& program) {
    const std::filesystem::path beside = program.parent_path() / "ggml-base.dll";
    return std::filesystem::exists(beside) ? beside : std::filesystem::path();
}

const bool tries_ggml = false;

// `compact /c` of the folder lets the file system leave zeros out.
SlotFiles::SlotFiles(std::string folder) : folder_(std::move(folder)) {}

SlotFiles::~SlotFiles() = default;

void SlotFiles::read() {}

Keeper::Keeper(const std::string&, double, const Program&, const std::vector<std::string>&) {
    throw UsageError("--keep can't be used on Windows");
}

Keeper::~Keeper() = default;

void Keeper::read(std::string_view) {}

void Keeper::finish() {}

bool Keeper::finished() { return true; }

}  // namespace lowkv::cli
