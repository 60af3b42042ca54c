#pragma once
// What llama.cpp is told that a cache tensor takes ("KV buffer size", --fit).

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "settings.h"

struct ggml_tensor;

namespace lowkv::ggml {

// Whether any layer is packed at all, and whether rows have positions: all layers of a step write
// the same cells.
bool packs(const Scheme& scheme);
bool stores_positions(const Scheme& scheme);

// Tokens of a unit, which are as long as the longest block of any layer.
std::uint32_t unit_tokens(const Scheme& scheme);
// Rows of the blocks in which unquantized rows lie: short ones, as each conversation has one that
// is not full, but for schemes whose rows have positions.
std::uint32_t row_block_tokens(const Scheme& scheme);

// Rows that so many conversations keep unquantized, at most.
std::size_t unquantized_rows(const Scheme& scheme, std::size_t cells, std::size_t conversations);

// Bytes that the keys or values of a layer take once they are packed, at most: of conversations
// that share so many cells, the exact window of each included, and `open` units that shifts keep
// unquantized (layer_shift.cpp). 0: no head size fits.
std::size_t packed_bytes(const Scheme& scheme, std::uint32_t layer, Part part,
                         std::uint32_t channels, std::size_t cells, std::size_t conversations,
                         std::size_t open = 0);

// Bytes that a tensor takes once it is packed, the exact window included; the nominal size for what
// is not packed, as far as the tensor tells.
std::size_t packed_bytes(const ggml_tensor& tensor, const Setting& setting);

// The answers to llama.cpp, which asks for a layer's keys and then for its values. Only the second
// question shows that a layer can't be packed (no values, though its keys are no latent rows, or
// values of another width): its answer makes up for the first. ggml asks three times per tensor and
// aborts if the answers differ, so each is kept.
class SizeAnswers {
  public:
    std::size_t bytes(const ggml_tensor& tensor, const Setting& setting);
    // The tensor is made: nobody asks again, and another one may lie there later.
    void forget(const ggml_tensor& tensor) noexcept;

  private:
    // A tensor with the same address, name, form and scheme is the same tensor.
    using Question = std::tuple<const ggml_tensor*, std::string, int, std::int64_t, std::int64_t,
                                std::int64_t, std::string>;
    // The keys that were asked for last.
    struct LastKeys {
        std::string tag;
        int layer = -1;
        std::int64_t channels = 0;
        std::size_t missing = 0;  // bytes that were not announced for them
    };
    // More than the tensors of any cache: those of caches made long ago are asked for no more.
    static constexpr std::size_t most_answers = 4096;
    std::map<Question, std::size_t> given_, older_;
    LastKeys last_;

    std::size_t first_answer(const ggml_tensor& tensor, const Setting& setting);
};

// This thread's: a context is made by one thread.
SizeAnswers& size_answers();

}  // namespace lowkv::ggml
