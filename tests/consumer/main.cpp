// What a user's program sees of an installed lowkv: headers, the libraries, and nothing else.
#include <cstdio>

#include "lowkv/calibrate.h"
#include "lowkv/codec.h"
#include "lowkv/filter.h"
#include "lowkv/scheme.h"

int main() {
    const lowkv::Scheme scheme = lowkv::parse_scheme("kivi2");
    const lowkv::Plan plan(scheme.layer(0), {.kv_heads = 8, .head_dim = 128});
    std::printf("%s: %.2f bits per element\n", lowkv::to_string(scheme).c_str(),
                plan.bits_per_element());
    if (lowkv::make_rule(lowkv::Filter::heavy) == nullptr) return 1;
    if (lowkv::calibration::masked_tokens(scheme.retention) != 5) return 1;
    return plan.packed_bytes() < plan.exact_bytes() ? 0 : 1;
}
