#include "io/tensorboard_events.hpp"

#include <bit>
#include <concepts>

#include "io/crc32c.hpp"

namespace layerstream::io {
namespace {

template <std::unsigned_integral Number>
std::string little_endian(Number number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(Number); ++i) bytes += static_cast<char>(number >> (8 * i) & 0xffU);
  return bytes;
}

std::uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8U;
}

/// Fields of a message in Protocol Buffers' wire format.
class Message {
 public:
  Message& add(int field, double value) {
    key(field, 1);
    bytes_ += little_endian(std::bit_cast<std::uint64_t>(value));
    return *this;
  }
  Message& add(int field, float value) {
    key(field, 5);
    bytes_ += little_endian(std::bit_cast<std::uint32_t>(value));
    return *this;
  }
  Message& add(int field, std::int64_t value) {
    key(field, 0);
    varint(static_cast<std::uint64_t>(value));
    return *this;
  }
  Message& add(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  Message& add(int field, const Message& value) { return add(field, std::string_view(value.bytes_)); }

  std::string take() { return std::move(bytes_); }

 private:
  void key(int field, int wire_type) { varint(static_cast<std::uint64_t>(field << 3 | wire_type)); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7U) bytes_ += static_cast<char>(value | 0x80U);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// Field numbers of the messages.
constexpr int event_wall_time = 1, event_step = 2, event_file_version = 3, event_summary = 5,
              event_session_log = 7;
constexpr int session_log_status = 1;
constexpr std::int64_t status_start = 1;
constexpr int summary_value = 1, value_tag = 1, value_simple_value = 2;

}  // namespace

std::string version_event(double wall_time) {
  return Message()
      .add(event_wall_time, wall_time)
      .add(event_file_version, std::string_view("brain.Event:2"))
      .take();
}

std::string restart_event(double wall_time, std::int64_t step) {
  return Message()
      .add(event_wall_time, wall_time)
      .add(event_step, step)
      .add(event_session_log, Message().add(session_log_status, status_start))
      .take();
}

std::string scalar_event(double wall_time, std::int64_t step, const std::vector<Scalar>& scalars) {
  Message summary;
  for (const auto& [tag, value] : scalars) {
    summary.add(summary_value,
                Message().add(value_tag, std::string_view(tag)).add(value_simple_value, value));
  }
  return Message().add(event_wall_time, wall_time).add(event_step, step).add(event_summary, summary).take();
}

std::string tf_record(std::string_view event) {
  const std::string length = little_endian(std::uint64_t{event.size()});
  return length + little_endian(masked_crc(length)) + std::string(event) + little_endian(masked_crc(event));
}

}  // namespace layerstream::io
