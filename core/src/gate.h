// A readers-writer lock whose writers are not starved: glibc's shared_mutex prefers readers, so a steal could wait for as long as
// insert calls keep overlapping. Here everybody passes a turnstile that a waiting writer holds.
#pragma once

#include <mutex>
#include <shared_mutex>

namespace monolith {

class Gate {
 public:
  std::shared_lock<std::shared_mutex> enter() {
    const std::lock_guard<std::mutex> pass(turnstile_);
    return std::shared_lock<std::shared_mutex>(room_);
  }

  std::unique_lock<std::shared_mutex> close() {
    const std::lock_guard<std::mutex> pass(turnstile_);
    return std::unique_lock<std::shared_mutex>(room_);
  }

 private:
  std::mutex turnstile_;
  std::shared_mutex room_;
};

}  // namespace monolith
