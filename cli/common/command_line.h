#pragma once
// The border to CLI11, which reads the command line. Its headers take seconds to compile wherever
// they are included, so only command_line.cpp includes them; what a command says about its options
// goes through the handles below.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lowkv::cli {

// What an option asks of its value, or of the command line: a list of these follows its meaning.
using OptionRule = std::function<void(CLI::Option*)>;
using OptionRules = std::initializer_list<OptionRule>;

OptionRule required();
OptionRule commas();  // several values in one word
OptionRule excludes(CLI::Option* other);
// From `least` to `most`; the type, one of int, std::uint64_t, float and double, is how the help
// calls the value and how it is read.
template <class Number>
OptionRule range(Number least, Number most);
OptionRule one_of(const std::vector<std::string>& words);
// `fault` says what is wrong with a value, or nothing; `meaning` is shown in the help.
OptionRule check(const std::function<std::string(const std::string&)>& fault,
                 const std::string& meaning);

// The variable that takes an option's value.
using Value = std::variant<std::string*, std::vector<std::string>*, std::vector<double>*,
                           std::vector<std::uint32_t>*, std::uint32_t*, std::uint64_t*, int*,
                           float*, double*>;

// A command or a group of commands: a handle, as cheap to copy as a pointer.
class Command {
  public:
    explicit Command(CLI::App* app) : app_(app) {}

    // Without a footer, the help ends with this command's.
    Command add_command(const std::string& name, const std::string& meaning,
                        const std::string& footer = "");
    void require_command();  // the user must name one of this group's commands

    CLI::Option* option(const std::string& names, Value value, const std::string& meaning,
                        OptionRules rules = {});
    // ... whose help shows its default; the items of a list come with commas between them.
    CLI::Option* defaulted(const std::string& names, Value value, const std::string& meaning,
                           OptionRules rules = {});
    CLI::Option* flag(const std::string& names, bool* value, const std::string& meaning,
                      OptionRules rules = {});

    void callback(std::function<void()> run);         // when it is chosen and its options are read
    void after_options(std::function<void()> adapt);  // before that, to complete the options
    // The first word that is no option ends the options: remaining() gives it and what follows.
    void prefix_command();
    std::vector<std::string> remaining() const;

  private:
    CLI::App* app_;
};

// The whole command line.
class CommandLine {
  public:
    CommandLine(const std::string& name, const std::string& meaning, const std::string& version,
                const std::string& footer);
    ~CommandLine();

    Command root() const { return Command(app_.get()); }
    std::vector<std::string> commands() const;
    std::string help() const;
    // Calls the chosen command. 0 where that was done or help was asked for; 2 where the words make
    // no sense, which it has said on stderr.
    int parse(int argc, const char* const* argv);

  private:
    std::unique_ptr<CLI::App> app_;
};

}  // namespace lowkv::cli
