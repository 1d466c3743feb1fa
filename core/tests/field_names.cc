// Features are found by name, and the place where a name was found last is tried first. A guess that was not checked would put
// one feature's values into another's column as soon as a record has its features in another order.
#include "field_names.h"

#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

using monolith::FieldNames;

std::vector<std::size_t> found(FieldNames& names, const std::vector<std::string>& record) {
  names.begin_record();
  std::vector<std::size_t> numbers;
  for (const std::string& name : record) numbers.push_back(names.find(name));
  return numbers;
}

constexpr std::size_t kNone = FieldNames::kNone;

}  // namespace

TEST("names are numbered in the order of first mention") {
  FieldNames names;
  CHECK_EQ(names.add("b"), 0u);
  CHECK_EQ(names.add("a"), 1u);
  CHECK_EQ(names.add("b"), 0u);
  CHECK_EQ(names.add(""), 2u);
  CHECK_EQ(names.size(), 3u);
}

TEST("records in any order find the same numbers") {
  FieldNames names;
  for (const char* name : {"a", "b", "c"}) names.add(name);
  CHECK(found(names, {"a", "b", "c"}) == (std::vector<std::size_t>{0, 1, 2}));
  CHECK(found(names, {"a", "b", "c"}) == (std::vector<std::size_t>{0, 1, 2}));
  CHECK(found(names, {"c", "b", "a"}) == (std::vector<std::size_t>{2, 1, 0}));
  CHECK(found(names, {"b", "x", "b", "a"}) == (std::vector<std::size_t>{1, kNone, 1, 0}));
  CHECK(found(names, {"b", "x", "b", "a"}) == (std::vector<std::size_t>{1, kNone, 1, 0}));
  CHECK(found(names, {"x", "b"}) == (std::vector<std::size_t>{kNone, 1}));
  CHECK(found(names, {}).empty());
}

TEST("names that begin alike are told apart") {
  FieldNames names;
  names.add("user");
  names.add("user_id");
  CHECK(found(names, {"user_id", "user", "use", "user_id2"}) == (std::vector<std::size_t>{1, 0, kNone, kNone}));
  CHECK(found(names, {"user", "user_id", "user_id2", "use"}) == (std::vector<std::size_t>{0, 1, kNone, kNone}));
}

TEST("a name with a zero inside is another name") {
  FieldNames names;
  const std::string zero("a\0b", 3);
  names.add("a");
  names.add(zero);
  CHECK(found(names, {zero, "a"}) == (std::vector<std::size_t>{1, 0}));
  CHECK(found(names, {"a", zero}) == (std::vector<std::size_t>{0, 1}));
}

TEST("records with more names, and longer ones, than are remembered are read all the same") {
  FieldNames names;
  const std::string longest(10000, 'n');
  names.add(longest);
  names.add("last");
  std::vector<std::string> record(5000, "unknown");
  record.push_back(longest);
  record.push_back("last");
  for (int round = 0; round < 2; ++round) {
    const auto numbers = found(names, record);
    CHECK_EQ(numbers[5000], 0u);
    CHECK_EQ(numbers[5001], 1u);
    CHECK_EQ(numbers[17], kNone);
  }
  CHECK(found(names, {longest, longest + "n", "last"}) == (std::vector<std::size_t>{0, kNone, 1}));
}

TEST("random records are read as without guesses") {
  FieldNames names;
  std::vector<std::string> all;
  for (int i = 0; i < 30; ++i) all.push_back("f" + std::to_string(i));
  for (int i = 0; i < 20; ++i) names.add(all[static_cast<std::size_t>(i)]);
  std::mt19937 random(6);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::string> record;
    std::vector<std::size_t> expected;
    for (std::size_t n = random() % 8; n > 0; --n) {
      const std::size_t i = random() % all.size();
      record.push_back(all[i]);
      expected.push_back(i < 20 ? i : kNone);
    }
    REQUIRE(found(names, record) == expected);
  }
}
