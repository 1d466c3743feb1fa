#include "monolith/thread_pool.h"

#include <pthread.h>

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

// Whether this thread is running tasks of a job.
thread_local bool inside_job = false;

// One parallel_for. Lives on the caller's stack: the caller leaves only when every helper has left.
struct Job {
  const std::function<void(std::size_t)>* f;
  std::size_t tasks;
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  void run() noexcept {
    inside_job = true;
    for (std::size_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
      try {
        (*f)(i);
      } catch (...) {
        const std::lock_guard guard(mutex);
        if (!error) error = std::current_exception();
      }
    }
    inside_job = false;
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

std::atomic<std::size_t> wanted{0};  // 0: not chosen yet
std::atomic<Pool*> current{nullptr};

std::atomic<Executor> lender{nullptr};

// A forked child has none of the parent's threads. It starts over with a pool of its own and leaks the old one.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

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
  if (chosen != 0) return chosen;
  // Asked once: the system reads a file for it, which takes longer than a small lookup.
  static const std::size_t processors = std::max(1u, std::thread::hardware_concurrency());
  return processors;
}

void set_executor(Executor executor) noexcept { lender.store(executor); }

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& f) {
  const std::size_t threads = std::min(num_threads(), tasks);
  if (threads <= 1 || inside_job) {
    for (std::size_t i = 0; i < tasks; ++i) f(i);
    return;
  }
  Job job{.f = &f, .tasks = tasks, .next = {}, .mutex = {}, .error = {}};
  const Executor executor = lender.load();
  const auto body = [](void* context) { static_cast<Job*>(context)->run(); };
  // All threads, even if there are fewer tasks: an executor keeps a team of a certain size.
  if (executor == nullptr || !executor(num_threads(), body, &job)) pool().run(job, num_threads());
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace monolith
