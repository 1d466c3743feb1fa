// Functions of bytes and ids that files and owners depend on.
#include "monolith/hash.h"

#include "arrays.h"
#include "module.h"
#include "monolith/buckets.h"
#include "monolith/crc32c.h"
#include "monolith/error.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Any object with contiguous memory: bytes, memoryview, NumPy array.
class BytesOf {
 public:
  explicit BytesOf(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  ~BytesOf() { PyBuffer_Release(&view_); }
  BytesOf(const BytesOf&) = delete;
  BytesOf& operator=(const BytesOf&) = delete;

  const void* data() const noexcept { return view_.buf; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace

void init_hash(nb::module_& m) {
  m.attr("NUM_BUCKETS") = monolith::kBuckets;
  m.def(
      "bucket_of",
      [](const InVector<std::int64_t>& ids, std::uint64_t count) {
        if (count == 0 || count >> 63 != 0) {
          throw monolith::InvalidArgument("count: expected 1..2^63 - 1, got " + std::to_string(count));
        }
        Buffer<std::int64_t> buckets(ids.size());
        for (std::size_t i = 0; i < ids.size(); ++i) {
          buckets.span()[i] = static_cast<std::int64_t>(monolith::bucket_of(ids.data()[i], count));
        }
        return std::move(buckets).vector();
      },
      "ids"_a.noconvert(), "count"_a);
  m.def(
      "crc32c",
      [](const nb::object& buffer, std::uint32_t start) {
        const BytesOf bytes(buffer);
        const Unlocked unlocked;
        return monolith::crc32c::extend(start, bytes.data(), bytes.size());
      },
      "buffer"_a, "start"_a = 0, "CRC-32C of the buffer's bytes; `start` is that of the bytes before them.");
}
