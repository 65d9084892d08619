// A tool for NVTX to load through NVTX_INJECTION64_PATH: keeps what it is told.

#include "nvtx_stub.hpp"

#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#define NVTX_EXT_TYPES_GUARD  // for tools, which have no NVTX of their own
#include <nvtx3/nvtxDetail/nvtxExtTypes.h>
#undef NVTX_EXT_TYPES_GUARD
#include <unistd.h>

#include <cstring>
#include <memory>
#include <mutex>

namespace layerstream::test {
namespace {

struct Domain {
  std::string name;
  std::map<std::uint32_t, std::string> categories;
};
struct SchemaEntry {
  std::string name;
  std::uint64_t type;
  std::size_t offset;
};

/// One per process, as for any tool that is loaded.
struct Seen {
  std::mutex mutex;
  std::vector<std::unique_ptr<Domain>> domains;
  std::vector<std::unique_ptr<std::string>> strings;
  std::map<std::uint64_t, std::vector<SchemaEntry>> schemas;
  std::map<std::uint32_t, std::string> threads;
  std::vector<std::shared_ptr<NvtxRange>> ranges;
  int surplus_pops = 0;
};
Seen& seen() {
  static Seen instance;
  return instance;
}
thread_local std::vector<std::shared_ptr<NvtxRange>> open_ranges;

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  const std::lock_guard lock(seen().mutex);
  seen().domains.push_back(std::make_unique<Domain>(Domain{name, {}}));
  return reinterpret_cast<nvtxDomainHandle_t>(seen().domains.back().get());
}

nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t, const char* text) {
  const std::lock_guard lock(seen().mutex);
  seen().strings.push_back(std::make_unique<std::string>(text));
  return reinterpret_cast<nvtxStringHandle_t>(seen().strings.back().get());
}

void NVTX_API name_category(nvtxDomainHandle_t domain, std::uint32_t category, const char* name) {
  const std::lock_guard lock(seen().mutex);
  reinterpret_cast<Domain*>(domain)->categories[category] = name;
}

void NVTX_API name_thread(std::uint32_t thread, const char* name) {
  const std::lock_guard lock(seen().mutex);
  seen().threads[thread] = name;
}

template <class T>
double value_at(const void* payload, std::size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(payload) + offset, sizeof(value));
  return static_cast<double>(value);
}

std::map<std::string, double> decode(const nvtxEventAttributes_t& attributes) {
  std::map<std::string, double> values;
  if (attributes.payloadType != NVTX_PAYLOAD_TYPE_EXT) return values;
  const auto* const data =
      reinterpret_cast<const nvtxPayloadData_t*>(static_cast<std::uintptr_t>(attributes.payload.ullValue));
  for (const SchemaEntry& entry : seen().schemas[data->schemaId]) {
    switch (entry.type) {
      case NVTX_PAYLOAD_ENTRY_TYPE_INT64:
        values[entry.name] = value_at<std::int64_t>(data->payload, entry.offset);
        break;
      case NVTX_PAYLOAD_ENTRY_TYPE_INT32:
        values[entry.name] = value_at<std::int32_t>(data->payload, entry.offset);
        break;
      case NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE:
        values[entry.name] = value_at<double>(data->payload, entry.offset);
        break;
      default:
        break;
    }
  }
  return values;
}

int NVTX_API push(nvtxDomainHandle_t domain_handle, const nvtxEventAttributes_t* attributes) {
  const std::lock_guard lock(seen().mutex);
  const auto& domain = *reinterpret_cast<const Domain*>(domain_handle);
  auto range = std::make_shared<NvtxRange>();
  range->domain = domain.name;
  range->registered = attributes->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  range->name = range->registered ? *reinterpret_cast<const std::string*>(attributes->message.registered)
                                  : std::string(attributes->message.ascii);
  const auto category = domain.categories.find(attributes->category);
  if (category != domain.categories.end()) range->category = category->second;
  range->thread = seen().threads[static_cast<std::uint32_t>(::gettid())];
  range->payload = decode(*attributes);
  seen().ranges.push_back(range);
  open_ranges.push_back(range);
  return static_cast<int>(open_ranges.size()) - 1;
}

int NVTX_API pop(nvtxDomainHandle_t) {
  const std::lock_guard lock(seen().mutex);
  if (open_ranges.empty()) {
    ++seen().surplus_pops;
    return -1;
  }
  open_ranges.back()->closed = true;
  open_ranges.pop_back();
  return static_cast<int>(open_ranges.size());
}

std::uint64_t NVTX_API register_schema(nvtxDomainHandle_t, const nvtxPayloadSchemaAttr_t* schema) {
  const std::lock_guard lock(seen().mutex);
  const std::uint64_t id = NVTX_PAYLOAD_SCHEMA_ID_DYNAMIC_START + seen().schemas.size();
  for (std::size_t i = 0; i < schema->numEntries; ++i) {
    const nvtxPayloadSchemaEntry_t& entry = schema->entries[i];
    seen().schemas[id].push_back({entry.name, entry.type, entry.offset});
  }
  return id;
}

template <class Function>
void set(NvtxFunctionTable table, int index, Function function) {
  *table[index] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

std::vector<NvtxRange> take_nvtx_ranges() {
  const std::lock_guard lock(seen().mutex);
  std::vector<NvtxRange> ranges;
  for (const auto& range : seen().ranges) ranges.push_back(*range);
  seen().ranges.clear();
  return ranges;
}

int nvtx_surplus_pops() {
  const std::lock_guard lock(seen().mutex);
  return seen().surplus_pops;
}

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable core = nullptr, domains = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &core, &size) == 0 ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &domains, &size) == 0) {
    return 0;
  }
  set(core, NVTX_CBID_CORE_NameOsThreadA, name_thread);
  set(domains, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  set(domains, NVTX_CBID_CORE2_DomainRegisterStringA, register_string);
  set(domains, NVTX_CBID_CORE2_DomainNameCategoryA, name_category);
  set(domains, NVTX_CBID_CORE2_DomainRangePushEx, push);
  set(domains, NVTX_CBID_CORE2_DomainRangePop, pop);
  return 1;
}

// NVTX hides its types, and with them functions that take them.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtxExtension(
    nvtxExtModuleInfo_t* module) {
  if (module->moduleId != NVTX_EXT_PAYLOAD_MODULEID) return 0;
  module->segments->functionSlots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] =
      reinterpret_cast<intptr_t>(register_schema);
  return 1;
}

}  // namespace layerstream::test
