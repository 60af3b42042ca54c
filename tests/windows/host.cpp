// A small host: generates text by the C interface of the llama.cpp whose DLLs lie in a folder, by
// whomever they were built. host.exe LLAMA_DLL MODEL TOKENS PROMPT

#include <windows.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "platform/system.h"

namespace {

using lowkv::platform::last_problem;
using lowkv::platform::text_of;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "host: %s\n", what.c_str());
    std::exit(1);
}

template <class F>
F* function(const wchar_t* library, const char* name) {
    auto* found = reinterpret_cast<F*>(
        reinterpret_cast<void*>(GetProcAddress(GetModuleHandleW(library), name)));
    if (found == nullptr) fail(std::string("there is no ") + name);
    return found;
}

}  // namespace

#define LLAMA(name) function<decltype(name)>(library.c_str(), #name)

int wmain(int argc, wchar_t** argv) {
    if (argc != 5) fail("LLAMA_DLL MODEL TOKENS PROMPT");
    const std::wstring library = std::filesystem::path(argv[1]).make_preferred().wstring();
    if (LoadLibraryExW(library.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH) == nullptr)
        fail("can't load " + text_of(library) + ": " + last_problem());
    LLAMA(llama_backend_init)();
    function<decltype(ggml_backend_load_all)>(L"ggml.dll", "ggml_backend_load_all")();

    llama_model* model = LLAMA(llama_model_load_from_file)(text_of(argv[2]).c_str(),
                                                           LLAMA(llama_model_default_params)());
    if (model == nullptr) fail("can't load the model");
    const llama_vocab* vocab = LLAMA(llama_model_get_vocab)(model);
    const std::string prompt = text_of(argv[4]);
    std::vector<llama_token> tokens(prompt.size() + 8);
    const int count =
        LLAMA(llama_tokenize)(vocab, prompt.data(), static_cast<int>(prompt.size()), tokens.data(),
                              static_cast<int>(tokens.size()), true, true);
    if (count <= 0) fail("can't read the prompt");
    tokens.resize(static_cast<std::size_t>(count));

    const int more = std::stoi(argv[3]);
    llama_context_params params = LLAMA(llama_context_default_params)();
    params.n_threads = params.n_threads_batch = 2;
    params.n_ctx = static_cast<std::uint32_t>(count + more);
    llama_context* context = LLAMA(llama_init_from_model)(model, params);
    if (context == nullptr) fail("no context");
    for (int i = 0; i < more; ++i) {
        const int size = static_cast<int>(tokens.size());
        if (LLAMA(llama_decode)(context, LLAMA(llama_batch_get_one)(tokens.data(), size)) != 0)
            fail("can't decode");
        const float* logits = LLAMA(llama_get_logits_ith)(context, -1);
        const float* best = std::max_element(logits, logits + LLAMA(llama_vocab_n_tokens)(vocab));
        tokens.assign(1, static_cast<llama_token>(best - logits));
        char piece[256];
        const int length =
            LLAMA(llama_token_to_piece)(vocab, tokens[0], piece, sizeof piece, 0, true);
        std::fwrite(piece, 1, static_cast<std::size_t>(std::max(length, 0)), stdout);
    }
    LLAMA(llama_free)(context);
    LLAMA(llama_model_free)(model);
    return 0;
}
