// A test harness small enough to need no dependency: TEST registers a case, CHECK reports and continues, REQUIRE stops it.
#pragma once

#include <cmath>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Case {
  std::string name;
  std::function<void()> run;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Stop {};

struct Register {
  Register(std::string name, std::function<void()> run) { cases().push_back({std::move(name), std::move(run)}); }
};

inline void report(const char* file, int line, const std::string& what) {
  ++failures();
  std::cerr << file << ":" << line << ": " << what << "\n";
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << ": " << a << " != " << b;
  report(file, line, message.str());
}

}  // namespace check

#define CHECK_CONCAT_INNER(a, b) a##b
#define CHECK_CONCAT(a, b) CHECK_CONCAT_INNER(a, b)
#define TEST(name)                                                                    \
  static void CHECK_CONCAT(test_, __LINE__)();                                        \
  static const ::check::Register CHECK_CONCAT(register_, __LINE__){                   \
      std::string(__FILE__).substr(std::string(__FILE__).rfind('/') + 1) + ": " name, \
      CHECK_CONCAT(test_, __LINE__)};                                                 \
  static void CHECK_CONCAT(test_, __LINE__)()

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) ::check::report(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)
#define REQUIRE(condition)                                            \
  do {                                                                \
    if (!(condition)) {                                               \
      ::check::report(__FILE__, __LINE__, "REQUIRE(" #condition ")"); \
      throw ::check::Stop{};                                          \
    }                                                                 \
  } while (false)
#define CHECK_EQ(a, b) ::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_NEAR(a, b, tolerance) CHECK(std::abs(double(a) - double(b)) <= double(tolerance))
#define CHECK_THROWS(expression, Exception)                                                \
  do {                                                                                     \
    bool thrown = false;                                                                   \
    try {                                                                                  \
      static_cast<void>(expression);                                                       \
    } catch (const Exception&) {                                                           \
      thrown = true;                                                                       \
    }                                                                                      \
    if (!thrown) ::check::report(__FILE__, __LINE__, #expression " did not throw " #Exception); \
  } while (false)
