#include "common/terminal.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "lowkv/error.h"
#include "platform/command.h"
#include "platform/system.h"

namespace lowkv::cli {

namespace {

// Columns that a terminal uses for `text`: one per UTF-8 character.
std::size_t width(std::string_view text) {
    return static_cast<std::size_t>(std::ranges::count_if(
        text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; }));
}

std::string printed(const char* format, int digits, double value) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), format, digits, value);
    return text.data();
}

}  // namespace

std::string fixed(double value, int digits) { return printed("%.*f", digits, value); }
std::string signed_fixed(double value, int digits) { return printed("%+.*f", digits, value); }

std::string shortest(double value, int digits) {
    std::string text = fixed(value, digits);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text;
}

std::string divergence(double value) { return fixed(value < 0 ? 0 : value, value < 0.1 ? 5 : 3); }

std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
    return text;
}

std::string count(std::uint64_t value) {
    std::string digits = std::to_string(value);
    for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, 1, ',');
    return digits;
}

std::string plural(std::uint64_t value, const char* noun) {
    return concat(value, " ", noun, value == 1 ? "" : "s");
}

std::string span(std::uint64_t least, std::uint64_t most) {
    return least == most ? count(least) : count(least) + " to " + count(most);
}

std::string bytes(double value) {
    const std::array<const char*, 4> units = {"B", "KiB", "MiB", "GiB"};
    std::size_t unit = 0;
    // 1023.95 would be shown as 1024.0.
    while (value >= (unit == 0 ? 1024 : 1023.95) && unit + 1 < units.size()) {
        value /= 1024;
        ++unit;
    }
    return fixed(value, unit == 0 ? 0 : 1) + " " + units[unit];
}

std::string mebibytes(double value) { return fixed(value / (1024.0 * 1024.0), 1); }

void show(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
}

std::string wrapped(std::string_view first, std::string_view text, std::size_t indent) {
    constexpr std::size_t columns = 100;
    std::string out(first);
    std::size_t used = first.size();
    bool fresh = true;  // at the start of a line
    while (!text.empty()) {
        const std::size_t end = text.find(' ');
        const std::string_view word = text.substr(0, end);
        if (!fresh && used + 1 + word.size() > columns) {
            out.append("\n").append(indent, ' ');
            used = indent;
            fresh = true;
        }
        if (!fresh) out += ' ';
        used += word.size() + (fresh ? 0 : 1);
        out += word;
        fresh = false;
        text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
    }
    return out + "\n";
}

Table::Table(std::vector<std::string> header) : widths_(header.size(), 3) {
    rows_.push_back(std::move(header));
    widen(rows_.front());
}

void Table::widen(const std::vector<std::string>& row) {
    for (std::size_t c = 0; c < row.size(); ++c) widths_[c] = std::max(widths_[c], width(row[c]));
}

void Table::add(std::vector<std::string> row) {
    row.resize(widths_.size());
    widen(row);
    rows_.push_back(std::move(row));
}

std::string Table::line(const std::vector<std::string>& row) const {
    std::string out;
    for (std::size_t c = 0; c < widths_.size(); ++c) {
        const std::size_t used = width(row[c]);
        const std::string pad(widths_[c] > used ? widths_[c] - used : 0, ' ');
        out += c == 0 ? "| " + row[c] + pad : " | " + pad + row[c];
    }
    return out + " |\n";
}

std::string Table::head() const {
    std::string out = line(rows_.front());
    for (std::size_t c = 0; c < widths_.size(); ++c) {
        out += c == 0 ? concat("| ", std::string(widths_[c], '-'))
                      : concat(" | ", std::string(widths_[c] - 1, '-'), ":");
    }
    return out + " |\n";
}

std::string Table::text() const {
    std::string out = head();
    for (std::size_t r = 1; r < rows_.size(); ++r) out += line(rows_[r]);
    return out;
}

Progress::Progress(std::string label, bool enabled)
    : label_(std::move(label)),
      enabled_(enabled),
      terminal_(is_terminal(stderr)),
      last_(std::chrono::steady_clock::now()) {}

Progress::~Progress() { finish(); }

