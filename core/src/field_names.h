// Finds the column a feature name belongs to. Rows of one file mostly have the same features in the same order, so the name
// found at a place the last time is tried first.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace monolith {

class FieldNames {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // The number of `name`, counted from 0 in the order of first mention.
  std::size_t add(const std::string& name) { return numbers_.try_emplace(name, numbers_.size()).first->second; }
  std::size_t size() const noexcept { return numbers_.size(); }

  void begin_record() noexcept { place_ = 0; }

  std::size_t find(std::string_view name) {
    if (place_ >= kPlaces || name.size() > kLongest) return look_up(name);
    if (place_ == guesses_.size()) guesses_.emplace_back();
    Guess& guess = guesses_[place_++];
    if (guess.name != name) guess = {std::string(name), look_up(name)};
    return guess.number;
  }

 private:
  // A record may have any number of names of any length; what is remembered about them is bounded.
  static constexpr std::size_t kPlaces = 4096;
  static constexpr std::size_t kLongest = 256;

  struct Guess {
    std::string name;
    std::size_t number = kNone;
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };

  std::size_t look_up(std::string_view name) const {
    const auto found = numbers_.find(name);
    return found == numbers_.end() ? kNone : found->second;
  }

  std::unordered_map<std::string, std::size_t, Hash, std::equal_to<>> numbers_;
  std::vector<Guess> guesses_;
  std::size_t place_ = 0;
};

}  // namespace monolith
