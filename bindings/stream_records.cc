// The records of a batch of a folder stream, tuples of value, key, timestamp and headers, as bytes.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::size_t kHeaderLengths = 6;  // of name and value of a header: 2 and 4 bytes

struct Record {
  PyObject *value, *key, *timestamp, *headers;
};

Record record_of(nb::handle object) {
  PyObject* const tuple = object.ptr();
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) throw nb::type_error("records: expected tuples of 4");
  const Record record{PyTuple_GetItem(tuple, 0), PyTuple_GetItem(tuple, 1), PyTuple_GetItem(tuple, 2), PyTuple_GetItem(tuple, 3)};
  if (!PyBytes_Check(record.value)) throw nb::type_error("value: expected bytes");
  if (record.key != Py_None && !PyBytes_Check(record.key)) throw nb::type_error("key: expected bytes or None");
  if (!PyTuple_Check(record.headers)) throw nb::type_error("headers: expected a tuple of tuples");
  return record;
}

std::string_view text_of(PyObject* bytes) {
  if (!PyBytes_Check(bytes)) throw nb::type_error("expected bytes");
  return {PyBytes_AsString(bytes), static_cast<std::size_t>(PyBytes_Size(bytes))};
}

std::string_view utf8_of(PyObject* name) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<std::size_t>(size)};
}

// Calls `header` with name and value of each.
template <typename Header>
void each_header(PyObject* headers, Header header) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(headers); ++i) {
    PyObject* const pair = PyTuple_GetItem(headers, i);
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) throw nb::type_error("headers: expected pairs of name and value");
    header(utf8_of(PyTuple_GetItem(pair, 0)), text_of(PyTuple_GetItem(pair, 1)));
  }
}

std::size_t header_bytes(PyObject* headers) {
  std::size_t size = 0;
  each_header(headers, [&size](std::string_view name, std::string_view value) {
    if (name.size() > std::numeric_limits<std::uint16_t>::max()) throw nb::value_error("headers: a name is longer than 65,535 bytes");
    size += kHeaderLengths + name.size() + value.size();
  });
  return size;
}

// Writes what it is given, one after the other.
struct Output {
  char* at;

  void text(std::string_view data) {
    if (!data.empty()) std::memcpy(at, data.data(), data.size());
    at += data.size();
  }
  template <typename T>
  void number(std::size_t value) {
    const auto narrow = static_cast<T>(value);
    std::memcpy(at, &narrow, sizeof narrow);
    at += sizeof narrow;
  }
};

nb::object items_of(const nb::object& records) {
  nb::object items = nb::steal(PySequence_Tuple(records.ptr()));
  if (!items.is_valid()) throw nb::python_error();
  return items;
}

// Their references are those of the tuple.
std::vector<PyObject*> list_of(const nb::object& items) {
  std::vector<PyObject*> list(static_cast<std::size_t>(PyTuple_Size(items.ptr())));
  for (std::size_t i = 0; i < list.size(); ++i) list[i] = PyTuple_GetItem(items.ptr(), static_cast<Py_ssize_t>(i));
  return list;
}

nb::tuple encode_records(const nb::object& sequence) {
  const nb::object items = items_of(sequence);
  const auto list = list_of(items);
  std::vector<Record> records;
  std::vector<std::size_t> headers;
  std::size_t values = 0, keys = 0, all_headers = 0;
  std::int64_t oldest = std::numeric_limits<std::int64_t>::max(), newest = std::numeric_limits<std::int64_t>::min();
  std::vector<std::int64_t> timestamps;
  bool has_keys = false;
  records.reserve(list.size());
  for (PyObject* const each : list) {
    const Record& record = records.emplace_back(record_of(each));
    values += text_of(record.value).size();
    if (record.key != Py_None) {
      keys += text_of(record.key).size();
      has_keys = true;
    }
    headers.push_back(header_bytes(record.headers));
    all_headers += headers.back();
    const std::int64_t timestamp = PyLong_AsLongLong(record.timestamp);
    if (timestamp == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    timestamps.push_back(timestamp);
    oldest = std::min(oldest, timestamp);
    newest = std::max(newest, timestamp);
  }
  const std::size_t fixed = records.size() * (12 + 4 * has_keys + 4 * (all_headers > 0));
  const std::size_t size = fixed + values + keys + all_headers;
  nb::bytes body = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!body.is_valid()) throw nb::python_error();
  Output out{PyBytes_AsString(body.ptr())};
  for (const Record& record : records) out.number<std::uint32_t>(text_of(record.value).size());
  for (const std::int64_t timestamp : timestamps) out.number<std::int64_t>(static_cast<std::size_t>(timestamp));
  if (has_keys) {
    for (const Record& record : records) {
      out.number<std::uint32_t>(record.key == Py_None ? std::numeric_limits<std::size_t>::max() : text_of(record.key).size());
    }
  }
  if (all_headers > 0) {
    for (const std::size_t length : headers) out.number<std::uint32_t>(length);
  }
  for (const Record& record : records) out.text(text_of(record.value));
  for (const Record& record : records) {
    if (record.key != Py_None) out.text(text_of(record.key));
  }
  for (const Record& record : records) {
    each_header(record.headers, [&out](std::string_view name, std::string_view value) {
      out.number<std::uint16_t>(name.size());
      out.number<std::uint32_t>(value.size());
      out.text(name);
      out.text(value);
    });
  }
  return nb::make_tuple(body, has_keys, all_headers > 0, oldest, newest, values, keys);
}

// Bytes of each record, without its lengths and its timestamp.
nb::list record_sizes(const nb::object& sequence) {
  const nb::object items = items_of(sequence);
  nb::list sizes;
  for (PyObject* const each : list_of(items)) {
    const Record record = record_of(each);
    sizes.append(text_of(record.value).size() + (record.key == Py_None ? 0 : text_of(record.key).size()) +
                 header_bytes(record.headers));
  }
  return sizes;
}

}  // namespace

void init_stream_records(nb::module_& m) {
  m.def("encode_records", &encode_records, "records"_a,
        "Body of a batch of a folder stream; whether it has keys and headers; oldest and newest timestamp; bytes of values and keys.");
  m.def("record_sizes", &record_sizes, "records"_a, "Bytes of each record: value, key, and headers with their lengths.");
}
