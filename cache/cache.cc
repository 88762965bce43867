#include "cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "sha256.h"

namespace jaxmagma {
namespace {

constexpr std::string_view kMagic = "jaxmagma 2\n";
constexpr size_t kDigits = 64;  // of a SHA-256
constexpr size_t kHeader = kMagic.size() + kDigits + 1;
constexpr std::string_view kChoice = ".choice";
constexpr std::string_view kDraft = ".tmp";
constexpr uint64_t kDefaultBytes = uint64_t{1} << 30;
// A file's time says when it was last read, to so many seconds: most reads write nothing.
constexpr time_t kReadSeconds = 3600;

std::string Why(int error) {
  return std::generic_category().message(error);
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  explicit operator bool() const { return number_ >= 0; }
  int operator*() const { return number_; }

 private:
  int number_;
};

// ---- The folder ------------------------------------------------------------------------------

// Makes a folder and those that it is in, for this user alone.
bool MakeFolders(const std::string& folder) {
  for (size_t end = folder.find('/', 1);; end = folder.find('/', end + 1)) {
    if (mkdir(folder.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST && errno != EISDIR &&
        access(folder.substr(0, end).c_str(), F_OK) != 0) {
      return false;
    }
    if (end == std::string::npos) return true;
  }
}

// Of all entries but choices; empty if the user asks for something else than a number.
std::optional<uint64_t> MostBytes() {
  const char* text = std::getenv("JAXMAGMA_CACHE_BYTES");
  if (text == nullptr || *text == '\0') return kDefaultBytes;
  char* end = nullptr;
  errno = 0;
  const unsigned long long bytes = std::strtoull(text, &end, 10);
  if (errno != 0 || *end != '\0' || *text < '0' || *text > '9') return std::nullopt;
  return bytes;
}

// The folder, made if asked for. If there is none, `why` says so; `refused`, that there is one.
Descriptor OpenFolder(bool make, std::string& why, bool& refused) {
  refused = false;
  const std::string folder = CacheFolder();
  if (folder.empty()) {
    why = "no folder is named";
    return Descriptor(-1);
  }
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  int number = open(folder.c_str(), kFlags);
  if (number < 0 && errno == ENOENT && make && MakeFolders(folder)) {
    number = open(folder.c_str(), kFlags);
  }
  Descriptor opened(number);
  struct stat status;
  if (!opened || fstat(*opened, &status) != 0) {
    why = Why(errno);
    return Descriptor(-1);
  }
  // Who can write there can have this process run what he likes.
  if (status.st_uid != geteuid()) {
    why = "another user owns it";
  } else if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    why = "other users can write to it";
  } else if (!MostBytes()) {
    why = "JAXMAGMA_CACHE_BYTES is no number of bytes";
  } else {
    return opened;
  }
  refused = true;
  return Descriptor(-1);
}

bool IsEntry(std::string_view name) {
  return name.size() > kDigits && name[kDigits] == '.' &&
         name.find_first_not_of("0123456789abcdef") == kDigits &&
         name.find('/') == std::string_view::npos;
}

bool EndsWith(std::string_view name, std::string_view suffix) {
  return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
}

bool IsChoice(std::string_view name) {
  return IsEntry(name) && name.substr(kDigits) == kChoice;
}

// ---- Its size --------------------------------------------------------------------------------

struct File {
  std::string name;
  uint64_t bytes;
  timespec read;
};

// All entries but choices. Drafts that were left behind are among them, and others are not: their
// writers are about to rename them.
std::vector<File> Files(const Descriptor& folder) {
  std::vector<File> files;
  const int again = openat(*folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const directory = again < 0 ? nullptr : fdopendir(again);
  if (directory == nullptr) {
    if (again >= 0) close(again);
    return files;
  }
  while (const dirent* const entry = readdir(directory)) {
    const std::string_view name = entry->d_name;
    struct stat status;
    if (!IsEntry(name) || IsChoice(name) ||
        fstatat(*folder, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
      continue;
    }
    if (EndsWith(name, kDraft) && time(nullptr) - status.st_mtime < kReadSeconds) continue;
    files.push_back({std::string(name), static_cast<uint64_t>(status.st_size), status.st_mtim});
  }
  closedir(directory);
  return files;
}

// Removes those that were read longest ago, if all together exceed `most`; returns what is left.
uint64_t Sweep(const Descriptor& folder, uint64_t most) {
  std::vector<File> files = Files(folder);
  uint64_t bytes = 0;
  for (const File& file : files) bytes += file.bytes;
  if (bytes <= most) return bytes;
  std::sort(files.begin(), files.end(), [](const File& one, const File& other) {
    return std::pair(one.read.tv_sec, one.read.tv_nsec) <
           std::pair(other.read.tv_sec, other.read.tv_nsec);
  });
  // Somewhat more goes, so that this is not done again at once.
  for (const File& file : files) {
    if (bytes <= most - most / 8) break;
    if (unlinkat(*folder, file.name.c_str(), 0) == 0 || errno == ENOENT) bytes -= file.bytes;
  }
  return bytes;
}

// Keeps the size of the folder bounded as entries are added. What other processes add is seen from
// time to time.
void Grow(const Descriptor& folder, uint64_t bytes, uint64_t most) {
  static std::mutex mutex;
  static std::string path;
  static uint64_t total = 0, added = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string now = CacheFolder();
  total += bytes;
  added += bytes;
  if (path == now && total <= most && added <= most / 16) return;
  total = Sweep(folder, most);
  added = 0;
  path = now;
}

// ---- Entries ---------------------------------------------------------------------------------

std::string DraftName(const std::string& name) {
  char host[65] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  std::string clean(host);
  std::replace(clean.begin(), clean.end(), '/', '-');
  std::random_device random;
  return name + "." + clean + "-" + std::to_string(getpid()) + "-" + std::to_string(random()) +
         std::to_string(random()) + std::string(kDraft);
}

bool WriteAll(const Descriptor& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(*file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

std::optional<std::string> ReadAll(const Descriptor& file) {
  struct stat status;
  if (fstat(*file, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t count = read(*file, bytes.data() + at, bytes.size() - at);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    at += static_cast<size_t>(count);
  }
  if (time(nullptr) - status.st_mtime >= kReadSeconds) futimens(*file, nullptr);
  return bytes;
}

}  // namespace

std::string CacheFolder() {
  if (const char* folder = std::getenv("JAXMAGMA_CACHE_DIR")) {
    return std::string_view(folder) == "off" ? "" : folder;
  }
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && *base != '\0') {
    return std::string(base) + "/jaxmagma";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/jaxmagma";
  }
  return "";
}

std::string CacheRefusal() {
  std::string why;
  bool refused = false;
  OpenFolder(false, why, refused);
  return refused ? why : "";
}

std::optional<std::string> CacheRead(const std::string& name) {
  if (!IsEntry(name)) return std::nullopt;
  std::string why;
  bool refused = false;
  const Descriptor folder = OpenFolder(false, why, refused);
  if (!folder) return std::nullopt;
  const Descriptor file(openat(*folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::optional<std::string> all = ReadAll(file);
  if (!all || all->size() < kHeader || all->compare(0, kMagic.size(), kMagic) != 0) {
    return std::nullopt;
  }
  const std::string checksum = all->substr(kMagic.size(), kDigits);
  all->erase(0, kHeader);
  if (Sha256(*all) != checksum) return std::nullopt;
  return all;
}

std::string CacheWrite(const std::string& name, std::string_view content) {
  if (!IsEntry(name)) return "'" + name + "' names no entry";
  std::string why;
  bool refused = false;
  const Descriptor folder = OpenFolder(true, why, refused);
  if (!folder) return why;
  const uint64_t most = MostBytes().value_or(0), bytes = kHeader + content.size();
  if (!IsChoice(name) && bytes > most) return "it is larger than all may be";

  const std::string draft = DraftName(name);
  {
    const Descriptor file(
        openat(*folder, draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file) return Why(errno);
    const std::string header = std::string(kMagic) + Sha256(content) + '\n';
    if (!WriteAll(file, header) || !WriteAll(file, content)) {
      why = Why(errno);
      unlinkat(*folder, draft.c_str(), 0);
      return why;
    }
  }
  if (renameat(*folder, draft.c_str(), *folder, name.c_str()) != 0) {
    why = Why(errno);
    unlinkat(*folder, draft.c_str(), 0);
    return why;
  }
  if (!IsChoice(name)) Grow(folder, bytes, most);
  return "";
}

}  // namespace jaxmagma
