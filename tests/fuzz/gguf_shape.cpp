// The headers of GGUF files, as `lowkv plan -m` reads them and reckons with them. What reads them
// first is ggml's own reader, which is not compiled with the sanitizers.

#include <cstdio>
#include <string>
#include <vector>

#include "common/app.h"
#include "common/machine.h"
#include "common/target.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"
#include "lowkv/error.h"

namespace lowkv::cli {
void add_plan(Command app, int& status);
}

namespace lowkv::fuzz {
namespace {

class Header {
  public:
    explicit Header(std::string architecture) : architecture_(std::move(architecture)) {
        gguf_set_val_str(its(), "general.architecture", architecture_.c_str());
    }
    Header& number(const std::string& key, std::uint32_t value) {
        gguf_set_val_u32(its(), (architecture_ + "." + key).c_str(), value);
        return *this;
    }
    Header& list(const std::string& key, const std::vector<std::int32_t>& values) {
        gguf_set_arr_data(its(), (architecture_ + "." + key).c_str(), GGUF_TYPE_INT32,
                          values.data(), values.size());
        return *this;
    }
    Header& sizes(std::uint32_t layers) {
        return number("block_count", layers)
            .number("context_length", 4096)
            .number("embedding_length", 256)
            .number("attention.head_count", 4);
    }
    Header& tensor() {
        context_.reset(ggml_init({ggml_tensor_overhead(), nullptr, true}));
        ggml_tensor* weight = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, 64, 2);
        ggml_set_name(weight, "token_embd.weight");
        gguf_add_tensor(its(), weight);
        return *this;
    }
    Bytes bytes() const {
        Bytes all(gguf_get_meta_size(its()));
        gguf_get_meta_data(its(), all.data());
        return all;
    }

  private:
    gguf_context* its() const { return gguf_.get(); }

    std::string architecture_;
    ggml_context_ptr context_;
    gguf_context_ptr gguf_{gguf_init_empty()};
};

void plan(const std::string& path, const std::vector<const char*>& more) {
    cli::CommandLine line("lowkv", "", "", "");
    cli::Command app = line.root();
    app.require_command();
    int status = 0;
    cli::add_plan(app, status);
    std::vector<std::string> words = {"lowkv", "plan", "-m", path, "--memory", "16GiB"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    static_cast<void>(line.parse(static_cast<int>(words.size()), pointers.data()));
}

}  // namespace

std::vector<Bytes> seeds() {
    const std::vector<Bytes> files = {
        Header("llama").sizes(3).number("attention.head_count_kv", 2).tensor().bytes(),
        Header("gemma3").sizes(6).number("attention.sliding_window", 512).bytes(),
        Header("lfm2").sizes(3).list("attention.head_count_kv", {0, 2, 0}).bytes(),
        Header("qwen3next")
            .sizes(4)
            .number("full_attention_interval", 2)
            .number("ssm.state_size", 16)
            .bytes(),
        Header("deepseek2")
            .sizes(2)
            .number("attention.head_count_kv", 1)
            .number("attention.key_length", 576)
            .number("attention.value_length", 512)
            .number("attention.key_length_mla", 192)
            .number("expert_count", 8)
            .bytes(),
        Header("gpt-oss")
            .sizes(4)
            .number("nextn_predict_layers", 1)
            .number("attention.sliding_window", 128)
            .list("attention.sliding_window_pattern", {1, 0, 1, 0})
            .bytes()};
    std::vector<Bytes> all;
    for (unsigned how = 0; how < 4; ++how)
        for (const Bytes& file : files) all.push_back(seed({how}, file));
    return all;
}

void try_bytes(std::span<const std::byte> bytes) {
    static const bool silent = std::freopen("/dev/null", "w", stdout) != nullptr;
    require(silent, "no /dev/null");
    Input input(bytes);
    const std::size_t how = input.below(4);
    const MemoryFile file(input.text());
    std::vector<const char*> more;
    if ((how & 1) != 0) more = {"--budget", "64MiB", "--unfused", "--parallel", "3"};
    if ((how & 2) != 0)
        more.insert(more.end(), {"--schemes", "lowkv1.5,kivi2", "--weights", "1GB"});
    try {
        plan(file.path(), more);
    } catch (const cli::UsageError&) {
    } catch (const cli::Failure&) {
    } catch (const Error&) {  // what the command tells as it is, too
    }
}

}  // namespace lowkv::fuzz
