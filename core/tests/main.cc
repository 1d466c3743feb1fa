// Runs every registered case, or those whose name contains one of the arguments. After `--part K N` every N-th, from the K-th on, so
// that several processes share them.
#include <exception>
#include <string>
#include <string_view>

#include "check.h"

int main(int argc, char** argv) {
  int part = 0;
  int parts = 1;
  int first = 1;
  if (argc > 3 && std::string_view(argv[1]) == "--part") {
    part = std::stoi(argv[2]);
    parts = std::stoi(argv[3]);
    first = 4;
  }
  int ran = 0;
  int failed = 0;
  int number = 0;
  for (const auto& test : check::cases()) {
    if (number++ % parts != part) continue;
    bool selected = argc == first;
    for (int i = first; i < argc; ++i) selected |= test.name.find(argv[i]) != std::string::npos;
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
