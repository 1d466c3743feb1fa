// What this machine's memory allows for the work of an embedding table, with everything else taken away: no growth, no
// locks, no missing ids, no summing of duplicates, one batch after another without a call in between. A table cannot
// be faster; how close it comes is the number worth printing beside it.
//
//   gather        pooled sums of rows whose numbers are known                                         (no hashing)
//   probe_gather  hash -> one 64-byte bucket -> row, pooled sums                                      (a lookup)
//   probe_update  hash -> bucket -> Adagrad on weights and state, one step per occurrence             (an update alone)
//   two_calls     probe_gather over a batch, then probe_update                                        (a training step)
//   train_step    probe_gather over a batch, then the Adagrad step on the rows it found               (the same, if the
//                 update could know where the lookup found its rows)
//
// Usage:  memory_limit [--rows N] [--dims 16,64] [--threads 1,2] [--rounds 9] [--batches 32]
//         memory_limit --serve --rows N --dims D --threads T
// The first form prints one JSON line per case. The second builds once, answers each line "CASE DISTRIBUTION BATCHES" on
// stdin with one JSON line, and so lets the Python harness interleave it with other programs.

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "monolith/hash.h"

// Not under ThreadSanitizer: the choice of a clone runs before the sanitizer is up, and crashes.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define MONOLITH_PER_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#else
#define MONOLITH_PER_ISA
#endif
#define MONOLITH_INLINE [[gnu::always_inline]] inline

namespace {

constexpr std::size_t kBatch = 16384;
constexpr std::size_t kPool = 4;
constexpr std::size_t kBags = kBatch / kPool;
constexpr std::size_t kLine = 64;
constexpr std::size_t kBatchesInStream = 256;
constexpr std::array<std::size_t, 6> kDistances = {4, 8, 16, 32, 64, 96};  // multiples of kPool
constexpr std::size_t kLookahead = 2 * kDistances.back() + kPool;
constexpr std::size_t kRing = 256;
static_assert(kRing >= kLookahead && (kRing & (kRing - 1)) == 0);
constexpr float kLearningRate = 0.05f;
constexpr float kInitialAccumulator = 0.1f;

// Anonymous memory on huge pages where the kernel grants them; with 4 KiB pages a random access also misses the TLB and
// the walk of the page table, not the row, would be measured.
template <typename T>
class HugeArray {
 public:
  explicit HugeArray(std::size_t count) : bytes_(round_up(count * sizeof(T)) + kHugePage) {
    base_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) {
      std::perror("memory_limit: mmap");
      std::exit(1);
    }
    ::madvise(base_, bytes_, MADV_HUGEPAGE);
    data_ = reinterpret_cast<T*>(round_up(reinterpret_cast<std::uintptr_t>(base_)));
  }
  ~HugeArray() { ::munmap(base_, bytes_); }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  T* data() { return data_; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static std::size_t round_up(std::size_t n) { return (n + kHugePage - 1) / kHugePage * kHugePage; }
  std::size_t bytes_;
  void* base_;
  T* data_;
};

// Five ids and their rows in one cache line. At two ids a bucket on average, 99% of the ids are in the bucket they hash
// to, so a probe is one line; measured, a fuller index loses more to second lines than it gains in the caches.
struct alignas(kLine) Bucket {
  static constexpr std::size_t kSlots = 5;
  std::int64_t id[kSlots];
  std::uint32_t row[kSlots];
  std::uint32_t used;
};
static_assert(sizeof(Bucket) == kLine);

std::int64_t id_of_row(std::size_t row) { return static_cast<std::int64_t>(monolith::hash_id(static_cast<std::int64_t>(row)) ^ 0x5bd1e995); }

struct Table {
  Table(std::size_t rows_, std::size_t dim_)
      : rows(rows_), dim(dim_), bucket_count(rows_ / 2 + 1), buckets(bucket_count), data(rows_ * dim_ * 2) {
    for (std::size_t row = 0; row < rows; ++row) {
      const std::int64_t id = id_of_row(row);
      std::size_t b = monolith::fast_range(monolith::hash_id(id), bucket_count);
      while (buckets.data()[b].used == Bucket::kSlots) b = b + 1 == bucket_count ? 0 : b + 1;
      Bucket& bucket = buckets.data()[b];
      bucket.id[bucket.used] = id;
      bucket.row[bucket.used++] = static_cast<std::uint32_t>(row);
    }
    for (std::size_t row = 0; row < rows; ++row) {
      float* weights = data.data() + row * dim * 2;
      std::fill(weights, weights + dim, 0.01f);
      std::fill(weights + dim, weights + 2 * dim, kInitialAccumulator);
    }
  }
  std::size_t rows, dim, bucket_count;
  HugeArray<Bucket> buckets;
  HugeArray<float> data;  // per row: dim weights, then dim Adagrad accumulators
};

// What one thread works on. Each thread has its own ids (those whose hash falls to it), so that updates need no lock and
// no line travels between cores: the sharing is a cost of a table, not a limit of the memory.
struct Stream {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> rows;
};

struct Work {
  float* data;
  const Bucket* buckets;
  std::size_t bucket_count;
  const std::int64_t* ids;
  const std::uint32_t* rows;
  std::size_t count;      // ids, a multiple of kPool
  std::size_t distance;   // one of kDistances: how many ids ahead a row is prefetched; its bucket is, twice as far
  float* pooled;          // [count / kPool, dim]
  const float* gradient;  // [count / kPool, dim]
  float** found;          // [count]; where the rows are, for the second half of a training step
};

// Without a branch on the slot: which of five slots holds an id is random, and a mispredicted branch costs as much as the
// compare of all five.
MONOLITH_INLINE std::uint32_t find(const Work& w, const Bucket* bucket, std::int64_t id) {
  for (;;) {
    std::uint32_t row = 0, hit = 0;
    for (std::size_t s = 0; s < Bucket::kSlots; ++s) {
      const std::uint32_t mask = bucket->id[s] == id ? ~0u : 0u;
      row |= bucket->row[s] & mask;
      hit |= mask;
    }
    if (hit) [[likely]] return row;
    if (++bucket == w.buckets + w.bucket_count) bucket = w.buckets;
  }
}

// Into the first cache, or only into the second, which takes two neighbouring lines in the time of one; but a processor may decide
// not to follow that hint. Which is better differs between cases, so both are tried.
enum Cache { kFirst, kSecond };

template <Cache To>
MONOLITH_INLINE void prefetch(const void* line) {
  __builtin_prefetch(line, 0, To == kFirst ? 3 : 2);
}

template <std::size_t Floats, Cache To>
MONOLITH_INLINE void prefetch_floats(const float* p) {
  for (std::size_t f = 0; f < Floats; f += kLine / sizeof(float)) prefetch<To>(p + f);
}

// Explicit, for the compiler would add floats one by one. As in kernels.cc.
typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));

