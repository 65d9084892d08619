#include "backends/cuda/cuda_device.hpp"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <array>

#include "backends/cuda/cuda_clock.hpp"
#include "backends/cuda/cuda_event.hpp"
#include "backends/topology/pci_link.hpp"
#include "core/cuda_error.hpp"
#include "core/ledger.hpp"

namespace layerstream {
namespace {

class CudaRegion final : public DeviceRegion {
 public:
  CudaRegion(std::size_t bytes, std::atomic<std::size_t>& used) : bytes_(bytes), used_(used) {
    LAYERSTREAM_CUDA(cudaMalloc(&data_, bytes));
  }
  ~CudaRegion() override {
    cudaFree(data_);
    used_ -= bytes_;
  }
  CudaRegion(const CudaRegion&) = delete;
  CudaRegion& operator=(const CudaRegion&) = delete;

  void* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
  std::atomic<std::size_t>& used_;
};

/// Memory pinned for the link, which knows of it for as long as this object lives.
class LinkedPin final : public HostPin {
 public:
  LinkedPin(CudaLink& link, void* data, std::size_t bytes, const PinnedRange::Options& options)
      : link_(link), range_(data, bytes, calls(), options) {
    link_.add(range_);
  }
  ~LinkedPin() override { link_.remove(range_); }
  LinkedPin(const LinkedPin&) = delete;
  LinkedPin& operator=(const LinkedPin&) = delete;

  std::size_t pinned_bytes() const override { return range_.pinned_bytes(); }
  std::string shortfall() const override { return range_.shortfall(); }

 private:
  static PinCalls calls() {
    return {.pin = [](void* data, std::size_t bytes) -> std::string {
              // Mapped, so that kernels can reach it as well.
              const cudaError_t status =
                  cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
              if (status == cudaSuccess) return {};
              (void)cudaGetLastError();
              return fmt::format("cudaHostRegister of {}: {}", format_bytes(bytes),
                                 cudaGetErrorString(status));
            },
            .unpin = [](void* data) { cudaHostUnregister(data); }};
  }

  CudaLink& link_;
  PinnedRange range_;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  LAYERSTREAM_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

DeviceCapabilities capabilities_of(const cudaDeviceProp& properties) {
  constexpr int device = 0;
  DeviceCapabilities capabilities{
      .shares_host_page_tables = attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device) != 0,
      .pageable_memory_access = attribute(cudaDevAttrPageableMemoryAccess, device) != 0,
      .direct_managed_access_from_host = attribute(cudaDevAttrDirectManagedMemAccessFromHost, device) != 0,
      // A GPU's function is 0.
      .pci_bus_id = fmt::format("{:04x}:{:02x}:{:02x}.0", properties.pciDomainID, properties.pciBusID,
                                properties.pciDeviceID)};
  capabilities.numa_node = read_pci_link(capabilities.pci_bus_id).numa_node;
  const int closest = attribute(cudaDevAttrHostNumaId, device);
  if (closest >= 0) capabilities.host_numa_id = closest;
  return capabilities;
}

/// "138.20 GiB of 139.80 GiB are free", and who may hold the rest.
std::string free_text() {
  std::size_t free = 0, total = 0;
  LAYERSTREAM_CUDA(cudaMemGetInfo(&free, &total));
  return fmt::format("{} of {} are free, another process may hold the rest (nvidia-smi shows it)",
                     format_bytes(free), format_bytes(total));
}

/// What a limit leaves after `used` bytes and context and libraries.
std::size_t beyond_overhead(std::size_t limit, std::size_t used) {
  return limit - std::min(limit, used + gpu_overhead_bytes);
}

void expect_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return;
  (void)cudaGetLastError();
  throw ResourceError(fmt::format(
      "no usable GPU: {}; check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU build",
      status == cudaSuccess ? "CUDA sees no device" : cudaGetErrorString(status)));
}

}  // namespace

CudaDevice::CudaDevice(std::optional<std::size_t> memory_limit) {
  expect_gpu();
  LAYERSTREAM_CUDA(cudaSetDevice(0));
  LAYERSTREAM_CUDA(cudaGetDeviceProperties(&properties_, 0));
  capabilities_ = capabilities_of(properties_);
  // Copies then need no registered memory either.
  link_.emplace(capabilities_.shares_host_page_tables ? PageableCopies::direct : PageableCopies::staged);
  std::size_t free = 0, total = 0;
  LAYERSTREAM_CUDA(cudaMemGetInfo(&free, &total));
  memory_limit_ = std::min(memory_limit.value_or(free), free);
  // Optimizer kernels are short and copies wait for them: they go before the passes' next thread blocks.
  int least = 0, greatest = 0;
  LAYERSTREAM_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  for (const Lane lane : all_lanes) {
    if (lane == Lane::host) continue;
    cudaStream_t& stream = streams_[static_cast<std::size_t>(lane)];
    LAYERSTREAM_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                  lane == Lane::update ? greatest : least));
    nvtxNameCudaStreamA(stream, fmt::format("layerstream {}", name_of(lane)).c_str());  // for profilers
  }
}

