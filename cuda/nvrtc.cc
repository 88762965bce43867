#include "nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <system_error>
#include <type_traits>
#include <vector>

#include "kDeviceHeaders.h"

namespace jaxmagma {
namespace {

namespace fs = std::filesystem;

// The part of nvrtc.h that is used; toolkits do not always bring that file.
using Program = struct _nvrtcProgram*;
struct Nvrtc {
  int (*version)(int* major, int* minor);
  const char* (*error_string)(int);
  int (*arch_count)(int*);
  int (*archs)(int*);
  int (*create)(Program*, const char* source, const char* name, int headers,
                const char* const* text, const char* const* names);
  int (*destroy)(Program*);
  int (*compile)(Program, int options, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, size_t*);
  int (*ptx)(Program, char*);
};

struct Loaded {
  Nvrtc nvrtc = {};
  std::string error;
  std::string version;
  std::vector<int> archs;
};

fs::path FolderOf(const void* symbol) {
  Dl_info info;
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::path(info.dli_fname).parent_path();
}

void* Open() {
  const char* const names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
  // JAX may have loaded one.
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  // The packages that come with JAX are neighbours of this one.
  const fs::path site = FolderOf(reinterpret_cast<const void*>(&NvrtcVersion)).parent_path();
  const char* const places[] = {"nvidia/cu13/lib/libnvrtc.so.13",
                                "nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
                                "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"};
  for (const char* place : places) {
    if (void* library = dlopen((site / place).c_str(), RTLD_NOW)) return library;
  }
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  }
  return nullptr;
}

Loaded Load() {
  Loaded loaded;
  void* library = Open();
  if (library == nullptr) {
    loaded.error =
        "NVRTC was not found: install the package nvidia-cuda-nvrtc, or a CUDA toolkit on the "
        "loader's path";
    return loaded;
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) loaded.error = std::string("NVRTC is too old: it has no ") + name;
  };
  Nvrtc& nvrtc = loaded.nvrtc;
  find(nvrtc.version, "nvrtcVersion");
  find(nvrtc.error_string, "nvrtcGetErrorString");
  find(nvrtc.arch_count, "nvrtcGetNumSupportedArchs");
  find(nvrtc.archs, "nvrtcGetSupportedArchs");
  find(nvrtc.create, "nvrtcCreateProgram");
  find(nvrtc.destroy, "nvrtcDestroyProgram");
  find(nvrtc.compile, "nvrtcCompileProgram");
  find(nvrtc.log_size, "nvrtcGetProgramLogSize");
  find(nvrtc.log, "nvrtcGetProgramLog");
  find(nvrtc.cubin_size, "nvrtcGetCUBINSize");
  find(nvrtc.cubin, "nvrtcGetCUBIN");
  find(nvrtc.ptx_size, "nvrtcGetPTXSize");
  find(nvrtc.ptx, "nvrtcGetPTX");
  if (!loaded.error.empty()) return loaded;

  // libnvrtc does not look in its own folder for the library of builtins: have it there already.
  std::error_code error;
  for (const auto& entry :
       fs::directory_iterator(FolderOf(reinterpret_cast<const void*>(nvrtc.version)), error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("libnvrtc-builtins.so", 0) == 0) {
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
  }
  int major = 0, minor = 0, count = 0;
  nvrtc.version(&major, &minor);
  loaded.version = std::to_string(major) + "." + std::to_string(minor);
  nvrtc.arch_count(&count);
  loaded.archs.resize(count);
  if (count > 0) nvrtc.archs(loaded.archs.data());
  std::sort(loaded.archs.begin(), loaded.archs.end());
  return loaded;
}

const Loaded& GetNvrtc() {
  static const Loaded* const loaded = new Loaded(Load());
  return *loaded;
}

std::string Text(int (*size)(Program, size_t*), int (*get)(Program, char*), Program program) {
  size_t bytes = 0;
  if (size(program, &bytes) != 0 || bytes == 0) return "";
  std::string text(bytes, '\0');
  return get(program, text.data()) == 0 ? text : "";
}

}  // namespace

std::string NvrtcVersion(std::string* why) {
  const Loaded& loaded = GetNvrtc();
  if (!loaded.error.empty() && why != nullptr) *why = loaded.error;
  return loaded.error.empty() ? loaded.version : "";
}

Compiled Compile(std::string_view source, int arch) {
  const Loaded& loaded = GetNvrtc();
  if (!loaded.error.empty()) return {"", loaded.error};
  const Nvrtc& nvrtc = loaded.nvrtc;

  // Machine code runs on later GPUs of the same generation, but that of a Tegra on no other; for a
  // later generation the driver needs PTX.
  constexpr int kTegra[] = {72, 87, 101, 110};
  int best = 0;
  for (int known : loaded.archs) {
    const bool tegra = std::find(std::begin(kTegra), std::end(kTegra), known) != std::end(kTegra);
    if (known <= arch && (!tegra || known == arch)) best = known;
  }
  if (best == 0) return {"", "NVRTC " + loaded.version + " knows no GPU as old as this"};
  const bool ptx = best / 10 != arch / 10;
  const std::string target =
      std::string("--gpu-architecture=") + (ptx ? "compute_" : "sm_") + std::to_string(best);
  const char* const options[] = {target.c_str(), "--std=c++17"};

  std::vector<const char*> texts, names;
  for (const EmbeddedFile& header : kDeviceHeaders) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  Program program = nullptr;
  int status = nvrtc.create(&program, std::string(source).c_str(), "kernel.cu",
                            static_cast<int>(names.size()), texts.data(), names.data());
  if (status != 0) return {"", nvrtc.error_string(status)};
  status = nvrtc.compile(program, static_cast<int>(std::size(options)), options);
  Compiled compiled;
  compiled.log = Text(nvrtc.log_size, nvrtc.log, program);
  while (!compiled.log.empty() && compiled.log.back() == '\0') compiled.log.pop_back();
  if (status == 0) {
    compiled.code = ptx ? Text(nvrtc.ptx_size, nvrtc.ptx, program)
                        : Text(nvrtc.cubin_size, nvrtc.cubin, program);
  } else {
    compiled.log = std::string(nvrtc.error_string(status)) + "\n" + compiled.log;
  }
  nvrtc.destroy(&program);
  return compiled;
}

}  // namespace jaxmagma
