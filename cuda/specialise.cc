#include "specialise.h"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "cache.h"
#include "kDeviceHeaders.h"
#include "sha256.h"

namespace jaxmagma {
namespace {

// The kernels that are being made, each by one thread.
class Underway {
 public:
  template <class F>
  Compiled Get(const std::string& key, const F& make) {
    std::promise<Compiled> promise;
    std::shared_future<Compiled> others;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto [found, first] = kernels_.try_emplace(key);
      if (first) {
        found->second = promise.get_future().share();
      } else {
        others = found->second;
      }
    }
    if (others.valid()) return others.get();
    try {
      Compiled compiled = make();
      promise.set_value(compiled);
      Erase(key);
      return compiled;
    } catch (...) {
      promise.set_exception(std::current_exception());
      Erase(key);
      throw;
    }
  }

 private:
  void Erase(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kernels_.erase(key);
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_future<Compiled>> kernels_;
};

// It outlives threads that still compile when the process ends.
Underway& TheUnderway() {
  static auto* const underway = new Underway;
  return *underway;
}

}  // namespace

std::string CacheKey(std::string_view source, int arch) {
  const std::string version = NvrtcVersion(nullptr);
  if (version.empty()) return "";
  std::string all = "nvrtc " + version + " sm_" + std::to_string(arch) + " c++17\n";
  for (const EmbeddedFile& header : kDeviceHeaders) all.append(header.text);
  return Sha256(all.append(source));
}

Compiled Specialise(std::string_view source, int arch, bool rebuild) {
  const std::string key = CacheKey(source, arch);
  // Without a compiler there is no name, and an error soon.
  if (key.empty()) return Compile(source, arch);
  return TheUnderway().Get(rebuild ? key + " rebuilt" : key, [&]() -> Compiled {
    const std::string entry = key + ".cubin";
    if (!rebuild) {
      if (std::optional<std::string> code = CacheRead(entry)) return {*std::move(code), ""};
    }
    Compiled compiled = Compile(source, arch);
    if (!compiled.code.empty()) CacheWrite(entry, compiled.code);
    return compiled;
  });
}

Resources ReadResources(std::string_view cubin, std::string_view kernel) {
  // Attributes of a .nv.info section: format, name, then two bytes of value or of size.
  constexpr uint8_t kSized = 4, kRegisters = 0x2f, kFrame = 0x11;
  Resources resources;
  auto read = [&](uint64_t at, auto* value) {
    if (at + sizeof(*value) > cubin.size()) return false;
    std::memcpy(value, cubin.data() + at, sizeof(*value));
    return true;
  };
  Elf64_Ehdr file;
  if (!read(0, &file) || std::memcmp(file.e_ident, ELFMAG, SELFMAG) != 0) return resources;
  auto section = [&](uint64_t number, Elf64_Shdr* header) {
    return number < file.e_shnum && read(file.e_shoff + number * file.e_shentsize, header);
  };
  auto text = [&](uint64_t table, uint64_t offset) -> std::string_view {
    Elf64_Shdr strings;
    if (!section(table, &strings) || strings.sh_offset + offset >= cubin.size()) return {};
    const std::string_view rest = cubin.substr(strings.sh_offset + offset);
    return rest.substr(0, rest.find('\0'));
  };
  uint32_t wanted = 0;
  for (uint64_t n = 0; n < file.e_shnum; ++n) {
    Elf64_Shdr header;
    if (!section(n, &header)) return resources;
    if (header.sh_type == SHT_SYMTAB && header.sh_entsize > 0) {
      for (uint64_t at = 0; at < header.sh_size; at += header.sh_entsize) {
        Elf64_Sym symbol;
        if (!read(header.sh_offset + at, &symbol)) return resources;
        const bool function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
        if (function && text(header.sh_link, symbol.st_name) == kernel) {
          wanted = static_cast<uint32_t>(at / header.sh_entsize);
        }
      }
    }
    if (text(file.e_shstrndx, header.sh_name) == ".nv.shared." + std::string(kernel)) {
      resources.shared = static_cast<int>(header.sh_size);
    }
  }
  for (uint64_t n = 0; n < file.e_shnum; ++n) {
    Elf64_Shdr header;
    if (!section(n, &header)) return resources;
    if (text(file.e_shstrndx, header.sh_name) != ".nv.info") continue;
    const uint64_t end = header.sh_offset + header.sh_size;
    for (uint64_t at = header.sh_offset; at + 4 <= end;) {
      uint8_t format = 0, name = 0;
      uint16_t size = 0;
      if (!read(at, &format) || !read(at + 1, &name) || !read(at + 2, &size)) return resources;
      uint32_t symbol = 0, value = 0;
      if (format == kSized && size >= 8 && read(at + 4, &symbol) && read(at + 8, &value) &&
          symbol == wanted) {
        if (name == kRegisters) resources.registers = static_cast<int>(value);
        if (name == kFrame) resources.local = static_cast<int>(value);
      }
      at += 4 + (format == kSized ? size : 0);
    }
  }
  return resources;
}

}  // namespace jaxmagma
