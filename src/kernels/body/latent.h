// Values that are the first channels of their keys (multi-head latent attention). Keys lie with
// tokens side by side, and weights are summed over tokens: so a tile's channels take the place of
// rows in the product, and rows that of lanes. Included inside an implementation's namespace.

// out[row][channel] += sum over the visible tiles' tokens of weights[row][token] *
// key[channel][token]. `memory`: prefill_max_rows floats for each token of a tile and each channel.
static void multiply_latent(const HeadPart& keys, const Tiles& tiles, unsigned rows,
                            const float* weights, float* out, float* tile, float* memory) {
    const Shape& shape = keys.part.shape().layer;
    const unsigned channels = shape.value_dim;
    const unsigned width = (rows + lanes - 1) / lanes * lanes;
    float* const by_token = memory;                               // [token][row]
    float* const sums = memory + prefill_max_rows * tile_tokens;  // [channel][row]
    for (unsigned i = 0; i < channels * width; i += lanes) store(sums + i, set(0.0f));
    for (unsigned at = 0; at < tiles.count; at += tile_tokens) {
        if (!tiles.visible[at / tile_tokens]) continue;
        const unsigned number = at / tiles.block_tokens;
        expand(keys, tiles.blocks[number], at - number * tiles.block_tokens, tile);
        for (unsigned t = 0; t < tile_tokens; ++t) {
            for (unsigned r = 0; r < width; ++r) {
                by_token[t * width + r] =
                    r < rows ? weights[std::size_t{r} * span_tokens + at + t] : 0.0f;
            }
        }
        gemm(tile, tile_tokens, channels, tile_tokens, by_token, width, sums, width);
    }
    for (unsigned r = 0; r < rows; ++r) {
        float* const to = out + std::size_t{r} * shape.head_dim;
        for (unsigned c = 0; c < channels; ++c) to[c] += sums[c * width + r];
    }
}
