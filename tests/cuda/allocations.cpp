// Records the addresses of PyTorch's CPU tensors, so that an emulator can check which memory a
// kernel may access.
#undef TORCH_TARGET_VERSION  // no stable ABI: valid for this version of PyTorch only
#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

namespace {

std::mutex guard;
std::map<uintptr_t, size_t> live;

void forget(void* data) {
  {
    const std::lock_guard<std::mutex> lock(guard);
    live.erase(reinterpret_cast<uintptr_t>(data));
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(data);
}

struct Remembering final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::GetDefaultCPUAllocator()->raw_allocate(size);
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(guard);
      live[reinterpret_cast<uintptr_t>(data)] = size;
    }
    return {data, data, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} remembering;

}  // namespace

#define TF_EXPORT extern "C" __attribute__((visibility("default")))

TF_EXPORT void simt_remember_allocations(bool on) {
  c10::SetCPUAllocator(on ? &remembering : c10::GetDefaultCPUAllocator());
}

// Returns the size in bytes of the tensor that contains `address`, and its start in `begin`; 0 if
// none.
TF_EXPORT size_t simt_allocation(uintptr_t address, uintptr_t* begin) {
  const std::lock_guard<std::mutex> lock(guard);
  auto found = live.upper_bound(address);
  if (found == live.begin()) return 0;
  --found;
  *begin = found->first;
  return address < found->first + found->second ? found->second : 0;
}
