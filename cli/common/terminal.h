#pragma once
// What a command shows: figures with units, aligned tables, a progress line; the files
// that it reads and writes; and how it fails.

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lowkv::cli {

// Exit codes: 0 done, 1 it failed, 2 the arguments make no sense.

// What the user asked for can't be meant: exit code 2.
class UsageError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// It failed for a reason that a message tells: exit code 1.
class Failure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// How the plug-in's lines begin that say a cache is not packed (plugins/llama.cpp/report.cpp).
inline constexpr std::string_view denial_mark = "lowkv: NOT active";

std::string fixed(double value, int digits);
std::string signed_fixed(double value, int digits);         // "+0.50"
std::string shortest(double value, int digits);             // fixed() without zeros at the end
std::string divergence(double value);                       // small ones with more digits
std::string count(std::uint64_t value);                     // 12,345
std::string span(std::uint64_t least, std::uint64_t most);  // "3 to 8", or "3" where they are equal
std::string bytes(double value);                            // "36.4 MiB"
std::string bytes(std::integral auto value) { return bytes(static_cast<double>(value)); }
std::string mebibytes(double value);                        // "36.4"
std::string plural(std::uint64_t value, const char* noun);  // "1 thread", "2 threads"
std::string joined(const std::vector<std::string>& words);  // with commas

void show(const std::string& text);  // on stdout, at once

// `text` behind `first`, in lines of at most 100 columns; later lines start with `indent` blanks.
std::string wrapped(std::string_view first, std::string_view text, std::size_t indent);

// The span of a field, over at least one item.
template <class Items, class Field>
std::string span_of(const Items& items, Field field) {
    const auto [least, most] = std::ranges::minmax(items, {}, field);
    return span(least.*field, most.*field);
}

// Columns align on terminals; the text is a Markdown table too. The first column is left-aligned.
class Table {
  public:
    explicit Table(std::vector<std::string> header);
    void add(std::vector<std::string> row);
    std::string text() const;

    // To show rows one by one instead: the header, then each row, in columns as wide as the
    // header's words and the cells that were named before.
    void widen(const std::vector<std::string>& row);
    std::string head() const;
    std::string line(const std::vector<std::string>& row) const;

  private:
    std::vector<std::vector<std::string>> rows_;
    std::vector<std::size_t> widths_;
};

// One line on stderr: rewritten in place on a terminal, else a line after two seconds and about
// every ten from then on.
class Progress {
  public:
    explicit Progress(std::string label, bool enabled = true);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    void show(std::uint64_t done, std::uint64_t total, const std::string& detail = {});
    void finish();  // clears the line on a terminal

  private:
    std::string label_;
    bool enabled_, terminal_, shown_ = false;
    std::chrono::steady_clock::time_point last_;
};

class Stopwatch {
  public:
    Stopwatch() : start_(std::chrono::steady_clock::now()) {}
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_;
};

double median(std::vector<double> values);

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
    return (value + by - 1) / by;
}
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return ceil_div(value, multiple) * multiple;
}

// Takes the whole lines out of `text`, and calls use(line) for each.
template <class Use>
void take_lines(std::string& text, Use use) {
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
        use(std::string_view(text).substr(begin, end - begin));
    text.erase(0, begin);
}

// The length of the part of `text` that doesn't end inside a UTF-8 character.
std::size_t complete_utf8(std::string_view text);

// The whole file, or stdin for "-". Throws Failure.
std::string read_text(const std::string& path);

// The files that a command reads; "" for none.
using Inputs = std::vector<std::string>;

// Throws Failure when a file can't be written there, and UsageError when it is one of the inputs:
// to know before the work. Both do nothing where the path is empty, since no output was asked for.
void require_writable(const std::string& path, const Inputs& inputs = {});
void write_file(const std::string& path, const std::string& text);

}  // namespace lowkv::cli
