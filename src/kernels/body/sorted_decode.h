// A head of sorted keys back from its section. Included inside an implementation's namespace, after
// sorted_section.h.

void decode_sorted(const SortedPart& part, const std::byte* section, std::uint16_t* rows) noexcept {
    const auto* codes = reinterpret_cast<const std::uint8_t*>(section + part.section.codes);
    SortedStatistics statistics;
    codec::read_statistics(part, section, statistics);
    float mean[max_sorted_dim], scale[sorted_tokens];
    read_means(part, section, mean);
    read_scales(part, section, scale);
    for (unsigned g = 0; g < part.section.groups; ++g) {
        float y[sorted_group][sorted_tokens] = {};
        CodeTile tile;
        if (g < part.coded_groups) {
            const unsigned bits = part.bits(g);
            codec::unpack_group(codes + lowkv_sorted_codes(part.head, g), bits,
                                part.levels[bits].trellis != 0, tile);
            for (unsigned i = 0; i < sorted_group; ++i) {
                read_levels(part, statistics, g * sorted_group + i, tile.row[i], y[i]);
                for (unsigned t = 0; t < sorted_tokens; ++t) y[i][t] *= scale[t];
            }
            hadamard_rows(y);
        }
        for (unsigned i = 0; i < sorted_group; ++i) {
            const unsigned c = statistics.order[g * sorted_group + i];
            for (unsigned t = 0; t < sorted_tokens; ++t) y[i][t] = 0.25f * y[i][t] + mean[c];
            for (unsigned r = 0; r < part.head.rows; ++r)
                y[i][row_token(part, section, r)] += residual(part, section, r, c);
            for (unsigned t = 0; t < sorted_tokens; t += lanes)
                store_f16(rows + std::size_t{c} * sorted_tokens + t,
                          mul(load(y[i] + t), set(statistics.factor[c])));
        }
    }
}
