// How figures are shown, and the sentence under `lowkv compare`.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "common/terminal.h"
#include "compare/report.h"

using namespace lowkv;
using namespace lowkv::cli;

namespace {

ComparedRow row(const char* name, double perplexity, double size) {
    ComparedRow out;
    out.name = name;
    out.stock = std::string(name).starts_with("stock");
    out.perplexity = perplexity;
    out.cache_bytes = size * 1024 * 1024;
    out.compression = 16 / size;
    return out;
}

std::string summary_of(std::vector<ComparedRow> rows) {
    Comparison comparison;
    comparison.rows = std::move(rows);
    return summary(comparison);
}

}  // namespace

TEST_CASE("figures") {
    CHECK(fixed(2.345, 2) == "2.35");
    CHECK(signed_fixed(0.5, 1) == "+0.5");
    CHECK(signed_fixed(-0.5, 1) == "-0.5");
    CHECK(shortest(2.50, 3) == "2.5");
    CHECK(shortest(100, 3) == "100");
    CHECK(shortest(0, 3) == "0");
    CHECK(count(0) == "0");
    CHECK(count(999) == "999");
    CHECK(count(1000) == "1,000");
    CHECK(count(1234567) == "1,234,567");
    CHECK(span(3, 3) == "3");
    CHECK(span(3, 8000) == "3 to 8,000");
    CHECK(bytes(1023) == "1023 B");
    CHECK(bytes(1024) == "1.0 KiB");
    CHECK(bytes(1024 * 1024 - 1) == "1.0 MiB");  // not 1024.0 KiB
    CHECK(bytes(5e12) == "4656.6 GiB");
    CHECK(divergence(-1e-9) == "0.00000");
    CHECK(divergence(0.25) == "0.250");
    CHECK(divergence(NAN) == "nan");
    CHECK(median({}) == 0);
    CHECK(median({3, 1, 2}) == 2);
    CHECK(median({4, 1, 2, 3}) == 2.5);
}

TEST_CASE("lines of text") {
    CHECK(joined({}).empty());
    CHECK(joined({"a", "b", "c"}) == "a, b, c");
    CHECK(wrapped("", "one two", 0) == "one two\n");
    const std::string long_text =
        wrapped("> ", std::string(60, 'a') + " " + std::string(60, 'b'), 4);
    CHECK(long_text == "> " + std::string(60, 'a') + "\n    " + std::string(60, 'b') + "\n");
    CHECK(complete_utf8("abc") == 3);
    CHECK(complete_utf8("ab\xc3") == 2);
    CHECK(complete_utf8("\xf0\x9f\x98") == 0);
    CHECK(complete_utf8("\xf0\x9f\x98\x80") == 4);
    CHECK(complete_utf8("") == 0);
}

TEST_CASE("a table is Markdown whose columns align, characters of several bytes too") {
    Table table({"a", "b"});
    table.add({"\xc3\xa4\xc3\xb6\xc3\xbc!", "1"});
    table.add({"x"});
    CHECK(table.text() ==
          "| a    |   b |\n| ---- | --: |\n| \xc3\xa4\xc3\xb6\xc3\xbc! |   1 |\n| x    |     |\n");
}

TEST_CASE("the best trade is the smallest within 1 % of exact's perplexity") {
    const ComparedRow exact = row("exact", 10, 16), f16 = row("stock f16", 10, 16);
    const std::string good =
        summary_of({exact, row("int8", 10, 8), row("int4", 10.05, 4), row("kivi2", 11, 2), f16});
    CHECK(good.starts_with("Best trade: int4 holds the text in 4.0 MiB, 4.0 times less than f16"));
    CHECK(good.find("the smallest, kivi2, is 8.0 times smaller") != std::string::npos);
    CHECK(summary_of({exact, row("kivi2", 11, 2)}).starts_with("No scheme here stays within 1 %"));
    CHECK(summary_of({exact, f16}).empty());
    // A broken one has no perplexity, and is no trade at all.
    const ComparedRow broken = row("broken", std::numeric_limits<double>::quiet_NaN(), 1);
    CHECK(summary_of({exact, row("int8", 10, 8), broken}).starts_with("Best trade: int8"));
}
