#include "common/process.h"

#include <fcntl.h>
#include <io.h>
#include <windows.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/terminal.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

[[noreturn]] void fail(const std::string& what) {
    throw Failure(what + ": " + platform::last_problem());
}

// As the C library of a program takes its command line apart: backslashes are plain characters but
// before a quotation mark.
std::wstring quoted(const std::string& word) {
    if (!word.empty() && word.find_first_of(" \t\n\v\"") == std::string::npos)
        return platform::path_of(word).wstring();
    std::string out = "\"";
    std::size_t slashes = 0;
    for (const char c : word) {
        if (c == '"') out.append(slashes + 1, '\\');
        slashes = c == '\\' ? slashes + 1 : 0;
        out += c;
    }
    out.append(slashes, '\\');
    return platform::path_of(out + '"').wstring();
}

struct Pipe {
    HANDLE read = nullptr, write = nullptr;
};

// A pipe whose writing end goes to a child.
Pipe make_pipe() {
    Pipe pipe;
    SECURITY_ATTRIBUTES inherited{sizeof inherited, nullptr, TRUE};
    if (CreatePipe(&pipe.read, &pipe.write, &inherited, 0) == 0) fail("no pipe");
    SetHandleInformation(pipe.read, HANDLE_FLAG_INHERIT, 0);
    return pipe;
}

// Null where it can't be started.
HANDLE start(const std::vector<std::string>& words, HANDLE out, HANDLE messages, DWORD& number) {
    std::wstring line = quoted(platform::text_of(platform::path_of(words[0]).make_preferred()));
    for (std::size_t i = 1; i < words.size(); ++i) line += L' ' + quoted(words[i]);
    STARTUPINFOW startup{};
    startup.cb = sizeof startup;
    startup.dwFlags = STARTF_USESTDHANDLES;
    startup.hStdInput = GetStdHandle(STD_INPUT_HANDLE);
    startup.hStdOutput = out;
    startup.hStdError = messages;
    PROCESS_INFORMATION started{};
    if (CreateProcessW(nullptr, line.data(), nullptr, nullptr, TRUE, 0, nullptr, nullptr, &startup,
                       &started) == 0)
        return nullptr;
    CloseHandle(started.hThread);
    number = started.dwProcessId;
    return started.hProcess;
}

HANDLE own(DWORD which) { return GetStdHandle(which); }

// The program of `lowkv run`, and a job that ends it when this process ends.
HANDLE child_process = nullptr;
DWORD child_number = 0;

void bind_to_this_process(HANDLE process) {
    static const HANDLE job = [] {
        const HANDLE made = CreateJobObjectW(nullptr, nullptr);
        JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits{};
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
        SetInformationJobObject(made, JobObjectExtendedLimitInformation, &limits, sizeof limits);
        return made;
    }();
    AssignProcessToJobObject(job, process);
}

// The console gives Ctrl-C to the child, too: this process waits for how it takes that.
BOOL WINAPI wait_on(DWORD event) { return event == CTRL_C_EVENT || event == CTRL_BREAK_EVENT; }

int status_of(HANDLE process) {
    DWORD status = 0;
    if (GetExitCodeProcess(process, &status) == 0) fail("can't wait for a process");
    return static_cast<int>(status);
}

}  // namespace

int exit_status(int status) { return status; }

pid_t wait_for(pid_t child, int& status, int options) {
    if (child_process == nullptr || child != static_cast<pid_t>(child_number))
        throw Failure("can't wait for a process: it was not started here");
    const DWORD patience = options == look_only ? 0 : INFINITE;
    if (WaitForSingleObject(child_process, patience) == WAIT_TIMEOUT) return 0;
    status = status_of(child_process);
    return child;
}

Output output_of(const std::vector<std::string>& words, bool quiet) {
    const Pipe pipe = make_pipe();
    DWORD number = 0;
    const HANDLE process =
        start(words, pipe.write, quiet ? nullptr : own(STD_ERROR_HANDLE), number);
    CloseHandle(pipe.write);
    Output output;
    std::array<char, 4096> buffer{};
    for (DWORD got = 0;
         ReadFile(pipe.read, buffer.data(), buffer.size(), &got, nullptr) != 0 && got > 0;)
        output.text.append(buffer.data(), got);
    CloseHandle(pipe.read);
    output.status = 127;
    if (process == nullptr) return output;
    WaitForSingleObject(process, INFINITE);
    output.status = status_of(process);
    CloseHandle(process);
    return output;
}

pid_t start_child(const std::vector<std::string>& words, int& messages, bool whole) {
    const Pipe pipe = make_pipe();
    SetConsoleCtrlHandler(wait_on, TRUE);
    child_process =
        start(words, whole ? pipe.write : own(STD_OUTPUT_HANDLE), pipe.write, child_number);
    CloseHandle(pipe.write);
    if (child_process == nullptr) fail("can't start " + words[0]);
    bind_to_this_process(child_process);
    messages = _open_osfhandle(reinterpret_cast<std::intptr_t>(pipe.read), _O_RDONLY | _O_BINARY);
    return static_cast<pid_t>(child_number);
}

std::optional<std::string> read_some(int descriptor, int milliseconds) {
    const auto pipe = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
    constexpr int turn = 10;
    DWORD there = 0;
    for (int waited = 0; there == 0; waited += turn) {
        if (PeekNamedPipe(pipe, nullptr, 0, nullptr, &there, nullptr) == 0) return std::nullopt;
        if (there > 0 || waited >= milliseconds) break;
        Sleep(turn);
    }
    std::string text(std::min<DWORD>(there, 65536), '\0');
    DWORD got = 0;
    if (!text.empty() &&
        ReadFile(pipe, text.data(), static_cast<DWORD>(text.size()), &got, nullptr) == 0)
        return std::nullopt;
    text.resize(got);
    return text;
}

// For --keep alone, which is not there on Windows.
void hold_signals() {}
bool signal_held() { return false; }
void pass_held_signal(pid_t /*child*/) {}

void stop_reading(int descriptor) { _close(descriptor); }

int stop_child(pid_t child) {
    int status = 0;
    TerminateProcess(child_process, 1);
    wait_for(child, status, 0);
    return status;
}

void follow_terminal(pid_t) {}

void forget_child() {
    CloseHandle(child_process);
    child_process = nullptr;
    SetConsoleCtrlHandler(wait_on, FALSE);
}

}  // namespace lowkv::cli
