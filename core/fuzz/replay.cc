// Runs a fuzz target over files, for compilers without libFuzzer. A folder means all files in it. After `--seconds N` the target is
// also explored for so long, with inputs that are changed at random: no match for libFuzzer, but better than nothing.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>

#include "fuzz.h"

namespace {

constexpr std::size_t kLongest = 1 << 16;

Bytes content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// In a file that survives the death of this process: the input that killed it.
class LastInput {
 public:
  explicit LastInput(const char* path) {
    const int fd = ::open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    FUZZ_REQUIRE(fd >= 0 && ::ftruncate(fd, kLongest) == 0);
    memory_ = static_cast<std::uint8_t*>(::mmap(nullptr, kLongest, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    FUZZ_REQUIRE(memory_ != MAP_FAILED);
    fd_ = fd;
  }
  ~LastInput() { ::close(fd_); }
  LastInput(const LastInput&) = delete;
  LastInput& operator=(const LastInput&) = delete;

  void run(const Bytes& input) {
    FUZZ_REQUIRE(::ftruncate(fd_, static_cast<off_t>(input.size())) == 0);
    if (!input.empty()) std::memcpy(memory_, input.data(), input.size());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

 private:
  std::uint8_t* memory_;
  int fd_;
};

Bytes changed(Bytes input, const Bytes& other, std::mt19937_64& random) {
  for (std::uint64_t changes = random() % 6 + 1; changes > 0; --changes) {
    const std::size_t at = input.empty() ? 0 : random() % input.size();
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random() % 6) {
      case 0:
        if (!input.empty()) input[at] = static_cast<std::uint8_t>(input[at] ^ (1u << (random() % 8)));
        break;
      case 1:
        if (!input.empty()) input[at] = static_cast<std::uint8_t>(random());
        break;
      case 2:
        if (input.size() - at >= 4) fuzz::write_at(input, at, static_cast<std::uint32_t>(random() % 3 ? random() % 64 : ~0ull));
        break;
      case 3:
        input.erase(place, place + static_cast<std::ptrdiff_t>(std::min<std::size_t>(random() % 16, input.size() - at)));
        break;
      case 4:
        input.insert(place, random() % 16, static_cast<std::uint8_t>(random()));
        break;
      default:
        input.insert(place, other.begin(), other.begin() + static_cast<std::ptrdiff_t>(other.empty() ? 0 : random() % other.size()));
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
  return input;
}

std::uint64_t explore(const std::vector<Bytes>& corpus, double seconds) {
  LastInput last("last-fuzz-input");
  std::mt19937_64 random(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    last.run(changed(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random));
  }
  return runs;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0;
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--seconds" && i + 1 < argc) {
      seconds = std::stod(argv[++i]);
    } else if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) corpus.push_back(content(entry.path()));
    } else {
      corpus.push_back(content(argv[i]));
    }
  }
  if (corpus.empty()) {
    std::cerr << "no inputs\n";
    return 1;
  }
  for (const Bytes& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  std::cout << corpus.size() << " inputs";
  if (seconds > 0) std::cout << ", then " << explore(corpus, seconds) << " changed ones";
  std::cout << "\n";
  return 0;
}
