// One call of the library. A process forks when no call runs: a forked child has none of the parent's threads, and what these were
// changing would stay locked in it for ever. So fork waits for the calls that run, and calls that come meanwhile wait for fork.
#pragma once

#include <optional>

#include "monolith/write_gate.h"

namespace monolith {

// For the length of a call. A call inside another is part of it. The thread must not hold a lock that a running call needs.
class CoreCall {
 public:
  CoreCall() noexcept;
  ~CoreCall();
  CoreCall(const CoreCall&) = delete;
  CoreCall& operator=(const CoreCall&) = delete;

 private:
  std::optional<WriteGate::Reading> inside_;
};

}  // namespace monolith
