// The scales and zeros of a section (codes_part.h), to f32: of a head's groups, or of a row codec's
// rows.

struct StoredMetadata {
    const std::byte* data;
    Metadata type;
    F scale_unit, zero_unit;

    StoredMetadata(const lowkv_part& layout, const std::byte* section)
        : data(section + layout.metadata_at),
          type(static_cast<Metadata>(layout.metadata)),
          scale_unit(set(1.0f)),
          zero_unit(set(1.0f)) {
        if (type != Metadata::fp8_e4m3) return;
        float multiplier[2];
        __builtin_memcpy(multiplier, section, sizeof multiplier);
        scale_unit = set(256.0f * multiplier[0]);
        zero_unit = set(256.0f * multiplier[1]);
    }
    // `lanes` stored values, from the i-th on.
    F stored(std::size_t i) const {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
        switch (type) {
            case Metadata::fp16: return load_f16(reinterpret_cast<const std::uint16_t*>(data) + i);
            case Metadata::fp8_e4m3: return load_e4m3(bytes + i);
            case Metadata::fp8_e5m3: break;
        }
        return load_e5m3(bytes + i);
    }
    F scale(std::size_t i) const { return mul(stored(i), scale_unit); }
    F zero(std::size_t i) const { return mul(stored(i), zero_unit); }
};

// Of a head's groups. Normal levels store no zeros: theirs are a constant times the scale.
struct HeadMetadata {
    StoredMetadata metadata;
    std::size_t stride, zeros;  // of a group's entries: from the last group's, and of its zeros

    HeadMetadata(const lowkv_part& layout, const std::byte* section)
        : metadata(layout, section), stride(layout.row_entries), zeros(0) {
        if (layout.has_zeros != 0) {
            zeros = stride;
            stride *= 2;
        } else {
            metadata.zero_unit = mul(metadata.scale_unit, set(layout.level_zero));
            metadata.scale_unit = mul(metadata.scale_unit, set(layout.level_step));
        }
    }
    F scale(unsigned group, unsigned i) const { return metadata.scale(group * stride + i); }
    F zero(unsigned group, unsigned i) const { return metadata.zero(group * stride + zeros + i); }
};
