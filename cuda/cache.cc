#include "cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "sha256.h"

namespace jaxmagma {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "jaxmagma kernel 1\n";

fs::path FileOf(const std::string& key) {
  const std::string folder = CacheFolder();
  return folder.empty() ? fs::path() : fs::path(folder) / (key + ".cubin");
}

}  // namespace

std::string CacheFolder() {
  if (const char* folder = std::getenv("JAXMAGMA_CACHE_DIR")) {
    return std::string_view(folder) == "off" ? "" : folder;
  }
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && *base != '\0') {
    return (fs::path(base) / "jaxmagma").string();
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return (fs::path(home) / ".cache" / "jaxmagma").string();
  }
  return "";
}

std::optional<std::string> CacheRead(const std::string& key) {
  const fs::path file = FileOf(key);
  if (file.empty()) return std::nullopt;
  std::ifstream in(file, std::ios::binary);
  if (!in) return std::nullopt;
  const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t header = kMagic.size() + 65;
  if (!in || all.size() < header || all.compare(0, kMagic.size(), kMagic) != 0) {
    return std::nullopt;
  }
  std::string content = all.substr(header);
  if (all.compare(kMagic.size(), 64, Sha256(content)) != 0) return std::nullopt;
  return content;
}

void CacheWrite(const std::string& key, std::string_view content) {
  const fs::path file = FileOf(key);
  if (file.empty()) return;
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  if (error) return;
  // A name of its own for every writer, so that none renames another's half-written file.
  static std::atomic<unsigned> count{0};
  const fs::path draft =
      file.string() + "." + std::to_string(getpid()) + "-" + std::to_string(count++) + ".tmp";
  {
    std::ofstream out(draft, std::ios::binary | std::ios::trunc);
    out << kMagic << Sha256(content) << '\n' << content;
    out.flush();
    if (!out) {
      out.close();
      fs::remove(draft, error);
      return;
    }
  }
  fs::rename(draft, file, error);
  if (error) fs::remove(draft, error);
}

void CacheRemove(const std::string& key) {
  const fs::path file = FileOf(key);
  std::error_code error;
  if (!file.empty()) fs::remove(file, error);
}

}  // namespace jaxmagma
