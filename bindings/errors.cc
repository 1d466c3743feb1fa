// Maps the core's errors to the Python exceptions of monolith.errors, looked up once when the extension is loaded.
#include "module.h"
#include "monolith/error.h"

namespace nb = nanobind;

void init_errors(nb::module_& m) {
  static_cast<void>(m);
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        // Imported here, not at load time: monolith.errors must stay importable without the extension.
        auto raise = [](const char* name, const char* message) {
          nb::object type = nb::module_::import_("monolith.errors").attr(name);
          PyErr_SetString(type.ptr(), message);
        };
        try {
          std::rethrow_exception(pointer);
        } catch (const monolith::InvalidArgument& error) {
          raise("InvalidArgumentError", error.what());
        } catch (const monolith::CorruptFile& error) {
          raise("CorruptFileError", error.what());
        } catch (const monolith::IoError& error) {
          raise("StorageError", error.what());
        } catch (const monolith::Error& error) {
          raise("MonolithError", error.what());
        }
      },
      nullptr);
}
