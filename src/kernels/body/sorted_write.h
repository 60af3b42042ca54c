// Sorted keys, once their codes are found (sorted_encode.h): what stands in a section beside its
// statistics. Included inside an implementation's namespace, after sorted_encode.h.

// A row's scale is cut off at the others' largest: it has its residual.
void SortedEncoder::write_scales(std::byte* section) noexcept {
    float most = 0;
    for (unsigned t = 0; t < sorted_tokens; ++t) most = std::max(most, scale_[t] * kept_[t]);
    const std::uint16_t half = f32_to_f16(most);
    std::memcpy(section + part_.section.largest, &half, sizeof half);
    const float unit = f16_to_f32(half) / 255.0f;
    for (unsigned t = 0; t < sorted_tokens; ++t) {
        // One above 0 stays above 0.
        const bool stored = scale_[t] > 0 && unit > 0;
        const float level =
            stored ? std::max(std::nearbyint(std::min(scale_[t] / unit, 255.0f)), 1.0f) : 0.0f;
        section[part_.section.scales + t] = static_cast<std::byte>(static_cast<int>(level));
        scale_[t] = level * unit;
    }
}

// The mean less that of what the codes stand for, so that the decoded block has the tokens' mean.
void SortedEncoder::write_means(const SortedStatistics& statistics,
                                std::byte* section) const noexcept {
    float sum[max_sorted_dim] = {}, y[sorted_tokens], coded_mean[max_sorted_dim];
    for (unsigned p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes(p), y);
        for (unsigned t = 0; t < sorted_tokens; ++t) y[t] *= scale_[t] * kept_[t];
        sum[p] = codec::fold(y, sorted_tokens) * share();
    }
    to_channels(part_, statistics, sum, coded_mean);
    std::uint16_t largest[max_sorted_groups];
    for (unsigned g = 0; g < part_.section.groups; ++g) {
        float most = 0;
        for (unsigned c = g * sorted_group; c < (g + 1) * sorted_group; ++c)
            most = std::max(most, std::fabs(mean_[c] - coded_mean[c]));
        largest[g] = f32_to_f16(most);
    }
    std::memcpy(section + part_.section.largest_means, largest,
                part_.section.groups * sizeof *largest);
    for (unsigned c = 0; c < channels(); ++c)
        section[part_.section.means + c] =
            level_byte(mean_[c] - coded_mean[c], mean_step(part_, section, c));
}

void SortedEncoder::write_rows(const SortedStatistics& statistics,
                               std::byte* section) const noexcept {
    float mean[max_sorted_dim];
    read_means(part_, section, mean);
    float x[sorted_tokens], lacks[max_exact_rows][max_sorted_dim];
    float y[max_exact_rows][max_sorted_dim] = {};
    for (unsigned p = 0; p < coded(); ++p) {
        read_levels(part_, statistics, p, codes(p), x);
        for (unsigned r = 0; r < rows_.count; ++r)
            y[r][p] = x[rows_.token[r]] * scale_[rows_.token[r]];
    }
    for (unsigned r = 0; r < rows_.count; ++r) to_channels(part_, statistics, y[r], lacks[r]);
    for (unsigned c = 0; c < channels(); ++c) {
        load(c, x);
        for (unsigned r = 0; r < rows_.count; ++r)
            lacks[r][c] = x[rows_.token[r]] - (lacks[r][c] + mean[c]);
    }
    for (unsigned r = 0; r < rows_.count; ++r) {
        float most = 0;
        for (unsigned c = 0; c < channels(); ++c) most = std::max(most, std::fabs(lacks[r][c]));
        const std::uint16_t half = f32_to_f16(most / 127.0f);
        const float step = f16_to_f32(half);
        section[part_.section.row_tokens + r] = static_cast<std::byte>(rows_.token[r]);
        std::memcpy(section + part_.section.row_scales + 2 * r, &half, sizeof half);
        std::byte* out = section + part_.section.residuals + r * channels();
        for (unsigned c = 0; c < channels(); ++c) out[c] = level_byte(lacks[r][c], step);
    }
}

void SortedEncoder::write_codes(std::byte* section) const noexcept {
    auto* out = reinterpret_cast<std::uint8_t*>(section + part_.section.codes);
    CodeTile tile;
    for (unsigned g = 0; g < part_.coded_groups; ++g) {
        for (unsigned i = 0; i < sorted_group; ++i)
            std::copy_n(codes(g * sorted_group + i), sorted_tokens, tile.row[i]);
        codec::pack_group(tile, part_.bits(g), out + lowkv_sorted_codes(part_.head, g));
    }
}