// The sum of a bag stays in registers until it is whole.
template <std::size_t Dim>
MONOLITH_INLINE void sum_bag(float* sum, const std::array<float*, kPool>& rows) {
  static_assert(kPool == 4);
  for (std::size_t d = 0; d < Dim; d += 8) {
    const Vector first = *reinterpret_cast<const Vector*>(rows[0] + d) + *reinterpret_cast<const Vector*>(rows[1] + d);
    const Vector second = *reinterpret_cast<const Vector*>(rows[2] + d) + *reinterpret_cast<const Vector*>(rows[3] + d);
    *reinterpret_cast<Vector*>(sum + d) = first + second;
  }
}

template <std::size_t Dim>
MONOLITH_INLINE void adagrad(float* __restrict row, const float* __restrict gradient) {
  for (std::size_t d = 0; d < Dim; ++d) {
    const float g = gradient[d];
    const float accumulated = row[Dim + d] + g * g;
    row[Dim + d] = accumulated;
    row[d] -= kLearningRate * g / std::sqrt(accumulated);
  }
}

// Ids are read up to kLookahead beyond `count`; streams are padded so that no loop has to ask whether it is near its end.
template <std::size_t Dim, Cache To>
MONOLITH_INLINE void gather(const Work& w) {
  for (std::size_t i = 0; i < w.distance; ++i) prefetch_floats<Dim, To>(w.data + w.rows[i] * Dim * 2);
  for (std::size_t i = 0; i < w.count; i += kPool) {
    std::array<float*, kPool> rows;
    for (std::size_t j = 0; j < kPool; ++j) {
      prefetch_floats<Dim, To>(w.data + w.rows[i + w.distance + j] * Dim * 2);
      rows[j] = w.data + w.rows[i + j] * Dim * 2;
    }
    sum_bag<Dim>(w.pooled + i / kPool * Dim, rows);
  }
}

