// What an implementation's translation units have of each other; included in its namespace.

// Packed products of one part, for `rows` rows of weights, at most decode_max_rows (product.h):
// by integers, for codecs whose metadata belongs to a head, and for row codecs' values of one
// group;
void multiply_codes(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                    std::size_t y_stride) noexcept;
// of row codecs.
void multiply_rows(const Product* products, unsigned count, unsigned rows, std::size_t w_stride,
                   std::size_t y_stride) noexcept;

// tile[step][lane], `tile_lanes` floats a step: lanes [lane0, lane0 + tile_lanes) and steps
// [step0, step0 + tile_steps) of x. All multiples of 16.
void expand_codes(const Matrix& x, unsigned lane0, unsigned tile_lanes, unsigned step0,
                  unsigned tile_steps, float* tile) noexcept;
// Of a row codec: tile_tokens tokens from token0 on, all channels, as attention sees them.
void expand_rows(const Matrix& x, unsigned token0, float* tile) noexcept;
