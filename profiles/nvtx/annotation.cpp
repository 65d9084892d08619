#include "profiles/nvtx/annotation.hpp"

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <string>
#include <thread>

namespace layerstream {
namespace {

constexpr std::size_t num_kinds = static_cast<std::size_t>(OperationKind::verdict) + 1;

/// What is attached to each range.
struct Payload {
  std::int64_t step;
  std::int64_t bytes;
  double flops;
  std::int32_t block;
  std::int32_t chunk;
  std::int32_t piece;
};

/// Registers the layout of Payload; 0 if the tool knows no payload schemas.
std::uint64_t register_payload(nvtxDomainHandle_t domain) {
  const auto entry = [](std::uint64_t type, const char* name, std::size_t offset) {
    nvtxPayloadSchemaEntry_t result{};
    result.type = type;
    result.name = name;
    result.offset = offset;
    return result;
  };
  const std::array entries{
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT64, "step", offsetof(Payload, step)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT64, "bytes", offsetof(Payload, bytes)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE, "flops", offsetof(Payload, flops)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "block", offsetof(Payload, block)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "chunk", offsetof(Payload, chunk)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "piece", offsetof(Payload, piece)),
  };
  nvtxPayloadSchemaAttr_t schema{};
  schema.fieldMask = NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE |
                     NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES |
                     NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_STATIC_SIZE;
  schema.name = "operation";
  schema.type = NVTX_PAYLOAD_SCHEMA_TYPE_STATIC;
  schema.entries = entries.data();
  schema.numEntries = entries.size();
  schema.payloadStaticSize = sizeof(Payload);
  return nvtxPayloadSchemaRegister(domain, &schema);
}

class Annotation final : public ExecutionObserver, private ops::KernelListener {
 public:
  Annotation(nvtxDomainHandle_t domain, ops::KernelLabels* kernels)
      : domain_(domain), kernels_(kernels), payload_schema_(register_payload(domain)) {
    for (std::size_t kind = 0; kind < num_kinds; ++kind) {
      names_[kind] =
          nvtxDomainRegisterStringA(domain_, std::string(name_of(static_cast<OperationKind>(kind))).c_str());
    }
    for (const Lane lane : all_lanes) {
      nvtxDomainNameCategoryA(domain_, category(lane), std::string(name_of(lane)).c_str());
    }
  }
  ~Annotation() override { nvtxDomainDestroy(domain_); }
  Annotation(const Annotation&) = delete;
  Annotation& operator=(const Annotation&) = delete;

  void begin(const Schedule& schedule) override {
    step_ = schedule.step;
    if (kernels_ != nullptr) kernels_->tell(this);
  }
  void end() noexcept override {
    if (kernels_ != nullptr) kernels_->tell(nullptr);
  }

  void before(int, const Operation& operation) override {
    LaneState& lane = lanes_[static_cast<std::size_t>(operation.lane)];
    if (lane.thread != std::this_thread::get_id()) {
      lane.thread = std::this_thread::get_id();
      nvtxNameOsThreadA(static_cast<std::uint32_t>(::gettid()),
                        fmt::format("layerstream {}", name_of(operation.lane)).c_str());
    }
    const Payload payload{.step = step_,
                          .bytes = operation.bytes,
                          .flops = operation.flops,
                          .block = operation.block,
                          .chunk = operation.chunk,
                          .piece = operation.piece};
    const nvtxPayloadData_t data{.schemaId = payload_schema_, .size = sizeof(payload), .payload = &payload};
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.category = category(operation.lane);
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = names_[static_cast<std::size_t>(operation.kind)];
    if (payload_schema_ != 0) {
      attributes.payloadType = NVTX_PAYLOAD_TYPE_EXT;
      attributes.reserved0 = 1;  // payloads
      attributes.payload.ullValue = NVTX_POINTER_AS_PAYLOAD_ULLVALUE(&data);
    } else {
      attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
      attributes.payload.llValue = operation.bytes;
    }
    nvtxDomainRangePushEx(domain_, &attributes);
    lane.open = true;
  }

  void after(int, const Operation& operation) override { pop(operation); }
  void failed(int, const Operation& operation) noexcept override { pop(operation); }

 private:
  /// Touched by the lane's thread alone.
  struct LaneState {
    std::thread::id thread;  ///< named after the lane
    bool open = false;
  };

  /// 0 is no category.
  static std::uint32_t category(Lane lane) { return static_cast<std::uint32_t>(lane) + 1; }

  void begin_kernel(const char* label) override {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = label;
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  void end_kernel() override { nvtxDomainRangePop(domain_); }

  void pop(const Operation& operation) noexcept {
    LaneState& lane = lanes_[static_cast<std::size_t>(operation.lane)];
    if (lane.open) nvtxDomainRangePop(domain_);
    lane.open = false;
  }

  nvtxDomainHandle_t domain_;
  ops::KernelLabels* kernels_;
  std::uint64_t payload_schema_;
  std::array<nvtxStringHandle_t, num_kinds> names_{};
  std::array<LaneState, all_lanes.size()> lanes_;
  std::int64_t step_ = 0;
};

}  // namespace

std::unique_ptr<ExecutionObserver> make_annotation(ops::KernelLabels* kernels) {
  // No tool, no domain: NVTX's calls do nothing then.
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("layerstream");
  if (domain == nullptr) return nullptr;
  return std::make_unique<Annotation>(domain, kernels);
}

}  // namespace layerstream