CudaDevice::~CudaDevice() {
  for (const cudaStream_t stream : streams_) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

std::string CudaDevice::description() const {
  return fmt::format("{} (sm_{}{}), {} of {}", properties_.name, properties_.major, properties_.minor,
                     format_bytes(memory_limit_), format_bytes(properties_.totalGlobalMem));
}

std::size_t CudaDevice::attainable_memory() const {
  std::size_t free = 0, total = 0;
  LAYERSTREAM_CUDA(cudaMemGetInfo(&free, &total));
  // For plans, which count all of context and libraries: about half of it is loaded by now and not free; the
  // rest comes with the kernels of shapes that are still to be met. What is printed is used_bytes.
  return free + used_ + gpu_overhead_bytes / 2;
}

std::vector<std::pair<std::string, std::int64_t>> CudaDevice::attributes() const {
  static constexpr std::array<std::pair<const char*, cudaDeviceAttr>, 20> asked{{
      {"PageableMemoryAccess", cudaDevAttrPageableMemoryAccess},
      {"PageableMemoryAccessUsesHostPageTables", cudaDevAttrPageableMemoryAccessUsesHostPageTables},
      {"DirectManagedMemAccessFromHost", cudaDevAttrDirectManagedMemAccessFromHost},
      {"ConcurrentManagedAccess", cudaDevAttrConcurrentManagedAccess},
      {"HostNativeAtomicSupported", cudaDevAttrHostNativeAtomicSupported},
      {"HostRegisterSupported", cudaDevAttrHostRegisterSupported},
      {"CanUseHostPointerForRegisteredMem", cudaDevAttrCanUseHostPointerForRegisteredMem},
      {"UnifiedAddressing", cudaDevAttrUnifiedAddressing},
      {"NumaConfig", cudaDevAttrNumaConfig},
      {"NumaId", cudaDevAttrNumaId},
      {"HostNumaId", cudaDevAttrHostNumaId},
      {"Integrated", cudaDevAttrIntegrated},
      {"AsyncEngineCount", cudaDevAttrAsyncEngineCount},
      {"MultiProcessorCount", cudaDevAttrMultiProcessorCount},
      {"L2CacheSize", cudaDevAttrL2CacheSize},
      {"ComputeCapabilityMajor", cudaDevAttrComputeCapabilityMajor},
      {"ComputeCapabilityMinor", cudaDevAttrComputeCapabilityMinor},
      {"ComputeMode", cudaDevAttrComputeMode},
      {"EccEnabled", cudaDevAttrEccEnabled},
      {"MpsEnabled", cudaDevAttrMpsEnabled},
  }};
  std::vector<std::pair<std::string, std::int64_t>> values;
  for (const auto& [name, which] : asked) values.emplace_back(name, attribute(which, 0));
  int runtime = 0, driver = 0;
  LAYERSTREAM_CUDA(cudaRuntimeGetVersion(&runtime));
  LAYERSTREAM_CUDA(cudaDriverGetVersion(&driver));
  values.emplace_back("RuntimeVersion", runtime);
  values.emplace_back("DriverVersion", driver);
  return values;
}

std::unique_ptr<DeviceRegion> CudaDevice::allocate(std::size_t bytes) {
  std::size_t before = used_;
  do {
    if (bytes > beyond_overhead(memory_limit_, before)) {
      // A limit is never more than what was free: raising it helps only as far as there is more.
      const bool can_be_raised = bytes <= beyond_overhead(attainable_memory(), before);
      throw ResourceError(fmt::format(
          "device memory: {} wanted after {} in use and {} for context and libraries, limit {}; {}lower "
          "chunk_tokens, cutoff_len or weight_slots",
          format_bytes(bytes), format_bytes(before), format_bytes(gpu_overhead_bytes),
          format_bytes(memory_limit_), can_be_raised ? "raise device_memory_limit or " : free_text() + "; "));
    }
  } while (!used_.compare_exchange_weak(before, before + bytes));
  try {
    return std::make_unique<CudaRegion>(bytes, used_);
  } catch (const CudaError& error) {
    used_ -= bytes;
    throw ResourceError(fmt::format("{} of device memory wanted: {}; {}; set device_memory_limit to less",
                                    format_bytes(bytes), error.what(), free_text()));
  }
}

std::unique_ptr<HostPin> CudaDevice::pin(void* data, std::size_t bytes, bool required,
                                         const std::function<void(std::size_t, std::size_t)>& progress) {
  return std::make_unique<LinkedPin>(*link_, data, bytes,
                                     PinnedRange::Options{.required = required, .progress = progress});
}

StreamView CudaDevice::stream(Lane lane) {
  if (lane == Lane::host) return StreamView::host();
  return StreamView(static_cast<void*>(streams_[static_cast<std::size_t>(lane)]));
}

std::unique_ptr<Event> CudaDevice::make_event() {
  return std::make_unique<CudaEvent>();
}

std::unique_ptr<DeviceClock> CudaDevice::make_clock() {
  return std::make_unique<CudaClock>(streams_[static_cast<std::size_t>(Lane::compute)]);
}

std::size_t CudaDevice::used_bytes() const {
  std::size_t free = 0, total = 0;
  LAYERSTREAM_CUDA(cudaMemGetInfo(&free, &total));
  return total - free;
}

void CudaDevice::set_profiled(bool profiled) noexcept {
  // Without a profiler these do nothing; a failure is no reason to lose a run.
  (void)(profiled ? cudaProfilerStart() : cudaProfilerStop());
}

bool CudaDevice::is_lost() const {
  const cudaError_t status = cudaStreamQuery(streams_[static_cast<std::size_t>(Lane::compute)]);
  (void)cudaGetLastError();
  return status != cudaSuccess && status != cudaErrorNotReady;
}

void CudaDevice::synchronize() {
  for (const cudaStream_t stream : streams_) {
    if (stream != nullptr) LAYERSTREAM_CUDA(cudaStreamSynchronize(stream));
  }
}

void CudaDevice::poison(void* data, std::size_t bytes, StreamView stream) {
  LAYERSTREAM_CUDA(cudaMemsetAsync(data, 0xff, bytes, static_cast<cudaStream_t>(stream.native())));
}

}  // namespace layerstream
