#pragma once
// Other programs.

#include <functional>
#include <string>
#include <vector>

namespace lowkv::cli {

// Becomes the program; returns errno where it can't.
int execute(std::vector<std::string> words);

struct Output {
    int status = 0;  // waitpid's
    std::string text;
};

// A forked child's exit status is work()'s, and `text` what it wrote to the descriptor. Throws
// Failure where there can be no child.
Output output_of_child(int descriptor, const std::function<int()>& work);
// What a program writes to stdout; its exit status is 127 where it can't be started. Its messages
// go where ours go, or nowhere.
Output output_of(const std::vector<std::string>& words, bool quiet);

}  // namespace lowkv::cli