// Visits the rows of every bag in order. A bucket is prefetched 2 x distance ids ahead, the row it names distance ahead.
template <std::size_t Dim, std::size_t Touched, Cache To, typename Visit>
MONOLITH_INLINE void probe(const Work& w, Visit visit) {
  std::array<const Bucket*, kRing> home;
  std::array<float*, kRing> found;
  const auto hash = [&](std::size_t i) __attribute__((always_inline)) {
    const Bucket* bucket = w.buckets + monolith::fast_range(monolith::hash_id(w.ids[i]), w.bucket_count);
    prefetch<To>(bucket);
    home[i % kRing] = bucket;
  };
  const auto locate = [&](std::size_t i) __attribute__((always_inline)) {
    float* row = w.data + std::size_t{find(w, home[i % kRing], w.ids[i])} * Dim * 2;
    prefetch_floats<Touched, To>(row);
    found[i % kRing] = row;
  };
  const std::size_t near = w.distance, far = 2 * w.distance;
  for (std::size_t i = 0; i < far; ++i) hash(i);
  for (std::size_t i = 0; i < near; ++i) locate(i);
  for (std::size_t i = 0; i < w.count; i += kPool) {
    std::array<float*, kPool> rows;
    for (std::size_t j = 0; j < kPool; ++j) rows[j] = found[(i + j) % kRing];
    for (std::size_t j = 0; j < kPool; ++j) locate(i + near + j);
    for (std::size_t j = 0; j < kPool; ++j) hash(i + far + j);
    visit(i, rows);
  }
}

template <std::size_t Dim, Cache To>
MONOLITH_INLINE void probe_gather(const Work& w) {
  probe<Dim, Dim, To>(w, [&](std::size_t i, const std::array<float*, kPool>& rows) __attribute__((always_inline)) {
    sum_bag<Dim>(w.pooled + i / kPool * Dim, rows);
  });
}

template <std::size_t Dim, Cache To>
MONOLITH_INLINE void probe_update(const Work& w) {
  probe<Dim, 2 * Dim, To>(w, [&](std::size_t i, const std::array<float*, kPool>& rows) __attribute__((always_inline)) {
    for (float* row : rows) adagrad<Dim>(row, w.gradient + i / kPool * Dim);
  });
}

template <std::size_t Dim, Cache To>
MONOLITH_INLINE void two_calls(const Work& w) {
  probe_gather<Dim, To>(w);
  probe_update<Dim, To>(w);
}

template <std::size_t Dim, Cache To>
MONOLITH_INLINE void train_step(const Work& w) {
  // The state is prefetched with the weights: the second pass then finds all of the row in a cache.
  probe<Dim, 2 * Dim, To>(w, [&](std::size_t i, const std::array<float*, kPool>& rows) __attribute__((always_inline)) {
    sum_bag<Dim>(w.pooled + i / kPool * Dim, rows);
    std::copy(rows.begin(), rows.end(), w.found + i);
  });
  const std::size_t last = w.count - 1;
  for (std::size_t i = 0; i < w.count; ++i) {
    prefetch_floats<2 * Dim, To>(w.found[std::min(i + w.distance, last)]);
    adagrad<Dim>(w.found[i], w.gradient + i / kPool * Dim);
  }
}

using Pass = void (*)(const Work&);
#define MONOLITH_PASSES(name)                                              \
  MONOLITH_PER_ISA void name##_16_first(const Work& w) { name<16, kFirst>(w); }   \
  MONOLITH_PER_ISA void name##_16_second(const Work& w) { name<16, kSecond>(w); } \
  MONOLITH_PER_ISA void name##_64_first(const Work& w) { name<64, kFirst>(w); }   \
  MONOLITH_PER_ISA void name##_64_second(const Work& w) { name<64, kSecond>(w); } \
  constexpr Passes name##_passes = {{name##_16_first, name##_16_second}, {name##_64_first, name##_64_second}};

// By the cache that is fetched into.
struct Passes {
  std::array<Pass, 2> dim16, dim64;
};
MONOLITH_PASSES(gather)
MONOLITH_PASSES(probe_gather)
MONOLITH_PASSES(probe_update)
MONOLITH_PASSES(two_calls)
MONOLITH_PASSES(train_step)

// How to fetch: into which cache, and how many ids ahead.
struct Fetching {
  std::size_t cache = 0;
  std::size_t distance = 0;
};

struct Case {
  const char* name;
  Passes passes;
  Fetching best[2] = {};  // tuned on first use, per distribution
};

