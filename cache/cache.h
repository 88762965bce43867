// What is kept on disk for processes to come: kernels as source and as machine code, and choices.
//
// One file is one entry, named by 64 hexadecimal digits and a kind, "<digits>.cubin": a hash of all
// that the content was made of. It is the line kMagic, the content's SHA-256 in a line, the
// content. One that is damaged, or of another format, counts as missing.
//
// The folder is this user's alone, or is not used. Processes of several hosts may share it: a file
// appears whole, by renaming, and none is ever changed. Those that nobody has read for longest go
// when all together exceed a bound; but no choices, which no computer can make again soon.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace jaxmagma {

// $JAXMAGMA_CACHE_DIR (empty or "off": no cache), else $XDG_CACHE_HOME/jaxmagma, else
// ~/.cache/jaxmagma. Read anew each time, for a process may set it late.
std::string CacheFolder();

// Why the folder is there and is not used; empty if there is no such reason.
std::string CacheRefusal();

std::optional<std::string> CacheRead(const std::string& name);

// Keeps an entry; returns why not, if it is so, which is no error.
std::string CacheWrite(const std::string& name, std::string_view content);

}  // namespace jaxmagma
