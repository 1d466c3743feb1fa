// Runs every registered case, or those whose name contains one of the arguments.
#include <exception>
#include <string_view>

#include "check.h"

int main(int argc, char** argv) {
  int ran = 0;
  int failed = 0;
  for (const auto& test : check::cases()) {
    bool selected = argc == 1;
    for (int i = 1; i < argc; ++i) selected |= test.name.find(argv[i]) != std::string::npos;
    if (!selected) continue;
    const int before = check::failures();
    try {
      test.run();
    } catch (const check::Stop&) {
    } catch (const std::exception& error) {
      check::report(test.name.c_str(), 0, std::string("unexpected exception: ") + error.what());
    }
    ++ran;
    if (check::failures() != before) {
      ++failed;
      std::cerr << "FAILED " << test.name << "\n";
    }
  }
  std::cout << ran - failed << " passed, " << failed << " failed\n";
  return failed == 0 && ran > 0 ? 0 : 1;
}
