// What `lowkv compare` measures, against the formulas in double precision and in
// corners: one position, ties, hidden tokens, NaN.

#include "common/metrics.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace lowkv;
using namespace lowkv::cli;

namespace {

using Logits = std::vector<std::vector<float>>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float no_number = std::numeric_limits<float>::quiet_NaN();

Distance distance(const Logits& exact, const Logits& run, const std::vector<llama_token>& next) {
    const auto rows = [](const Logits& logits) {
        Rows out;
        for (const std::vector<float>& row : logits) out.push_back(row.data());
        return out;
    };
    Distance out;
    out.add(rows(exact), rows(run), next, static_cast<std::uint32_t>(exact.front().size()),
            serial_executor());
    return out;
}

std::vector<double> softmax(const std::vector<float>& logits) {
    double sum = 0;
    std::vector<double> p;
    for (const float z : logits) sum += std::exp(double{z});
    for (const float z : logits) p.push_back(std::exp(double{z}) / sum);
    return p;
}

}  // namespace

TEST_CASE("divergence and perplexity are the formulas', over more tokens than are summed at once") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    Logits exact(5, std::vector<float>(1000)), run = exact;
    std::vector<llama_token> next;
    double kld = 0, loss = 0, square = 0;
    std::vector<double> each;
    for (std::size_t row = 0; row < exact.size(); ++row) {
        for (std::size_t i = 0; i < exact[row].size(); ++i) {
            exact[row][i] = normal(random);
            run[row][i] = exact[row][i] + 0.1f * normal(random);
        }
        next.push_back(static_cast<llama_token>(random() % 1000));
        const std::vector<double> p = softmax(exact[row]), q = softmax(run[row]);
        each.push_back(0);
        for (std::size_t i = 0; i < p.size(); ++i) each.back() += p[i] * std::log(p[i] / q[i]);
        loss -= std::log(q[static_cast<std::size_t>(next.back())]);
        kld += each.back() / 5;
    }
    for (const double value : each) square += (value - kld) * (value - kld);
    const Distance found = distance(exact, run, next);
    CHECK(found.positions() == 5);
    CHECK(found.kld().mean == doctest::Approx(kld).epsilon(1e-4));
    CHECK(found.kld().error == doctest::Approx(std::sqrt(square / 4 / 5)).epsilon(1e-3));
    CHECK(found.perplexity() == doctest::Approx(std::exp(loss / 5)).epsilon(1e-5));
    std::ranges::sort(each);
    CHECK(found.kld_percentile(0) == doctest::Approx(each[0]).epsilon(1e-3));
    CHECK(found.kld_percentile(0.5) == doctest::Approx(each[2]).epsilon(1e-3));
    CHECK(found.kld_percentile(0.875) == doctest::Approx((each[3] + each[4]) / 2).epsilon(1e-3));
    CHECK(found.kld_percentile(1) == doctest::Approx(each[4]).epsilon(1e-3));
}

TEST_CASE("a run against itself") {
    const Logits logits{{1, 2, 3}, {-40, 60, 0}};
    const Distance same = distance(logits, logits, {2, 1});
    CHECK(same.kld().mean == doctest::Approx(0).epsilon(1e-12));
    CHECK(same.same_top() == 1);
    CHECK(distance({{0, 0, 0, 0}}, {{0, 0, 0, 0}}, {3}).perplexity() == doctest::Approx(4));
    CHECK(distance({{0, 0}}, {{1, 1}}, {0}).kld().error == 0);  // one position has no spread
}

TEST_CASE("the likeliest token: of equals the first") {
    CHECK(distance({{1, 2, 2}}, {{0, 5, 5}}, {0}).same_top() == 1);
    CHECK(distance({{1, 2, 2}}, {{0, 5, 6}}, {0}).same_top() == 0);
    CHECK(distance({{1, 2}, {2, 1}}, {{1, 2}, {1, 2}}, {0, 0}).same_top() == 0.5);
}

TEST_CASE("a token that neither can say costs nothing; one that only the run can't say, all") {
    const Distance both = distance({{1, 2, -infinity}}, {{1, 2, -infinity}}, {1});
    CHECK(both.kld().mean == doctest::Approx(0).epsilon(1e-7));
    CHECK(both.perplexity() == doctest::Approx(1 + std::exp(-1.0)));
    CHECK(distance({{1, 2, -infinity}}, {{1, 2, 3}}, {1}).kld().mean > 0.5);
    CHECK(distance({{1, 2, 3}}, {{1, 2, -infinity}}, {1}).kld().mean == HUGE_VAL);
}

TEST_CASE("NaN and nothing at all are no figures, and never look like good ones") {
    for (const Logits& run : {Logits{{no_number, 2}, {1, 2}}, Logits{{1, no_number}, {1, 2}}}) {
        const Distance broken = distance({{1, 2}, {1, 2}}, run, {0, 0});
        CHECK(std::isnan(broken.kld().mean));
        CHECK(std::isnan(broken.kld_percentile(0.5)));
        CHECK(std::isnan(broken.perplexity()));
        CHECK(broken.same_top() == 0.5);
    }
    const Distance nothing;
    CHECK(std::isnan(nothing.kld().mean));
    CHECK(std::isnan(nothing.kld_percentile(0.999)));
    CHECK(std::isnan(nothing.perplexity()));
}
