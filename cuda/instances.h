// A kernel on devices: loaded once for all equal calls of the process, and where launches write to
// its constant memory, once for each of them that is under way.
//
// An instance is a loaded copy of the machine code. Constants are uploaded when it is loaded, and
// nothing changes them after that: a kernel without traced operands has one instance on a device,
// which any number of launches share. A traced operand is copied to the instance's constant memory
// just before a launch, so that launch must have the instance to itself, until the kernel has read
// it. Whoever launches therefore takes an instance out of a pool, and gives it back with the stream
// behind whose work it is free again; where none is free, another one is loaded. A launch that is
// recorded in a CUDA graph may be repeated as long as the graph lives: the graph owns its instance,
// and gives it back when it is destroyed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "driver.h"

namespace jaxmagma {

// A copy of a kernel on one device.
struct Instance {
  CUlibrary library = nullptr;
  CUfunction kernel = nullptr;
  CUfunction finish = nullptr;
  CUdeviceptr bank = 0;
  int64_t most_blocks = 0;  // that the device has room for at a time
  // Of the last launch, if it is not known to be over: what it was behind, and when it ends.
  unsigned long long stream = 0;
  CUevent launched = nullptr;
  bool used = false;
};

class Instances : public std::enable_shared_from_this<Instances> {
 public:
  // Those of all calls in this process with equal code and constants.
  static std::shared_ptr<Instances> Of(const Call& call);

  explicit Instances(const Call& call);
  ~Instances();
  Instances(const Instances&) = delete;
  Instances& operator=(const Instances&) = delete;

  // Compiles for the device in use, or number `ordinal`, if there is one. Returns what is wrong.
  std::string Compile(int ordinal);

  // Has an instance ready on the device in use, so that none must be loaded while a graph is
  // recorded. Returns what is wrong.
  std::string Load(int ordinal);

  // One launch's use of an instance, from before its first copy until after its last kernel.
  class Lease {
   public:
    Lease() = default;
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const Driver& driver() const { return *driver_; }
    const Instance& instance() const { return *instance_; }

   private:
    friend class Instances;
    const Driver* driver_ = nullptr;
    Instance* instance_ = nullptr;
    std::shared_ptr<Instances> owner_;  // none if the instance is shared, or a graph's
    int device_ = 0;
    CUstream stream_ = nullptr;
  };

  // Returns what is wrong.
  std::string Borrow(int ordinal, CUstream stream, Lease& lease);

 private:
  struct Device {
    std::atomic<Instance*> shared{nullptr};  // set once, where launches share it
    std::vector<std::unique_ptr<Instance>> all;
    std::vector<Instance*> free;  // not taken out
    // Those of graphs that are no more. The driver says so on a thread of its own, which must not
    // wait for one that is calling the driver: so these have a mutex that is held for no call.
    std::mutex returning;
    std::vector<Instance*> returned;
  };
  static constexpr int kMostDevices = 64;

  std::string Find(int ordinal, const Driver** driver, CUdevice* device) const;
  std::string LoadOn(const Driver& driver, CUdevice device);
  static void Collect(Device& device);
  std::string CodeFor(int arch, bool rebuild, const std::string** code);
  std::string LoadOne(const Driver& driver, CUdevice device, Instance** loaded);
  std::string LoadCode(const Driver& driver, CUdevice device, const std::string& code,
                       Instance& instance) const;
  std::string Take(const Driver& driver, CUdevice device, CUstream stream, bool captured,
                   Instance** taken);
  void GiveBack(Instance* instance, int device);
  void End(const Lease& lease);

  const std::string source_;
  const std::string bank_;
  const std::string table_;
  const int threads_;
  const int shared_bytes_;
  const bool exclusive_;  // launches write to the bank
  const bool finishes_;   // a second kernel adds up what blocks have
  const bool counts_;     // how many blocks a device has room for matters

  std::mutex mutex_;
  std::map<int, std::string> code_;  // by compute capability
  std::array<Device, kMostDevices> devices_;
};

}  // namespace jaxmagma
