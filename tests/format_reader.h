#pragma once
// What format_reader.c, in C99, offers to format.cpp.

#include "lowkv/part.h"

#ifdef __cplusplus
extern "C" {
#endif

// One element of a head of uniform groups, from its section.
float format_element(const uint8_t* section, const lowkv_head* head, uint32_t token,
                     uint32_t channel);
uint16_t format_to_f16(float value);
uint8_t format_to_e4m3(float value);
float format_from_e4m3(uint8_t byte);
float format_multiplier(float largest);

#ifdef __cplusplus
}
#endif
