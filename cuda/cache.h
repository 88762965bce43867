// Compiled kernels on disk: one file each, named by a hash of all that went into it.
//
// Processes share the folder. A file appears whole, by renaming, and carries a checksum: one that
// is damaged counts as missing and is written again. A folder that cannot be written is no error.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace jaxmagma {

// $JAXMAGMA_CACHE_DIR (empty or "off": no cache), else $XDG_CACHE_HOME/jaxmagma, else
// ~/.cache/jaxmagma. Read anew each time, for a process may set it late.
std::string CacheFolder();

std::optional<std::string> CacheRead(const std::string& key);
void CacheWrite(const std::string& key, std::string_view content);
void CacheRemove(const std::string& key);

}  // namespace jaxmagma