void Progress::show(std::uint64_t done, std::uint64_t total, const std::string& detail) {
    if (!enabled_) return;
    const auto now = std::chrono::steady_clock::now();
    const auto pause = terminal_ ? std::chrono::milliseconds(shown_ ? 100 : 0)
                                 : std::chrono::milliseconds(shown_ ? 10000 : 2000);
    if (now - last_ < pause) return;
    last_ = now;
    shown_ = true;
    const std::uint64_t percent = total == 0 ? 0 : done * 100 / total;
    std::fprintf(stderr, "%s%s %s / %s (%llu %%)%s%s%s", terminal_ ? "\r" : "", label_.c_str(),
                 count(done).c_str(), count(total).c_str(),
                 static_cast<unsigned long long>(percent), detail.empty() ? "" : "  ",
                 detail.c_str(), terminal_ ? "\x1b[K" : "\n");
    std::fflush(stderr);
}

void Progress::finish() {
    if (enabled_ && terminal_ && shown_) std::fputs("\r\x1b[K", stderr);
    shown_ = false;
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::ranges::sort(values);
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

namespace {

// The length of the UTF-8 character that text begins with; 0: it is none, or a NUL.
std::size_t character_length(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const std::size_t length = byte(0) < 0x80                       ? 1
                               : byte(0) >= 0xc2 && byte(0) <= 0xdf ? 2
                               : byte(0) >= 0xe0 && byte(0) <= 0xef ? 3
                               : byte(0) >= 0xf0 && byte(0) <= 0xf4 ? 4
                                                                    : 0;
    if (length > text.size() || byte(0) == 0) return 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(i) & 0xc0U) != 0x80U) return 0;
    return length;
}

void require_utf8(std::string_view text, const std::string& what) {
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t length = character_length(text.substr(at));
        if (length == 0)
            throw Failure(concat(what, " is no UTF-8 text: byte ", at, " is ",
                                 static_cast<unsigned char>(text[at]),
                                 "; convert it, with iconv for example"));
        at += length;
    }
}

}  // namespace

std::size_t complete_utf8(std::string_view text) {
    // Its last character begins among its last four bytes, or it isn't UTF-8.
    std::size_t at = text.size();
    for (std::size_t back = 0; at > 0 && back < 4; ++back)
        if ((static_cast<unsigned char>(text[--at]) & 0xc0U) != 0x80U)
            return at + character_length(text.substr(at));
    return text.size();
}

std::string read_text(const std::string& path) {
    const bool piped = path == "-";
    const std::string what = piped ? "the text on stdin" : "the text file " + path;
    const std::filesystem::path name = platform::path_of(piped ? "" : path);
    if (std::filesystem::is_directory(name)) throw Failure(what + " is a folder");
    errno = 0;
    std::ifstream file(name, std::ios::binary);
    if (!piped && !file) throw Failure("can't read " + what + ": " + std::strerror(errno));
    std::istream& in = piped ? std::cin : file;
    std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    if (!piped && text.empty()) throw Failure(what + " is empty");
    require_utf8(text, what);
    return text;
}

void require_writable(const std::string& path, const Inputs& inputs) {
    if (path.empty()) return;
    const std::filesystem::path file = platform::path_of(path);
    const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
    if (std::filesystem::is_directory(file))
        throw Failure("can't write " + path + ": it is a folder");
    if (!std::filesystem::is_directory(folder))
        throw Failure("can't write " + path + ": there is no folder " + platform::text_of(folder));
    for (const std::string& input : inputs) {
        std::error_code unknown;  // one of them is not there: then they are not the same
        if (std::filesystem::equivalent(file, platform::path_of(input), unknown))
            throw UsageError("can't write " + path + ": it is what is read (" + input +
                             "); give the output another name");
    }
    if (!may_write(std::filesystem::exists(file) ? file : folder))
        throw Failure("can't write " + path + ": " + std::strerror(errno));
}

void write_file(const std::string& path, const std::string& text) {
    if (path.empty()) return;
    std::ofstream file(platform::path_of(path), std::ios::binary);
    file << text;
    if (!file.flush()) throw Failure("can't write " + path);
}

}  // namespace lowkv::cli
