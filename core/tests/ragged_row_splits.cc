// Row splits come from files and sockets. Wrong ones must be refused, with the index in the error, before anything is read
// through them.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

using Splits = std::vector<std::int64_t>;

namespace {

std::string complaint(const Splits& splits, std::size_t values) {
  try {
    monolith::check_row_splits(splits, values);
  } catch (const monolith::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool begins(const std::string& text, const std::string& with) { return text.rfind(with, 0) == 0; }

}  // namespace

TEST("the first bad entry is named with its value and what was expected") {
  CHECK_EQ(complaint({0}, 0), "");
  CHECK_EQ(complaint({0, 0, 3, 3}, 3), "");
  CHECK(begins(complaint({}, 0), "offsets is empty, expected one entry more than there are rows"));
  CHECK(begins(complaint({1, 3}, 3), "offsets[0] is 1, expected 0;"));
  CHECK(begins(complaint({0, 5, 4, 3, 6}, 6), "offsets[2] is 4, expected at least 5 (the entry before);"));
  CHECK(begins(complaint({0, -1, 3}, 3), "offsets[1] is -1, expected at least 0 (the entry before);"));
  CHECK(begins(complaint({0, 2, 4}, 3), "offsets[2] is 4, expected 3 (the number of values);"));
  CHECK(begins(complaint({0, INT64_MAX}, 3), "offsets[1] is 9223372036854775807, expected 3"));
  CHECK(begins(complaint({0, INT64_MAX, INT64_MIN}, 3), "offsets[2] is -9223372036854775808, expected at least"));
}

TEST("spec: rows [], [1], [2, 3] give row ids 1, 2, 2") {
  std::vector<std::int64_t> out(3);
  monolith::value_rowids(Splits{0, 0, 1, 3}, out);
  CHECK(out == (std::vector<std::int64_t>{1, 2, 2}));
}

TEST("row ids of random splits, rows of every length, no byte written past the end") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    Splits splits{0};
    std::vector<std::int64_t> expected;
    const auto rows = static_cast<std::int64_t>(random() % 60);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::size_t length = random() % 4 == 0 ? random() % 40 : random() % 4;
      expected.insert(expected.end(), length, row);
      splits.push_back(static_cast<std::int64_t>(expected.size()));
    }
    std::vector<std::int64_t> out(expected.size() + 16, -7);
    monolith::value_rowids(splits, std::span(out).first(expected.size()));
    for (std::size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == (i < expected.size() ? expected[i] : -7));
  }
}