// Ranks drawn with probability proportional to 1 / rank^1.05, spread over the rows by a bijection so that hot rows are not
// neighbours.
std::vector<Stream> make_streams(std::size_t rows, std::size_t threads, bool zipf) {
  std::vector<double> cumulative;
  if (zipf) {
    cumulative.resize(rows);
    double total = 0;
    for (std::size_t k = 0; k < rows; ++k) cumulative[k] = total += std::pow(static_cast<double>(k + 1), -1.05);
  }
  std::vector<std::uint32_t> row_of_rank(rows);
  for (std::size_t k = 0; k < rows; ++k) row_of_rank[k] = static_cast<std::uint32_t>(k);
  std::mt19937_64 random(20240601);
  std::shuffle(row_of_rank.begin(), row_of_rank.end(), random);

  std::vector<Stream> streams(threads);
  const std::size_t wanted = kBatchesInStream * kBatch / threads;
  std::size_t full = 0;
  while (full < threads) {
    std::size_t rank;
    if (zipf) {
      const double u = std::uniform_real_distribution<double>(0.0, cumulative.back())(random);
      rank = std::min<std::size_t>(rows - 1, std::upper_bound(cumulative.begin(), cumulative.end(), u) - cumulative.begin());
    } else {
      rank = monolith::fast_range(random(), rows);
    }
    const std::uint32_t row = row_of_rank[rank];
    const std::int64_t id = id_of_row(row);
    Stream& stream = streams[monolith::fast_range(monolith::hash_id(id), threads)];
    if (stream.ids.size() == wanted) continue;
    stream.ids.push_back(id);
    stream.rows.push_back(row);
    if (stream.ids.size() == wanted) ++full;
  }
  for (Stream& stream : streams) {
    for (std::size_t i = 0; i < kLookahead; ++i) {
      stream.ids.push_back(stream.ids[i]);
      stream.rows.push_back(stream.rows[i]);
    }
  }
  return streams;
}

class Bench {
 public:
  Bench(std::size_t rows, std::size_t dim, std::size_t threads)
      : table_(rows, dim), threads_(threads), streams_{make_streams(rows, threads, true), make_streams(rows, threads, false)} {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    gradient_.resize(kBags * dim);
    for (float& g : gradient_) g = normal(random);
  }

  // Seconds for `batches` batches, the next ones of the stream.
  double run(Case& c, bool zipf, std::size_t batches) {
    Fetching& best = c.best[zipf ? 0 : 1];
    if (best.distance == 0) best = tune(c, zipf);
    return timed(c, zipf, batches, best);
  }

 private:
  // The limit is what the best way to fetch gives; it differs between machines, dims and cases.
  Fetching tune(const Case& c, bool zipf) {
    Fetching best;
    double best_seconds = 1e30;
    for (const std::size_t cache : {0u, 1u}) {
      for (const std::size_t distance : kDistances) {
        // A processor takes some batches to decide whether it follows a hint: only the last of three counts.
        for (int repeat = 0; repeat < 2; ++repeat) timed(c, zipf, 32, {cache, distance});
        const double seconds = timed(c, zipf, 32, {cache, distance});
        if (seconds < best_seconds) best_seconds = seconds, best = {cache, distance};
      }
    }
    return best;
  }

  double timed(const Case& c, bool zipf, std::size_t batches, Fetching fetching) {
    using Clock = std::chrono::steady_clock;
    const Pass pass = (table_.dim == 16 ? c.passes.dim16 : c.passes.dim64)[fetching.cache];
    const std::size_t share = kBatch / threads_;
    std::vector<Clock::time_point> begin(threads_), end(threads_);
    std::barrier start(static_cast<std::ptrdiff_t>(threads_));
    const auto body = [&](std::size_t t) {
      const Stream& stream = streams_[zipf ? 0 : 1][t];
      std::vector<float> pooled(share / kPool * table_.dim);
      std::vector<float*> found(share);
      start.arrive_and_wait();
      begin[t] = Clock::now();
      for (std::size_t b = 0; b < batches; ++b) {
        const std::size_t at = (next_batch_ + b) % kBatchesInStream * share;
        pass({table_.data.data(), table_.buckets.data(), table_.bucket_count, stream.ids.data() + at, stream.rows.data() + at, share,
              fetching.distance, pooled.data(), gradient_.data(), found.data()});
      }
      end[t] = Clock::now();
    };
    std::vector<std::thread> others;
    for (std::size_t t = 1; t < threads_; ++t) others.emplace_back(body, t);
    body(0);
    for (std::thread& thread : others) thread.join();
    next_batch_ += batches;
    const auto first = *std::min_element(begin.begin(), begin.end());
    const auto last = *std::max_element(end.begin(), end.end());
    return std::chrono::duration<double>(last - first).count();
  }

