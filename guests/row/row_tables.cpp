#include "row/row_tables.h"

#include <algorithm>

#include "lowkv/calibration.h"
#include "lowkv/error.h"

namespace lowkv::codec {
namespace {

void check_limits(const RowTables& tables, const Codec& codec, const Shape& shape) {
    const auto limit = [&](bool holds, std::uint32_t count, const char* of, std::uint32_t most) {
        if (holds) return;
        throw Error(ErrorCode::unsupported, to_string(codec), ": ", count, of,
                    " are not supported; at most ", most);
    };
    limit(shape.channels() <= max_row_channels, shape.channels(), " channels in a row",
          max_row_channels);
    limit(tables.groups <= max_row_groups, tables.groups, " groups in a row", max_row_groups);
}

void set_static_ranges(const Codec& codec, const PartCalibration& calibration, RowTables& tables) {
    tables.low = calibration.low;
    tables.high = calibration.high;
    const bool learned = codec.levels == Levels::learned;
    const auto top = static_cast<float>(codec.level_count() - 1);
    for (std::size_t c = 0; c < tables.low.size(); ++c) {
        const float length = tables.high[c] - tables.low[c];
        tables.scale.push_back(learned ? length / 2 : length / top);
        tables.zero.push_back(learned ? tables.low[c] + length / 2 : tables.low[c]);
    }
}

}  // namespace

std::uint32_t group_count(const Codec& codec, const Shape& shape) {
    const std::uint32_t size = row_of(codec.group).size;
    const std::uint32_t groups = std::max((shape.channels() + size / 2) / size, 1u);
    if (groups <= max_row_groups) return groups;
    throw Error(ErrorCode::unsupported, shape.channels(), " channels make ", groups, " groups of ",
                size, "; a layer can have ", max_row_groups, ": use a larger group (up to g128)");
}

std::shared_ptr<RowTables> make_row_tables(const Codec& codec, const Shape& shape,
                                           const PartCalibration* calibration, const Rope* rope,
                                           const char* what) {
    if (codec.needs_calibration()) {
        if (calibration == nullptr) {
            throw Error(ErrorCode::invalid_calibration, what, " ", to_string(codec),
                        " needs a calibration of this model: make one with lowkv calibrate");
        }
        check_calibration(*calibration, codec, shape, what);
    }
    auto tables = std::make_shared<RowTables>();
    if (codec.reordered) {
        tables->group.assign(calibration->group.begin(), calibration->group.end());
        tables->groups = static_cast<std::uint32_t>(*std::ranges::max_element(tables->group)) + 1;
        tables->clip = calibration->clip;
    } else if (codec.group == Group::row) {
        tables->group.assign(shape.channels(), 0);
        tables->groups = 1;
    } else {
        set_static_ranges(codec, *calibration, *tables);
    }
    if (codec.levels == Levels::learned) tables->boundaries = calibration->boundaries;
    tables->outliers = (codec.outliers * shape.channels() + 999) / 1000;
    if (codec.stage == Stage::pre && rope != nullptr) {
        tables->rope = RopeTable::of(*rope, shape.head_dim);
    }
    check_limits(*tables, codec, shape);
    return tables;
}

}  // namespace lowkv::codec
