#include <yaml-cpp/yaml.h>

#include "core/config_value.hpp"
#include "core/error.hpp"

namespace layerstream {
namespace {

/// Bounds on one document: far above any configuration, far below what would exhaust memory or stack.
constexpr int max_depth = 32;
constexpr int max_nodes = 100'000;

class Converter {
 public:
  explicit Converter(std::string_view source_name) : source_name_(source_name) {}

  ConfigValue convert(const YAML::Node& node, int depth) {
    if (depth > max_depth || ++nodes_ > max_nodes) {
      throw ConfigError(
          fmt::format("{}: nested more than {} deep or more than {} values; does an alias contain itself?",
                      place(node), max_depth, max_nodes));
    }
    ConfigValue value;
    switch (node.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        value.kind = ConfigValue::Kind::scalar;
        value.text = node.Scalar();
        break;
      case YAML::NodeType::Sequence:
        value.kind = ConfigValue::Kind::list;
        for (const YAML::Node& item : node) value.items.push_back(convert(item, depth + 1));
        break;
      case YAML::NodeType::Map:
        value.kind = ConfigValue::Kind::map;
        for (const auto& pair : node) {
          if (!pair.first.IsScalar()) {
            throw ConfigError(fmt::format("{}: a key must be a plain word", place(pair.first)));
          }
          value.entries.push_back(
              {pair.first.Scalar(), convert(pair.second, depth + 1), pair.first.Mark().line + 1});
        }
        break;
    }
    return value;
  }

 private:
  std::string place(const YAML::Node& node) const {
    return fmt::format("{}:{}", source_name_, node.Mark().line + 1);
  }

  std::string_view source_name_;
  int nodes_ = 0;
};

}  // namespace

ConfigValue parse_yaml(std::string_view yaml, std::string_view source_name) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(yaml));
    if (documents.empty()) return {};
    if (documents.size() > 1) {
      throw ConfigError(fmt::format("{}:{}: a second YAML document begins; keep one document", source_name,
                                    documents[1].Mark().line + 1));
    }
    return Converter(source_name).convert(documents[0], 0);
  } catch (const YAML::Exception& error) {
    throw ConfigError(fmt::format("{}:{}: not valid YAML: {}", source_name, error.mark.line + 1, error.msg));
  }
}

}  // namespace layerstream
