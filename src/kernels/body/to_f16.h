// Exact rows from f32. Included inside an implementation's namespace, after its vocabulary.

// Prefill converts every key and value of every layer.
void to_f16(const float* from, std::uint16_t* to, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; i += lanes) store_f16(to + i, load(from + i));
}
