#include "monolith/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "monolith/error.h"

namespace monolith {
namespace {

// One parallel_for. Lives on the caller's stack: the caller leaves only when every helper has left.
struct Job {
  const std::function<void(std::size_t)>* f;
  std::size_t tasks;
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  void run() {
    for (std::size_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
      try {
        (*f)(i);
      } catch (...) {
        const std::lock_guard guard(mutex);
        if (!error) error = std::current_exception();
      }
    }
  }
};

class Pool {
 public:
  ~Pool() { stop(); }

  void run(Job& job, std::size_t threads) {
    std::unique_lock busy(one_job_, std::try_to_lock);
    if (!busy.owns_lock()) return job.run();
    resize(threads - 1);
    {
      const std::lock_guard guard(mutex_);
      job_ = &job;
      invited_ = std::min(workers_.size(), job.tasks - 1);
    }
    wake_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    invited_ = 0;  // nobody new may join: whoever has not come yet would find no task
    done_.wait(lock, [&] { return inside_ == 0; });
    job_ = nullptr;
  }

 private:
  void resize(std::size_t n) {
    if (workers_.size() == n) return;
    stop();
    for (std::size_t i = 0; i < n; ++i) workers_.emplace_back([this] { work(); });
  }

  void stop() {
    {
      const std::lock_guard guard(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || invited_ > 0; });
      if (stopping_) return;
      --invited_;
      ++inside_;
      Job* const job = job_;
      lock.unlock();
      job->run();
      lock.lock();
      if (--inside_ == 0) done_.notify_one();
    }
  }

  std::mutex one_job_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  std::size_t invited_ = 0;
  std::size_t inside_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

// The OpenMP runtime that torch has brought into the process, GNU's or one with its interface. Its threads spin for a while after
// each parallel operation, waiting for the next. In a training step that leaves our own threads no processor, while these are
// there at once. The runtime keeps a team of threads for every thread that asks: so only the main thread does.
class OpenMp {
 public:
  // True if the job was run. The team must have the size it has for torch: another would end threads and start new ones.
  static bool run(Job& job, std::size_t threads) {
    static const OpenMp runtime;
    if (runtime.parallel_ == nullptr || runtime.max_threads_ == nullptr || forked.load(std::memory_order_relaxed)) return false;
    if (!is_main_thread() || runtime.max_threads_() != static_cast<int>(threads)) return false;
    runtime.parallel_([](void* data) { static_cast<Job*>(data)->run(); }, &job, static_cast<unsigned>(threads), 0);
    return true;
  }

  // A forked child has none of the parent's threads, and the runtime does not know it.
  static inline std::atomic<bool> forked{false};

 private:
  OpenMp() noexcept
      : parallel_(reinterpret_cast<decltype(parallel_)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
        max_threads_(reinterpret_cast<decltype(max_threads_)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"))) {}

  static bool is_main_thread() noexcept {
#if defined(__linux__)
    static thread_local const bool is_main = gettid() == getpid();
    return is_main;
#else
    return false;
#endif
  }

  void (*parallel_)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*max_threads_)();
};

std::atomic<std::size_t> wanted{0};  // 0: not chosen yet
std::atomic<Pool*> current{nullptr};

// The child starts over with a pool of its own and leaks the old one.
void forget_threads() {
  current.store(nullptr);
  OpenMp::forked.store(true);
}

// When the library is loaded, not when threads are first needed: torch may have had its threads before, and the process may fork in
// between.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_threads);

Pool& pool() {
  if (Pool* existing = current.load(std::memory_order_acquire)) return *existing;
  static std::mutex creating;
  const std::lock_guard guard(creating);
  if (Pool* existing = current.load(std::memory_order_acquire)) return *existing;
  auto* fresh = new Pool;  // never deleted: worker threads may outlive static destruction
  current.store(fresh, std::memory_order_release);
  return *fresh;
}

}  // namespace

void set_num_threads(std::size_t n) {
  if (n == 0) throw InvalidArgument("num_threads: expected at least 1, got 0");
  wanted.store(n);
}

std::size_t num_threads() noexcept {
  const std::size_t chosen = wanted.load(std::memory_order_relaxed);
  return chosen != 0 ? chosen : std::max(1u, std::thread::hardware_concurrency());
}

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& f) {
  const std::size_t threads = std::min(num_threads(), tasks);
  if (threads <= 1) {
    for (std::size_t i = 0; i < tasks; ++i) f(i);
    return;
  }
  Job job{.f = &f, .tasks = tasks, .next = {}, .mutex = {}, .error = {}};
  if (!OpenMp::run(job, num_threads())) pool().run(job, num_threads());
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace monolith
