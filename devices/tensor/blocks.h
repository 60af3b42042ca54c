// Where blocks are.

typedef struct {
    uint8_t* at[LOWKV_BUFFERS];
} memories_t;

// What a head has in a block: its packed section, or of exact rows the whole part. Null: there is
// no block.
FN GLOBAL const uint8_t* section_in(const memories_t& memories, uint32_t address, uint32_t behind) {
    if (address == LOWKV_NOWHERE) return nullptr;
    return memories.at[address >> LOWKV_ADDRESS_BITS] +
           (size_t)(address & LOWKV_ADDRESS_OFFSET) * LOWKV_ADDRESS_UNIT + behind;
}
FN uint32_t behind_of(const lowkv_tensor_part& part, uint32_t packed, uint32_t kv_head) {
    return packed && part.form != LOWKV_TENSOR_EXACT ? kv_head * part.head_bytes : 0;
}
FN GLOBAL const uint8_t* part_at(const memories_t& memories, const lowkv_tensor& tensor,
                                 const attention_t& a, uint32_t packed, uint32_t cell,
                                 uint32_t which) {
    const uint32_t address = a.words[a.sequence->blocks + 2 * (cell >> tensor.token_shift) + which];
    return section_in(memories, address,
                      behind_of(which ? tensor.values : tensor.keys, packed, a.kv_head));
}
