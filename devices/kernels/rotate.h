// Rotations of a head's channels, by a group of 64 items: the sums are those of
// src/codec/rotation.cpp in the same order.

FN void butterflies(LOCAL float* x, uint32_t size, uint32_t stride) {
    for (uint32_t i = ITEM; i < size / 2; i += 64) {
        const uint32_t at = i / stride * 2 * stride + i % stride;
        const float low = x[at], high = x[at + stride];
        x[at] = low + high;
        x[at + stride] = low - high;
    }
    BARRIER();
}

// x H for each power-of-two block of channels, the largest first.
FN void walsh_hadamard(LOCAL float* x, uint32_t head_dim) {
    uint32_t first = 0;
    while (first < head_dim) {
        uint32_t size = 16;
        while (2 * size <= head_dim - first) size *= 2;
        butterflies(x + first, size, 4);
        butterflies(x + first, size, 8);
        butterflies(x + first, size, 1);
        butterflies(x + first, size, 2);
        for (uint32_t stride = 16; stride < size; stride *= 2) butterflies(x + first, size, stride);
        first += size;
    }
}

FN void multiply_signs(LOCAL float* x, GLOBAL const float* signs, uint32_t head_dim) {
    for (uint32_t c = ITEM; c < head_dim; c += 64) x[c] *= signs[c];
    BARRIER();
}

FN void multiply_matrix(LOCAL float* x, GLOBAL const float* matrix, uint32_t head_dim) {
    float product[LOWKV_MOST_CHANNELS / 64];
    for (uint32_t k = 0, c = ITEM; c < head_dim; c += 64, ++k) {
        product[k] = 0.0f;
        for (uint32_t row = 0; row < head_dim; ++row)
            product[k] += x[row] * matrix[row * head_dim + c];
    }
    BARRIER();
    for (uint32_t k = 0, c = ITEM; c < head_dim; c += 64, ++k) x[c] = product[k];
    BARRIER();
}

// x R, or x R^T. What the group's items wrote to x they have seen (BARRIER), and will have.
FN void rotate_channels(GLOBAL const lowkv_part* part, GLOBAL const uint32_t* plan, LOCAL float* x,
                        int back) {
    GLOBAL const float* table = table_of(plan, part->rotation_at);
    const uint32_t d = part->head_dim;
    if (part->rotation == LOWKV_NOT_ROTATED) return;
    if (part->rotation != LOWKV_HADAMARD) {
        multiply_matrix(x, back ? table + d * d : table, d);
        return;
    }
    if (!back) multiply_signs(x, table, d);
    walsh_hadamard(x, d);
    if (back) multiply_signs(x, table, d);
}
