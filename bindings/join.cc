// Steps of the joiner over many records at a time. They work on the dicts and lists of monolith.data.join, whose Python code treats
// each event that needs more than the common case: every function stops there, and says where.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "module.h"
#include "monolith/event_reader.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::EventFields;
using monolith::EventReader;

namespace {

std::span<const std::uint8_t> bytes_of(PyObject* object) {
  if (!PyBytes_Check(object)) throw nb::type_error("expected bytes");
  return {reinterpret_cast<const std::uint8_t*>(PyBytes_AsString(object)), static_cast<std::size_t>(PyBytes_Size(object))};
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::int64_t integer(PyObject* object) {
  const std::int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

PyObject* required(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return object;
}

void require(int result) {
  if (result < 0) throw nb::python_error();
}

// Column `index` of the records of one partition, which all have as many.
PyObject* item(const nb::list& column, std::size_t index) {
  if (index >= column.size()) throw nb::index_error("the columns of records differ in length");
  return PyList_GetItem(column.ptr(), static_cast<Py_ssize_t>(index));
}

class EventParser {
 public:
  EventParser(EventFields fields, std::size_t max_bytes)
      : has_key_(!fields.key.empty()),
        has_time_(fields.time.has_value()),
        has_type_(fields.type.has_value()),
        max_bytes_(max_bytes),
        reader_(std::move(fields)) {}

  std::size_t parse(const nb::list& offsets, const nb::list& timestamps, const nb::list& keys, const nb::list& values,
                    std::size_t start, std::int64_t newest, nb::list& found) {
    for (std::size_t i = start; i < values.size(); ++i) {
      const auto value = bytes_of(item(values, i));
      EventReader::Event event;
      if (value.empty() || value.size() > max_bytes_ || !reader_.read(value, event)) return i;
      nb::object time = has_time_ ? nb::int_(event.time) : nb::borrow(item(timestamps, i));
      if (!has_time_) event.time = integer(time.ptr());
      if (event.time <= 0 || event.time > newest) return i;
      nb::object key = has_key_ ? to_bytes(event.key) : nb::borrow(item(keys, i));
      if (!has_key_ && (!PyBytes_Check(key.ptr()) || bytes_of(key.ptr()).empty() ||
                        bytes_of(key.ptr()).size() > EventReader::kMaxKeyBytes)) {
        return i;
      }
      const nb::handle offset = item(offsets, i);
      const nb::handle record = item(values, i);
      if (has_type_) {
        found.append(nb::make_tuple(key, time, offset, record, nb::str(event.type.data(), event.type.size())));
      } else {
        found.append(nb::make_tuple(key, time, offset, record));
      }
    }
    return values.size();
  }

 private:
  bool has_key_, has_time_, has_type_;
  std::size_t max_bytes_;
  EventReader reader_;
};

enum Status : std::uint8_t { kEarly = 0, kOpen = 1, kDone = 2 };

// How an entry of an impression begins: `_HEADER` in window_join.py.
struct Entry {
  static constexpr std::size_t kSize = 35;

  std::uint8_t status = kOpen;
  std::int64_t due = 0;
  std::uint64_t actions = 0;
  std::int64_t time = 0;
  std::uint16_t partition = 0;
  std::int64_t offset = 0;

  static Entry read(const std::uint8_t* at) {
    Entry entry;
    entry.each([&at](auto& field) {
      std::memcpy(&field, at, sizeof field);
      at += sizeof field;
    });
    return entry;
  }

  nb::bytes followed_by(std::span<const std::uint8_t> value) {
    nb::bytes whole = nb::steal<nb::bytes>(required(PyBytes_FromStringAndSize(nullptr, kSize + value.size())));
    char* at = PyBytes_AsString(whole.ptr());
    each([&at](auto& field) {
      std::memcpy(at, &field, sizeof field);
      at += sizeof field;
    });
    if (!value.empty()) std::memcpy(at, value.data(), value.size());
    return whole;
  }

 private:
  template <typename Visit>
  void each(Visit visit) {
    visit(status), visit(due), visit(actions), visit(time), visit(partition), visit(offset);
  }
};

// What `Windows` has, for one call.
class Table {
 public:
  Table(nb::dict entries, nb::dict due, nb::object changed, std::int64_t bucket_ms, std::int64_t first_open)
      : entries_(std::move(entries)),
        due_(std::move(due)),
        changed_(std::move(changed)),
        bucket_ms_(bucket_ms),
        first_open_(first_open) {
    if (bucket_ms < 1) throw nb::value_error("bucket_ms: expected 1 or more");
  }

  PyObject* find(PyObject* key) const {
    PyObject* const entry = PyDict_GetItemWithError(entries_.ptr(), key);
    if (entry == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    return entry;
  }

  void set(PyObject* key, PyObject* entry) {
    require(PyDict_SetItem(entries_.ptr(), key, entry));
    note(key);
  }

  void schedule(PyObject* key, std::int64_t due) {
    const std::int64_t bucket = std::max(due / bucket_ms_, first_open_);
    if (bucket != bucket_ || !keys_.is_valid()) {
      const nb::int_ number(bucket);
      PyObject* const there = PyDict_GetItemWithError(due_.ptr(), number.ptr());
      if (there == nullptr) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        keys_ = nb::list();
        require(PyDict_SetItem(due_.ptr(), number.ptr(), keys_.ptr()));
      } else {
        keys_ = nb::borrow<nb::list>(there);
      }
      bucket_ = bucket;
    }
    require(PyList_Append(keys_.ptr(), key));
  }

  void remove(PyObject* key) {
    require(PyDict_DelItem(entries_.ptr(), key));
    note(key);
  }

  std::int64_t first_open_ms() const { return first_open_ * bucket_ms_; }

 private:
  void note(PyObject* key) {
    if (!changed_.is_none()) require(PySet_Add(changed_.ptr(), key));
  }

  nb::dict entries_, due_;
  nb::object changed_;
  std::int64_t bucket_ms_, first_open_;
  std::int64_t bucket_ = -1;
  nb::list keys_ = nb::steal<nb::list>(nb::handle());
};

// Stops at an impression that is late, has a key already, or has one that the store may have.
nb::tuple open_windows(Table& table, const nb::object& absent, const nb::list& impressions, std::size_t start,
                       std::uint16_t partition, std::int64_t window_ms, std::int64_t closed) {
  std::int64_t added = 0;
  std::size_t i = start;
  for (; i < impressions.size(); ++i) {
    PyObject* const impression = PyList_GetItem(impressions.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(impression) || PyTuple_Size(impression) != 4) throw nb::type_error("impressions: expected tuples of 4");
    PyObject* const key = PyTuple_GetItem(impression, 0);
    const std::int64_t time = integer(PyTuple_GetItem(impression, 1));
    if (time < closed || table.find(key) != nullptr) break;
    if (!absent.is_none()) {
      const int is_absent = PySet_Contains(absent.ptr(), key);
      require(is_absent);
      if (is_absent == 0) break;
    }
    const auto value = bytes_of(PyTuple_GetItem(impression, 3));
    Entry entry;
    entry.due = time + window_ms;
    entry.time = time;
    entry.partition = partition;
    entry.offset = integer(PyTuple_GetItem(impression, 2));
    table.set(key, entry.followed_by(value).ptr());
    table.schedule(key, entry.due);
    added += static_cast<std::int64_t>(Entry::kSize + value.size() + bytes_of(key).size());
  }
  return nb::make_tuple(i, added);
}

nb::bytes with_columns(std::span<const std::uint8_t> object, std::span<const std::uint8_t> columns) {
  const monolith::ObjectEnd end = monolith::end_of_fields(object);
  const std::size_t comma = end.has_fields;
  nb::bytes whole = nb::steal<nb::bytes>(required(PyBytes_FromStringAndSize(nullptr, end.size + comma + columns.size() + 1)));
  char* at = PyBytes_AsString(whole.ptr());
  std::memcpy(at, object.data(), end.size);
  at += end.size;
  if (end.has_fields) *at++ = ',';
  std::memcpy(at, columns.data(), columns.size());
  at[columns.size()] = '}';
  return whole;
}

// Closes windows whose examples are made in the common way, and forgets keys that are remembered no longer.
class WindowCloser {
 public:
  WindowCloser(nb::type_object example, nb::dict forms, nb::list origins, nb::object keeps, std::int64_t remember_ms,
               bool keeps_values)
      : example_(std::move(example)),
        forms_(std::move(forms)),
        origins_(std::move(origins)),
        keeps_(std::move(keeps)),
        remember_ms_(remember_ms),
        keeps_values_(keeps_values),
        origin_name_(nb::steal<nb::str>(required(PyUnicode_InternFromString("origin")))) {
    if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(example_.ptr()), &PyTuple_Type)) {
      throw nb::type_error("example: expected a named tuple");
    }
  }

  // Stops at a key without an entry in memory, unless it is in `absent`, and where Python has to decide. Returns where, by how
  // many bytes keys and entries have grown, how many were removed, positives emitted, and negatives sampled out.
  nb::tuple close(Table& table, const nb::object& absent, const nb::list& keys, std::size_t start, std::int64_t end,
                  nb::list& examples) {
    std::int64_t grown = 0, removed = 0, sampled_out = 0, positives = 0;
    std::size_t i = start;
    for (; i < keys.size(); ++i) {
      // A reference of its own: the dict may release its key.
      const nb::object key = nb::borrow(PyList_GetItem(keys.ptr(), static_cast<Py_ssize_t>(i)));
      PyObject* const found = table.find(key.ptr());
      if (found == nullptr) {
        if (absent.is_none()) continue;  // removed meanwhile
        const int is_absent = PySet_Contains(absent.ptr(), key.ptr());
        require(is_absent);
        if (is_absent == 0) break;
        continue;
      }
      const nb::object kept = nb::borrow(found);
      const auto bytes = bytes_of(found);
      if (bytes.size() < Entry::kSize || bytes[0] == kEarly) break;
      Entry entry = Entry::read(bytes.data());
      if (entry.due >= end) continue;  // it was moved to a later bucket
      const auto size = static_cast<std::int64_t>(bytes.size());
      if (entry.status == kDone) {
        table.remove(key.ptr());
        grown -= size + static_cast<std::int64_t>(bytes_of(key.ptr()).size());
        ++removed;
        continue;
      }
      const auto value = bytes.subspan(Entry::kSize);
      const Outcome outcome = emit(key, entry, value, examples);
      if (outcome == Outcome::kUnknown) break;
      sampled_out += outcome == Outcome::kSampledOut;
      positives += outcome == Outcome::kPositive;
      entry.status = kDone;
      entry.due = entry.time + remember_ms_;
      if (entry.due >= table.first_open_ms()) {
        const auto rest = keeps_values_ ? value : value.first(0);
        table.set(key.ptr(), entry.followed_by(rest).ptr());
        table.schedule(key.ptr(), entry.due);
        grown += static_cast<std::int64_t>(Entry::kSize + rest.size()) - size;
      } else {
        table.remove(key.ptr());
        grown -= size + static_cast<std::int64_t>(bytes_of(key.ptr()).size());
        ++removed;
      }
    }
    return nb::make_tuple(i, grown, removed, positives, sampled_out);
  }

 private:
  enum class Outcome { kUnknown, kSampledOut, kNegative, kPositive };

  Outcome emit(const nb::object& key, const Entry& entry, std::span<const std::uint8_t> value, nb::list& examples) {
    if (entry.actions != known_ || !form_.is_valid()) {
      PyObject* const form = PyDict_GetItemWithError(forms_.ptr(), nb::int_(entry.actions).ptr());
      if (form == nullptr) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        return Outcome::kUnknown;
      }
      form_ = nb::borrow<nb::tuple>(form);
      if (form_.size() != 3) throw nb::type_error("forms: expected tuples of 3");
      known_ = entry.actions;
    }
    const nb::object suffix = form_[0], header = form_[1];
    const bool is_positive = nb::cast<bool>(form_[2]);
    if (!is_positive && !keeps_.is_none() && !nb::cast<bool>(keeps_(key))) return Outcome::kSampledOut;
    if (entry.partition >= origins_.size()) return Outcome::kUnknown;
    const nb::tuple origin = nb::make_tuple(origin_name_, origin_of(origins_[entry.partition], entry.offset));
    const nb::tuple headers = header.is_none() ? nb::make_tuple(origin) : nb::make_tuple(origin, header);
    const nb::bytes whole = with_columns(value, bytes_of(suffix.ptr()));
    auto* const type = reinterpret_cast<PyTypeObject*>(example_.ptr());
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    const nb::object example = nb::steal(required(allocate(type, 4)));
    const nb::int_ time(entry.time);
    const std::array<PyObject*, 4> items{whole.ptr(), key.ptr(), time.ptr(), headers.ptr()};
    for (std::size_t i = 0; i < items.size(); ++i) {
      require(PyTuple_SetItem(example.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(items[i])));
    }
    examples.append(example);
    return is_positive ? Outcome::kPositive : Outcome::kNegative;
  }

