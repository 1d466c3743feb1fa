#include "monolith/core_call.h"

#include <pthread.h>

#include <thread>

namespace monolith {
namespace {

thread_local int depth = 0;
thread_local std::optional<WriteGate::Writing> forking;

WriteGate& gate() {
  static WriteGate* const made = new WriteGate;  // never deleted: a thread may still call while the process ends
  return *made;
}

// A call that forks would wait for itself.
void wait_for_calls() {
  if (depth == 0) forking.emplace(gate());
}

void let_calls_go_on() { forking.reset(); }

[[maybe_unused]] const int registered = pthread_atfork(wait_for_calls, let_calls_go_on, let_calls_go_on);

}  // namespace

CoreCall::CoreCall() noexcept {
  if (depth++ > 0) return;
  for (inside_.emplace(gate()); !inside_->open(); inside_.emplace(gate())) std::this_thread::yield();
}

CoreCall::~CoreCall() { --depth; }

}  // namespace monolith
