#include "doctor/checks.h"

#include <array>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_case.h"
#include "common/devices.h"
#include "lowkv/error.h"

namespace lowkv::cli {
namespace {

constexpr AttentionShape shape{.head_dim = 64, .q_heads = 4, .kv_heads = 2, .tokens = 300};
// Of a head's largest value: the integer path's 2e-3, and as much for what decoding rounds.
constexpr double most_error = 4e-3;

// A cache with most tokens packed.
std::unique_ptr<AttentionCase> filled(const std::string& scheme, const RandomTokens& random,
                                      const std::shared_ptr<Device>& device) {
    std::unique_ptr<AttentionCase> made =
        make_lowkv_case(shape, scheme, std::make_shared<Store>(0, device));
    std::vector<float> keys(std::size_t{shape.tokens} * shape.channels()), values(keys.size());
    random.keys(0, shape.tokens, keys.data());
    random.values(0, shape.tokens, values.data());
    made->append(keys.data(), values.data(), shape.tokens);
    made->pack();
    return made;
}

bool same_rows(const AttentionCase& a, const AttentionCase& b) {
    std::array<std::vector<float>, 4> rows;
    rows.fill(std::vector<float>(shape.channels()));
    for (std::uint32_t token = 0; token < shape.tokens; ++token) {
        a.read(token, rows[0].data(), rows[1].data());
        b.read(token, rows[2].data(), rows[3].data());
        if (rows[0] != rows[2] || rows[1] != rows[3]) return false;
    }
    return true;
}

// What is wrong, or nothing; `worst`: the largest error.
std::string compute(const std::string& scheme, const std::shared_ptr<Device>& device,
                    double& worst) {
    const RandomTokens random(shape);
    const std::unique_ptr<AttentionCase> item = filled(scheme, random, device);
    if (device != cpu_device() && !same_rows(*item, *filled(scheme, random, cpu_device())))
        return "packs other codes than the CPU (" + scheme + ")";
    for (const std::uint32_t count : {1U, 40U}) {  // decode, prefill
        const Queries queries = make_queries(shape, random, count);
        item->prepare(queries, 1);
        item->attend();
        const double error = largest_error(*item, queries);
        if (!(error <= worst)) worst = error;
        if (!(error <= most_error))
            return "attends wrongly, by " + std::to_string(error) + " of a head's largest value (" +
                   scheme + ")";
    }
    return "";
}

void look_at_device(Findings& findings, const std::string& name) {
    constexpr const char* remedy =
        "use another device: its driver or this build computes wrongly there";
    const std::shared_ptr<Device> device = device_by_name(name);
    double worst = 0;
    for (const char* scheme : {"exact", "kivi2", "lowkv2.8"}) {
        const std::string wrong = compute(scheme, device, worst);
        if (!wrong.empty()) return findings.bad("device", name + " " + wrong, remedy);
    }
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), ": codes are right, attention is within %.0e", worst);
    findings.good("device", name + text.data());
}

}  // namespace

void look_at_devices(Findings& findings) {
    for (const FoundDevice& device : found_devices()) {
        try {
            look_at_device(findings, device.name);
        } catch (const Error& error) {
            findings.bad("device", device.name, error.what());
        }
    }
}

}  // namespace lowkv::cli
