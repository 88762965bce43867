// The Python module that hands the custom calls to JAX. It can be imported where there is no GPU.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "ffi.h"
#include "specialise.h"

namespace nb = nanobind;

namespace jaxmagma {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// 90 for "sm_90".
int Capability(const std::string& arch) {
  if (arch.rfind("sm_", 0) != 0 || arch.size() < 5 ||
      arch.find_first_not_of("0123456789", 3) != std::string::npos) {
    throw std::invalid_argument("arch is '" + arch + "'; it must be like 'sm_90'");
  }
  return std::stoi(arch.substr(3));
}

// Runs `compile` without the interpreter lock, and returns the machine code.
template <class F>
nb::bytes Code(const F& compile) {
  Compiled compiled;
  {
    nb::gil_scoped_release release;
    compiled = compile();
  }
  if (compiled.code.empty()) throw std::runtime_error(compiled.log);
  return nb::bytes(compiled.code.data(), compiled.code.size());
}

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict specialised;
    specialised["instantiate"] = Capsule(Instantiate);
    specialised["initialize"] = Capsule(Initialize);
    specialised["execute"] = Capsule(Execute);
    nb::dict bgemm;
    bgemm["initialize"] = Capsule(InitializeBgemm);
    bgemm["execute"] = Capsule(ExecuteBgemm);
    nb::dict targets;
    targets["jaxmagma_cuda"] = specialised;
    targets["jaxmagma_cuda_bgemm"] = bgemm;
    return targets;
  });
  m.def(
      "nvrtc_version",
      [] {
        std::string why;
        const std::string version = NvrtcVersion(&why);
        if (version.empty()) throw std::runtime_error(why);
        return version;
      },
      "The version of the run-time compiler; RuntimeError says why there is none.");
  m.def(
      "compile",
      [](const std::string& source, const std::string& arch) {
        const int capability = Capability(arch);
        return Code([&] { return Compile(source, capability); });
      },
      nb::arg("source"), nb::arg("arch"),
      "Machine code of a kernel for an architecture like 'sm_90'; needs no GPU.");
  m.def(
      "specialise",
      [](const std::string& source, const std::string& arch) {
        const int capability = Capability(arch);
        return Code([&] { return Specialise(source, capability); });
      },
      nb::arg("source"), nb::arg("arch"), "What `compile` returns, from the cache on disk.");
  m.def(
      "cache_key",
      [](const std::string& source, const std::string& arch) {
        return CacheKey(source, Capability(arch));
      },
      nb::arg("source"), nb::arg("arch"));
  m.def(
      "resources",
      [](const nb::bytes& cubin, const std::string& kernel) {
        const Resources found = ReadResources({cubin.c_str(), cubin.size()}, kernel);
        nb::dict resources;
        resources["registers"] = found.registers;
        resources["shared"] = found.shared;
        resources["local"] = found.local;
        return resources;
      },
      nb::arg("cubin"), nb::arg("kernel") = "kernel",
      "Registers and spilled bytes of a thread, and static shared memory of a block.");
}

}  // namespace
}  // namespace jaxmagma