  static nb::bytes origin_of(nb::handle prefix, std::int64_t offset) {
    const auto text = bytes_of(prefix.ptr());
    std::array<char, 24> digits;
    char* end = std::to_chars(digits.data(), digits.data() + 20, offset).ptr;
    *end++ = ':';
    *end++ = '0';
    const auto size = static_cast<std::size_t>(end - digits.data());
    nb::bytes whole = nb::steal<nb::bytes>(required(PyBytes_FromStringAndSize(nullptr, text.size() + size)));
    std::memcpy(PyBytes_AsString(whole.ptr()), text.data(), text.size());
    std::memcpy(PyBytes_AsString(whole.ptr()) + text.size(), digits.data(), size);
    return whole;
  }

  nb::type_object example_;
  nb::dict forms_;
  nb::list origins_;
  nb::object keeps_;
  std::int64_t remember_ms_;
  bool keeps_values_;
  nb::str origin_name_;
  std::uint64_t known_ = 0;
  nb::tuple form_ = nb::steal<nb::tuple>(nb::handle());
};

}  // namespace

void init_join(nb::module_& m) {
  m.attr("MAX_KEY_BYTES") = EventReader::kMaxKeyBytes;
  m.def(
      "with_columns",
      [](const nb::bytes& value, const nb::bytes& columns, std::size_t start) {
        const auto object = bytes_of(value.ptr());
        return with_columns(object.subspan(std::min(start, object.size())), bytes_of(columns.ptr()));
      },
      "value"_a, "columns"_a, "start"_a = 0);
  nb::class_<EventParser>(m, "EventParser")
      .def(
          "__init__",
          [](EventParser* self, std::vector<std::string> key, std::optional<std::string> time, double time_scale,
             std::optional<std::string> type, std::vector<std::string> absent, std::size_t max_bytes) {
            new (self) EventParser({std::move(key), std::move(time), time_scale, std::move(type), std::move(absent)}, max_bytes);
          },
          nb::kw_only(), "key"_a, "time"_a.none(), "time_scale"_a, "type"_a.none(), "absent"_a, "max_bytes"_a)
      .def("parse", &EventParser::parse, "offsets"_a, "timestamps"_a, "keys"_a, "values"_a, "start"_a, "newest"_a, "found"_a);
  nb::class_<Table>(m, "WindowTable")
      .def(nb::init<nb::dict, nb::dict, nb::object, std::int64_t, std::int64_t>(), "entries"_a, "due"_a, "changed"_a.none(),
           "bucket_ms"_a, "first_open"_a);
  m.def("open_windows", &open_windows, "table"_a, "absent"_a.none(), "impressions"_a, "start"_a, "partition"_a, "window_ms"_a,
        "closed"_a);
  nb::class_<WindowCloser>(m, "WindowCloser")
      .def(nb::init<nb::type_object, nb::dict, nb::list, nb::object, std::int64_t, bool>(), nb::kw_only(), "example"_a, "forms"_a,
           "origins"_a, "keeps"_a.none(), "remember_ms"_a, "keeps_values"_a)
      .def("close", &WindowCloser::close, "table"_a, "absent"_a.none(), "keys"_a, "start"_a, "end"_a, "examples"_a);
}
