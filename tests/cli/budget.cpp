// The arithmetic of `lowkv budget`: what is chosen for small problems, against all choices there
// are, and in corners: targets that can't be met, ties, one layer, layers that keep nothing, NaN.

#include "budget/choice.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "budget/report.h"

using namespace lowkv;
using namespace lowkv::cli;

namespace {

constexpr double no_number = std::numeric_limits<double>::quiet_NaN();

BudgetProblem problem_of(const std::vector<double>& sensitivities) {
    BudgetProblem problem{.layers = {}, .ratio = {1, 0.4, 0.1}};
    for (const double sensitivity : sensitivities)
        problem.layers.push_back({.elements = 1, .bits = {2, 3, 4}, .sensitivity = sensitivity});
    return problem;
}

std::vector<LayerScheme> ladder() {
    return {parse_scheme("lowkv2").base, parse_scheme("lowkv3").base, parse_scheme("lowkv4").base};
}

std::string text_of(const Rungs& rungs, const BudgetProblem& problem) {
    return to_string(write_scheme(ladder(), problem, rungs, {}));
}

}  // namespace

TEST_CASE("a choice fits, and no other one of as many bits loses less") {
    std::mt19937 random(1);
    std::uniform_real_distribution<double> sensitivity(0.01, 1);
    for (int draw = 0; draw < 20; ++draw) {
        std::vector<double> sensitivities(5);
        for (double& value : sensitivities) value = sensitivity(random);
        const BudgetProblem problem = problem_of(sensitivities);
        Rungs before(5, 0);
        for (int tenths = 20; tenths <= 40; ++tenths) {
            const double target = 0.1 * tenths;
            const Rungs rungs = choose_rungs(problem, target);
            const double bits = mean_bits(problem, rungs);
            CHECK(bits <= target + 1e-9);
            for (std::size_t i = 0; i < 5; ++i) CHECK(rungs[i] >= before[i]);  // never lowered
            before = rungs;
            for (int other = 0; other < 243; ++other) {
                Rungs all;
                for (int digits = other, i = 0; i < 5; ++i, digits /= 3)
                    all.push_back(static_cast<std::size_t>(digits % 3));
                if (mean_bits(problem, all) > bits + 1e-9) continue;
                CHECK(expected_loss(problem, all) >= expected_loss(problem, rungs) - 1e-12);
            }
        }
        CHECK(before == Rungs(5, 2));
    }
}

TEST_CASE("targets out of reach, one layer, ties") {
    const BudgetProblem one = problem_of({0.5});
    CHECK(choose_rungs(one, 1) == Rungs{0});  // nothing fits: the smallest there is
    CHECK(choose_rungs(one, 3) == Rungs{1});
    CHECK(choose_rungs(one, 99) == Rungs{2});
    const BudgetProblem alike = problem_of({1, 1, 1});
    CHECK(choose_rungs(alike, 2.5) == Rungs{1, 0, 0});          // of equals the first
    CHECK(choose_rungs(alike, 2 + 1.0 / 3) == Rungs{1, 0, 0});  // a sum's last digits don't count
}

TEST_CASE("where nothing is gained nothing is paid") {
    CHECK(choose_rungs(problem_of({0, 0}), 4) == Rungs{0, 0});
    BudgetProblem flat = problem_of({1, 1});
    flat.ratio = {1, 1, 0.1};  // the middle rung is no better: it is passed over
    CHECK(choose_rungs(flat, 3) == Rungs{2, 0});
}

TEST_CASE("layers weigh by their elements, and those that keep nothing don't count") {
    BudgetProblem problem = problem_of({1, 1, 1});
    problem.layers[0].elements = 3;
    problem.layers[1] = {};
    CHECK(mean_bits(problem, {1, 2, 0}) == doctest::Approx((3 * 3 + 2) / 4.0));
    CHECK(choose_rungs(problem, 2.5) == Rungs{0, 0, 2});  // the small layer is the cheaper one
    CHECK(text_of({0, 0, 1}, problem) == "lowkv2,layer.2=lowkv3");
    CHECK(text_of({1, 0, 1}, problem) == "lowkv3");  // layer 1 joins its neighbours
}

TEST_CASE("the shortest text of a choice") {
    const BudgetProblem problem = problem_of({1, 1, 1, 1});
    CHECK(text_of({0, 0, 0, 0}, problem) == "lowkv2");
    CHECK(text_of({1, 0, 0, 0}, problem) == "lowkv2,layer.0=lowkv3");
    CHECK(text_of({1, 1, 1, 0}, problem) == "lowkv3,layer.3=lowkv2");
    CHECK(text_of({0, 1, 1, 2}, problem) == "lowkv3,layer.0=lowkv2,layer.3=lowkv4");
    CHECK(text_of({2}, problem_of({1})) == "lowkv4");
}

TEST_CASE("a figure that is NaN raises no layer") {
    CHECK(choose_rungs(problem_of({no_number, 1}), 3) == Rungs{0, 2});
    CHECK(choose_rungs(problem_of({1, no_number}), 3) == Rungs{2, 0});
}

TEST_CASE("ratios never rise and lie within 0 and 1") {
    CHECK(steady_ratio(std::vector<double>{2, 1, 1.5, -1}) == std::vector<double>{1, 0.5, 0.5, 0});
    CHECK(steady_ratio(std::vector<double>{1, 3}) == std::vector<double>{1, 1});
    CHECK(steady_ratio(std::vector<double>{0, 0}) == std::vector<double>{1, 1});  // nothing is lost
    CHECK(steady_ratio(std::vector<double>{0.3}) == std::vector<double>{1});
}

TEST_CASE("losses that can't be told apart become alike, sure ones stay") {
    const std::vector<double> losses{1, 2, 3};
    CHECK(shrunk(losses, std::vector<double>{0, 0, 0}) == losses);
    for (const double value : shrunk(losses, std::vector<double>{9, 9, 9})) CHECK(value == 2);
    const std::vector<double> mixed = shrunk(losses, std::vector<double>{0.5, 0.5, 0.5});
    CHECK(mixed[0] > 1);
    CHECK(mixed[0] < mixed[1]);
    CHECK(mixed[2] < 3);
    CHECK(shrunk(std::vector<double>{5}, std::vector<double>{1}) == std::vector<double>{5});
    CHECK(shrunk(std::vector<double>{-5}, std::vector<double>{1}) == std::vector<double>{0});
}

TEST_CASE("bits are shown with as few digits as say them, rounded to the safe side") {
    CHECK(bits_text(2.5, true) == "2.5");
    CHECK(bits_text(3, false) == "3");
    CHECK(bits_text(2.00001, true) == "2.0001");
    CHECK(bits_text(2.00009, false) == "2");
    CHECK(bits_text(10.1, true) == "10.1");
    CHECK(bits_text(10.1, false) == "10.1");
    CHECK(bits_text(100, true) == "100");
}

TEST_CASE("a choice is better where it saves more than noise") {
    const auto saving = [](double mean, double error) {
        Verification found;
        found.saved = Estimate{mean, error};
        return better_than_uniform(found);
    };
    CHECK(saving(0.3, 0.1));
    CHECK_FALSE(saving(0.1, 0.1));
    CHECK_FALSE(saving(-1, 0.1));
    CHECK_FALSE(saving(no_number, no_number));
    CHECK_FALSE(better_than_uniform({}));
}
