#include "common/command_line.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "CLI/CLI.hpp"

namespace lowkv::cli {

Option Option::required() {
    option_->required();
    return *this;
}

Option Option::delimiter(char between) {
    option_->delimiter(between);
    return *this;
}

Option Option::excludes(Option other) {
    option_->excludes(other.option_);
    return *this;
}

Option Option::range(int least, int most) {
    option_->check(CLI::Range(least, most));
    return *this;
}

Option Option::range(std::uint64_t least, std::uint64_t most) {
    option_->check(CLI::Range(least, most));
    return *this;
}

Option Option::range(float least, float most) {
    option_->check(CLI::Range(least, most));
    return *this;
}

Option Option::range(double least, double most) {
    option_->check(CLI::Range(least, most));
    return *this;
}

Option Option::positive() {
    option_->check(CLI::PositiveNumber);
    return *this;
}

Option Option::one_of(const std::vector<std::string>& words) {
    option_->check(CLI::IsMember(words));
    return *this;
}

Option Option::check(std::function<std::string(const std::string&)> fault,
                     const std::string& meaning) {
    option_->check(std::move(fault), meaning);
    return *this;
}

Command Command::add_command(const std::string& name, const std::string& meaning) {
    return Command(app_->add_subcommand(name, meaning));
}

void Command::require_command() { app_->require_subcommand(1); }

void Command::footer(const std::string& text) { app_->footer(text); }

template <class Value>
Option Command::option(const std::string& names, Value& value, const std::string& meaning) {
    return Option(app_->add_option(names, value, meaning));
}

template <class Value>
Option Command::defaulted(const std::string& names, Value& value, const std::string& meaning) {
    return Option(app_->add_option(names, value, meaning)->capture_default_str());
}

Option Command::flag(const std::string& names, bool& value, const std::string& meaning) {
    return Option(app_->add_flag(names, value, meaning));
}

void Command::callback(std::function<void()> run) { app_->callback(std::move(run)); }

void Command::after_options(std::function<void()> adapt) {
    app_->parse_complete_callback(std::move(adapt));
}

void Command::prefix_command() { app_->prefix_command(); }

std::vector<std::string> Command::remaining() const { return app_->remaining(); }

CommandLine::CommandLine(const std::string& name, const std::string& meaning,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(meaning, name)) {
    app_->set_version_flag("--version", version);
    app_->get_formatter()->column_width(34);
}

CommandLine::~CommandLine() = default;

std::vector<std::string> CommandLine::commands() const {
    std::vector<std::string> names;
    for (const CLI::App* command : app_->get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(command->get_name());
    return names;
}

std::string CommandLine::help() const { return app_->help(); }

int CommandLine::parse(int argc, const char* const* argv) {
    try {
        app_->parse(argc, argv);
        return 0;
    } catch (const CLI::ParseError& error) {
        return app_->exit(error) == 0 ? 0 : 2;
    }
}

// The types of values that options have.
template Option Command::option(const std::string&, std::string&, const std::string&);
template Option Command::option(const std::string&, std::vector<std::string>&, const std::string&);
template Option Command::option(const std::string&, std::vector<double>&, const std::string&);
template Option Command::option(const std::string&, std::optional<std::uint32_t>&,
                                const std::string&);
template Option Command::option(const std::string&, std::uint32_t&, const std::string&);
template Option Command::option(const std::string&, std::uint64_t&, const std::string&);
template Option Command::option(const std::string&, double&, const std::string&);

template Option Command::defaulted(const std::string&, std::string&, const std::string&);
template Option Command::defaulted(const std::string&, std::vector<std::string>&,
                                   const std::string&);
template Option Command::defaulted(const std::string&, std::vector<std::uint32_t>&,
                                   const std::string&);
template Option Command::defaulted(const std::string&, std::uint32_t&, const std::string&);
template Option Command::defaulted(const std::string&, std::uint64_t&, const std::string&);
template Option Command::defaulted(const std::string&, int&, const std::string&);
template Option Command::defaulted(const std::string&, float&, const std::string&);
template Option Command::defaulted(const std::string&, double&, const std::string&);

}  // namespace lowkv::cli
