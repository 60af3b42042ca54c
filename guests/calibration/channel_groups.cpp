#include "calibration/learned.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace lowkv::calibration {
namespace {

constexpr int restarts = 16;
constexpr int max_iterations = 100;

struct Point {
    double low = 0, high = 0;
};

double distance(const Point& a, const Point& b) {
    return (a.low - b.low) * (a.low - b.low) + (a.high - b.high) * (a.high - b.high);
}

struct Clustering {
    std::vector<std::uint16_t> group;
    std::vector<Point> centres;
    double error = std::numeric_limits<double>::infinity();
};

// A number in [0, below) that is the same with every standard library.
double draw(std::mt19937_64& random, double below) {
    return static_cast<double>(random() >> 11) * 0x1p-53 * below;
}

// k-means++: each next centre is a point drawn by its squared distance to the centres so far.
std::vector<Point> first_centres(std::span<const Point> points, std::size_t groups,
                                 std::mt19937_64& random) {
    std::vector<Point> centres{
        points[static_cast<std::size_t>(draw(random, static_cast<double>(points.size())))]};
    std::vector<double> nearest(points.size(), std::numeric_limits<double>::infinity());
    while (centres.size() < groups) {
        for (std::size_t i = 0; i < points.size(); ++i)
            nearest[i] = std::min(nearest[i], distance(points[i], centres.back()));
        double left = draw(random, std::reduce(nearest.begin(), nearest.end()));
        std::size_t chosen = 0;
        while (chosen + 1 < points.size() && (left -= nearest[chosen]) >= 0) ++chosen;
        centres.push_back(points[chosen]);
    }
    return centres;
}

void assign(std::span<const Point> points, Clustering& found) {
    found.error = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
        double best = std::numeric_limits<double>::infinity();
        for (std::size_t g = 0; g < found.centres.size(); ++g) {
            const double d = distance(points[i], found.centres[g]);
            if (d >= best) continue;
            best = d;
            found.group[i] = static_cast<std::uint16_t>(g);
        }
        found.error += best;
    }
}

// An empty group takes the point that lies farthest from its centre, of a group with others.
void fill_empty(std::span<const Point> points, Clustering& found) {
    std::vector<std::size_t> members(found.centres.size(), 0);
    for (const std::uint16_t g : found.group) ++members[g];
    for (std::size_t g = 0; g < members.size(); ++g) {
        if (members[g] > 0) continue;
        std::size_t farthest = points.size();
        double most = -1;
        for (std::size_t i = 0; i < points.size(); ++i) {
            const double d = distance(points[i], found.centres[found.group[i]]);
            if (members[found.group[i]] < 2 || d <= most) continue;
            most = d;
            farthest = i;
        }
        --members[found.group[farthest]];
        ++members[g];
        found.group[farthest] = static_cast<std::uint16_t>(g);
        found.centres[g] = points[farthest];
        found.error -= most;
    }
}

void move_centres(std::span<const Point> points, Clustering& found) {
    std::vector<Point> sum(found.centres.size());
    std::vector<double> members(found.centres.size(), 0);
    for (std::size_t i = 0; i < points.size(); ++i) {
        sum[found.group[i]].low += points[i].low;
        sum[found.group[i]].high += points[i].high;
        members[found.group[i]] += 1;
    }
    for (std::size_t g = 0; g < sum.size(); ++g)
        found.centres[g] = {sum[g].low / members[g], sum[g].high / members[g]};
}

Clustering cluster(std::span<const Point> points, std::size_t groups, std::mt19937_64& random) {
    Clustering found;
    found.group.assign(points.size(), 0);
    found.centres = first_centres(points, groups, random);
    for (int i = 0; i < max_iterations; ++i) {
        const std::vector<std::uint16_t> before = found.group;
        assign(points, found);
        fill_empty(points, found);
        move_centres(points, found);
        if (i > 0 && found.group == before) break;
    }
    return found;
}

}  // namespace

std::vector<std::uint16_t> group_channels(std::span<const float> low, std::span<const float> high,
                                          std::uint32_t groups, std::uint64_t seed) {
    std::vector<Point> points;
    for (std::size_t c = 0; c < low.size(); ++c)
        points.push_back({static_cast<double>(low[c]), static_cast<double>(high[c])});
    std::mt19937_64 random(seed);
    Clustering best;
    for (int i = 0; i < restarts; ++i) {
        Clustering found = cluster(points, groups, random);
        if (found.error < best.error) best = std::move(found);
    }
    std::vector<std::uint16_t> order(groups), number(groups);
    std::iota(order.begin(), order.end(), std::uint16_t{0});
    std::ranges::stable_sort(
        order, {}, [&](std::uint16_t g) { return best.centres[g].high - best.centres[g].low; });
    for (std::size_t i = 0; i < groups; ++i) number[order[i]] = static_cast<std::uint16_t>(i);
    for (std::uint16_t& g : best.group) g = number[g];
    return best.group;
}

Ranges channel_ranges(std::span<const float> rows, std::uint32_t channels, double outliers) {
    const std::size_t tokens = rows.size() / channels;
    const auto tail = static_cast<std::ptrdiff_t>(outliers / 2 * static_cast<double>(tokens));
    Ranges out;
    std::vector<float> column(tokens);
    for (std::size_t c = 0; c < channels; ++c) {
        for (std::size_t t = 0; t < tokens; ++t) column[t] = rows[t * channels + c];
        const auto low = column.begin() + tail, high = column.end() - 1 - tail;
        std::nth_element(column.begin(), low, column.end());
        out.low.push_back(*low);
        std::nth_element(column.begin(), high, column.end());
        out.high.push_back(*high);
    }
    return out;
}

}  // namespace lowkv::calibration
