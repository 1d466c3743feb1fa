// Threads that torch has, lent to the core: the OpenMP runtime that torch has brought into the process, GNU's or one with its interface.
//
// Its threads spin for a while after each parallel operation, waiting for the next. In a training step that leaves the core's own
// threads no processor, while these are there at once.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "module.h"
#include "monolith/thread_pool.h"

namespace nb = nanobind;

namespace {

struct OpenMp {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*max_threads)();

  OpenMp() noexcept
      : parallel(reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
        max_threads(reinterpret_cast<decltype(max_threads)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"))) {}
};

// A forked child has none of the parent's threads, and the runtime does not know it.
std::atomic<bool> forked{false};

// The runtime keeps a team of threads for every thread that asks, so only the main thread does.
bool is_main_thread() noexcept {
#if defined(__linux__)
  static thread_local const bool is_main = gettid() == getpid();
  return is_main;
#else
  return false;
#endif
}

bool run_on_openmp(std::size_t threads, void (*body)(void*), void* context) {
  static const OpenMp runtime;  // looked up by the first call, when torch is there
  if (runtime.parallel == nullptr || runtime.max_threads == nullptr || forked.load(std::memory_order_relaxed)) return false;
  // The team must have the size it has for torch: another would end threads and start new ones.
  if (!is_main_thread() || runtime.max_threads() != static_cast<int>(threads)) return false;
  runtime.parallel(body, context, static_cast<unsigned>(threads), 0);
  return true;
}

}  // namespace

void init_executor(nb::module_& m) {
  // When the module is loaded, not when threads are first needed: the process may fork in between.
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  monolith::set_executor(run_on_openmp);
  m.def("set_num_threads", &monolith::set_num_threads, nb::arg("n"));
  m.def("num_threads", &monolith::num_threads);
}
