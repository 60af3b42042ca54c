#include "common/command_line.h"

#include <algorithm>
#include <utility>

#include "CLI/CLI.hpp"

namespace lowkv::cli {

namespace {

CLI::Option* with_rules(CLI::Option* option, OptionRules rules) {
    for (const OptionRule& rule : rules) rule(option);
    return option;
}

}  // namespace

OptionRule required() {
    return [](CLI::Option* option) { option->required(); };
}

OptionRule commas() {
    return [](CLI::Option* option) { option->delimiter(','); };
}

OptionRule excludes(CLI::Option* other) {
    return [other](CLI::Option* option) { option->excludes(other); };
}

template <class Number>
OptionRule range(Number least, Number most) {
    return [=](CLI::Option* option) { option->check(CLI::Range(least, most)); };
}
template OptionRule range(int, int);
template OptionRule range(std::uint64_t, std::uint64_t);
template OptionRule range(float, float);
template OptionRule range(double, double);

OptionRule one_of(const std::vector<std::string>& words) {
    return [words](CLI::Option* option) { option->check(CLI::IsMember(words)); };
}

OptionRule check(const std::function<std::string(const std::string&)>& fault,
                 const std::string& meaning) {
    return [=](CLI::Option* option) { option->check(fault, meaning); };
}

Command Command::add_command(const std::string& name, const std::string& meaning,
                             const std::string& footer) {
    CLI::App* command = app_->add_subcommand(name, meaning);
    if (!footer.empty()) command->footer(footer);
    return Command(command);
}

void Command::require_command() { app_->require_subcommand(1); }

CLI::Option* Command::option(const std::string& names, Value value, const std::string& meaning,
                             OptionRules rules) {
    return std::visit(
        [&](auto* into) { return with_rules(app_->add_option(names, *into, meaning), rules); },
        value);
}

CLI::Option* Command::defaulted(const std::string& names, Value value, const std::string& meaning,
                                OptionRules rules) {
    CLI::Option* option = this->option(names, value, meaning, rules)->capture_default_str();
    return option->get_expected_max() > 1 ? option->delimiter(',') : option;
}

CLI::Option* Command::flag(const std::string& names, bool* value, const std::string& meaning,
                           OptionRules rules) {
    return with_rules(app_->add_flag(names, *value, meaning), rules);
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
    std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
    // llama.cpp's short name for it has two letters, which CLI11's can't.
    if (!words.empty() && words[0] == "plan") std::ranges::replace(words, "-np", "--parallel");
    std::ranges::reverse(words);  // as CLI11 takes them
    try {
        app_->parse(words);
        return 0;
    } catch (const CLI::ParseError& error) {
        return app_->exit(error) == 0 ? 0 : 2;
    }
}

}  // namespace lowkv::cli
