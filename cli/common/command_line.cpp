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

template <class Number>
Option Option::range(Number least, Number most) {
    option_->check(CLI::Range(least, most));
    return *this;
}
template Option Option::range(int, int);
template Option Option::range(std::uint64_t, std::uint64_t);
template Option Option::range(float, float);
template Option Option::range(double, double);

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

Command Command::add_command(const std::string& name, const std::string& meaning,
                             const std::string& footer) {
    CLI::App* command = app_->add_subcommand(name, meaning);
    if (!footer.empty()) command->footer(footer);
    return Command(command);
}

void Command::require_command() { app_->require_subcommand(1); }

Option Command::option(const std::string& names, Value value, const std::string& meaning) {
    return std::visit([&](auto* into) { return Option(app_->add_option(names, *into, meaning)); },
                      value);
}

Option Command::defaulted(const std::string& names, Value value, const std::string& meaning) {
    const auto add = [&]<class Type>(Type* into) {
        CLI::Option* option = app_->add_option(names, *into, meaning)->capture_default_str();
        if constexpr (CLI::detail::is_mutable_container<Type>::value) option->delimiter(',');
        return Option(option);
    };
    return std::visit(add, value);
}

Option Command::flag(const std::string& names, bool* value, const std::string& meaning) {
    return Option(app_->add_flag(names, *value, meaning));
}

void Command::callback(std::function<void()> run) { app_->callback(std::move(run)); }

void Command::after_options(std::function<void()> adapt) {
    app_->parse_complete_callback(std::move(adapt));
}

void Command::prefix_command() { app_->prefix_command(); }

std::vector<std::string> Command::remaining() const { return app_->remaining(); }

CommandLine::CommandLine(const std::string& name, const std::string& meaning,
                         const std::string& version, const std::string& footer)
    : app_(std::make_unique<CLI::App>(meaning, name)) {
    app_->footer(footer);
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

}  // namespace lowkv::cli
