#include "calibration/clip_search.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "calibration/row_model.h"

namespace lowkv::calibration {
namespace {

constexpr int rounds = 2;

std::size_t group_total(const PartCalibration& part) {
    return std::size_t{*std::ranges::max_element(part.group)} + 1;
}

}  // namespace

std::vector<float> clip_shares() {
    std::vector<float> shares;
    for (int hundredths = 100; hundredths >= 30; hundredths -= 5)
        shares.push_back(static_cast<float>(hundredths) / 100.0f);
    return shares;
}

void search_key_clips(const AttentionOutput& output, const Codec& codec,
                      std::span<const float> rows,
                      const std::function<void(std::span<float>)>& to_cached,
                      PartCalibration& part) {
    part.clip.assign(group_total(part), 1.0f);
    const RowModel model(codec, part);
    std::vector<float> read(rows.size()), cached(rows.size());
    const auto error = [&] {
        cached = read;
        if (to_cached) to_cached(cached);
        return output.error(cached, {});
    };
    for (std::size_t g = 0; g < model.groups(); ++g) model.read_back_group(rows, g, 1.0f, read);
    for (int round = 0; round < rounds; ++round) {
        const std::vector<float> before = part.clip;
        for (std::size_t g = 0; g < model.groups(); ++g) {
            double least = std::numeric_limits<double>::infinity();
            for (const float clip : clip_shares()) {
                model.read_back_group(rows, g, clip, read);
                const double found = error();
                if (found >= least) continue;
                least = found;
                part.clip[g] = clip;
            }
            model.read_back_group(rows, g, part.clip[g], read);
        }
        if (part.clip == before || model.groups() == 1) break;
    }
}

void search_value_clips(const AttentionOutput& output, const Codec& codec, PartCalibration& part) {
    const std::size_t groups = group_total(part);
    part.clip.assign(groups, 1.0f);
    const RowModel model(codec, part);
    std::vector<float> read(output.values().size());
    std::vector<double> least(groups, std::numeric_limits<double>::infinity());
    for (const float clip : clip_shares()) {
        for (std::size_t g = 0; g < groups; ++g)
            model.read_back_group(output.values(), g, clip, read);
        const std::vector<double> found = output.value_errors(read, part.group, groups);
        for (std::size_t g = 0; g < groups; ++g) {
            if (found[g] >= least[g]) continue;
            least[g] = found[g];
            part.clip[g] = clip;
        }
    }
}

}  // namespace lowkv::calibration
