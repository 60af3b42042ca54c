// Packed blocks to exact ones. Pairs of addresses: the packed block's and the exact one's.

// Parts that are not rotated: an item an element.
KERNEL(decode, 64)
(MEMORY, GLOBAL const uint32_t* plan, uint32_t which, GLOBAL const uint32_t* blocks) {
    GLOBAL const lowkv_part* part = part_of(plan, which);
    const uint32_t i = NUMBER, block = GROUP(1), channels = channels_of(part);
    if (i >= part->tokens * channels) return;
    GLOBAL uint8_t* from = AT(blocks[2 * block]);
    GLOBAL uint8_t* to = AT(blocks[2 * block + 1]) + part->exact_at;
    if (part->exact) {
        store_half(to, part->rows, i, ((GLOBAL const uint16_t*)(from + part->packed_at))[i]);
        return;
    }
    // In the order of what is written: neighbours write side by side.
    const uint32_t channel = part->keys ? i / part->tokens : i % channels;
    const uint32_t token = part->keys ? i % part->tokens : i / channels;
    const float value = stored_value(part, section_of(part, from, channel / part->head_dim),
                                     channel % part->head_dim, token);
    store_half(to, part->rows, exact_index(part, channel, token), lowkv_f32_to_f16(value));
}