  Table table_;
  std::size_t threads_;
  std::array<std::vector<Stream>, 2> streams_;
  std::vector<float> gradient_;
  std::size_t next_batch_ = 0;
};

std::vector<Case> all_cases() {
  return {{"gather", gather_passes},
          {"probe_gather", probe_gather_passes},
          {"probe_update", probe_update_passes},
          {"two_calls", two_calls_passes},
          {"train_step", train_step_passes}};
}

void serve(std::size_t rows, std::size_t dim, std::size_t threads) {
  Bench bench(rows, dim, threads);
  std::vector<Case> cases = all_cases();
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string name, distribution;
    std::size_t batches = 0;
    words >> name >> distribution >> batches;
    const auto found = std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return name == c.name; });
    if (found == cases.end() || batches == 0 || (distribution != "zipf" && distribution != "uniform")) {
      std::printf("{\"error\": \"expected 'CASE zipf|uniform BATCHES'\"}\n");
    } else {
      std::printf("{\"seconds\": %.9f}\n", bench.run(*found, distribution == "zipf", batches));
    }
    std::fflush(stdout);
  }
}

void report(std::size_t rows, std::size_t dim, std::size_t threads, std::size_t rounds, std::size_t batches) {
  Bench bench(rows, dim, threads);
  for (Case& c : all_cases()) {
    for (const bool zipf : {true, false}) {
      std::vector<double> rates;
      for (std::size_t r = 0; r < rounds; ++r) {
        rates.push_back(static_cast<double>(batches * kBatch) / bench.run(c, zipf, batches) / 1e6);
      }
      std::sort(rates.begin(), rates.end());
      std::printf(
          "{\"case\": \"%s\", \"distribution\": \"%s\", \"dim\": %zu, \"threads\": %zu, \"rows\": %zu, \"prefetch_distance\": %zu, \"into_cache\": %zu, "
          "\"median_m_ids_per_s\": %.2f, \"best_m_ids_per_s\": %.2f}\n",
          c.name, zipf ? "zipf" : "uniform", dim, threads, rows, c.best[zipf ? 0 : 1].distance, c.best[zipf ? 0 : 1].cache + 1, rates[rates.size() / 2], rates.back());
      std::fflush(stdout);
    }
  }
}

std::vector<std::size_t> parse_list(const char* text) {
  std::vector<std::size_t> numbers;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) numbers.push_back(std::stoul(part));
  return numbers;
}

[[noreturn]] void usage() {
  std::fprintf(stderr,
               "usage: memory_limit [--serve] [--rows N] [--dims 16,64] [--threads 1,2] [--rounds 9] [--batches 32]\n"
               "dims are 16 or 64, threads 1, 2, 4 or 8; --serve takes one dim and one number of threads\n");
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
#if defined(__GNUC__) && !defined(__clang__) && !defined(__NO_MATH_ERRNO__)
  // GCC then keeps sqrt scalar, and the arithmetic is the limit instead of the memory.
  std::fprintf(stderr, "memory_limit: built without -fno-math-errno; the update cases are slower than the machine allows\n");
#endif
  std::size_t rows = 10'000'000, rounds = 9, batches = 32;
  std::vector<std::size_t> dims = {16, 64}, threads = {1, 2};
  bool serving = false;
  for (int a = 1; a < argc; ++a) {
    const std::string_view flag = argv[a];
    if (flag == "--serve") {
      serving = true;
      continue;
    }
    if (a + 1 == argc) usage();
    const std::vector<std::size_t> value = parse_list(argv[++a]);
    if (value.empty()) usage();
    if (flag == "--rows") rows = value[0];
    else if (flag == "--dims") dims = value;
    else if (flag == "--threads") threads = value;
    else if (flag == "--rounds") rounds = value[0];
    else if (flag == "--batches") batches = value[0];
    else usage();
  }
  for (const std::size_t dim : dims) if (dim != 16 && dim != 64) usage();
  for (const std::size_t t : threads) if (t != 1 && t != 2 && t != 4 && t != 8) usage();
  if (rows == 0 || rounds == 0 || batches == 0 || (serving && dims.size() + threads.size() != 2)) usage();
  if (serving) {
    serve(rows, dims[0], threads[0]);
    return 0;
  }
  for (const std::size_t dim : dims) {
    for (const std::size_t t : threads) report(rows, dim, t, rounds, batches);
  }
  return 0;
}
