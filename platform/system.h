#pragma once
// Names of files, dynamic libraries, and the process that loaded them. Names and texts are UTF-8
// everywhere in lowkv, as in llama.cpp; Windows has its own.

#include <filesystem>
#include <string>
#include <string_view>

namespace lowkv::platform {

// ---- files ----

// Not path(text), which takes the letters of another code page on Windows.
inline std::filesystem::path path_of(std::string_view utf8) {
    return std::u8string(utf8.begin(), utf8.end());
}

inline std::string text_of(const std::filesystem::path& path) {
    const std::u8string text = path.u8string();
    return {text.begin(), text.end()};
}

// A name of the file for programs that don't read UTF-8, as ggml on Windows: in ASCII if the file
// has such a name, too.
std::string plain_name(const std::filesystem::path& file);

// Between the names in a list of them: a colon, or a semicolon where names have colons.
extern const char list_separator;

// Has what was written to a file, or into a folder, reach the disk. Throws std::system_error; of a
// folder it does what the system offers.
void sync_file(const std::filesystem::path& file);
void sync_folder(const std::filesystem::path& folder) noexcept;

// Readers see the file's old text or the new one, never half of one; `synced`: after a power cut,
// too. A link stays, and the file that it names is replaced. A device, a pipe and a folder are
// refused. Throws std::runtime_error, without the file's name, and leaves no other file behind.
void replace_file(const std::filesystem::path& file, std::string_view text, bool synced);

// ---- the processor ----

// Whether the system lets this process use the tiles of AMX, which the processor has. It is asked
// once. From then on Linux refuses signal stacks that tiles' registers don't fit in.
bool lets_use_tiles() noexcept;

// ---- libraries ----

// The file of the library or program that an address lies in; empty where the system
// doesn't say.
std::string file_of(const void* address);

// A function of the library that an address lies in, which may lack it: then null.
void* symbol_beside(const void* address, const char* name);

// The library that an address lies in stays in memory, also when its host unloads it.
void keep_loaded(const void* address);

// Loads a library as a program's plug-in: why that fails, or nothing.
std::string load_problem(const std::string& path);

// Why the last call of the system failed.
std::string last_problem();

// Has a function called when the process ends, with its exit status where the system tells it, else
// with 0. Whether that could be done.
bool at_exit(void (*call)(int status));

unsigned long process_number();

// Empty when unset.
std::string environment(const char* name);
void set_environment(const char* name, const std::string& value);

}  // namespace lowkv::platform
