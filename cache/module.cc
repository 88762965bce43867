// The Python module of the cache on disk, which needs no backend.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "cache.h"

namespace nb = nanobind;

namespace jaxmagma {
namespace {

NB_MODULE(_cache, m) {
  m.def("folder", &CacheFolder, "Where entries are kept; empty for nowhere.");
  m.def("refusal", &CacheRefusal, "Why the folder is there and is not used, if it is so.");
  m.def(
      "read",
      [](const std::string& name) -> std::optional<nb::bytes> {
        std::optional<std::string> content;
        {
          nb::gil_scoped_release release;
          content = CacheRead(name);
        }
        if (!content) return std::nullopt;
        return nb::bytes(content->data(), content->size());
      },
      nb::arg("name"), "The content of an entry; None if there is none.");
  m.def(
      "write",
      [](const std::string& name, const nb::bytes& content) {
        nb::gil_scoped_release release;
        return CacheWrite(name, {content.c_str(), content.size()});
      },
      nb::arg("name"), nb::arg("content"), "Keeps an entry; why not, if it is so.");
}

}  // namespace
}  // namespace jaxmagma
