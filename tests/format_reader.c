/* A reader of packed heads that has lowkv/format.h and nothing else, in C99. */

#include "format_reader.h"

#include <string.h>

static float entry(const uint8_t* values, uint32_t index, int fp8, float multiplier) {
    uint16_t half;
    if (fp8) return lowkv_e4m3_to_f32(values[index]) * multiplier;
    memcpy(&half, values + 2 * index, sizeof half);
    return lowkv_f16_to_f32(half);
}

float format_element(const uint8_t* section, const lowkv_head* head, uint32_t token,
                     uint32_t channel) {
    const lowkv_section at = lowkv_lay_out(*head);
    const uint32_t grouped = head->by_channel ? token : channel;
    const uint32_t item = head->by_channel ? channel : token;
    const int fp8 = head->metadata == LOWKV_E4M3;
    const uint32_t row_bytes = 2 * at.row_entries * (fp8 ? 1 : 2);
    const uint8_t* scales = section + at.metadata + grouped / at.group * row_bytes;
    const uint8_t* zeros = scales + row_bytes / 2;
    const uint32_t steps = head->keys ? head->head_dim : head->tokens;
    const uint32_t code =
        lowkv_load_code(section + at.codes, head->width, steps, head->keys ? token : channel,
                        head->keys ? channel : token);
    float multipliers[2] = {1, 1};
    if (fp8) memcpy(multipliers, section, sizeof multipliers);
    return (float)code * entry(scales, item, fp8, multipliers[0]) +
           entry(zeros, item, fp8, multipliers[1]);
}

uint16_t format_to_f16(float value) { return lowkv_f32_to_f16(value); }
uint8_t format_to_e4m3(float value) { return lowkv_f32_to_e4m3(value); }
float format_from_e4m3(uint8_t byte) { return lowkv_e4m3_to_f32(byte); }
float format_multiplier(float largest) { return lowkv_e4m3_multiplier(largest); }
