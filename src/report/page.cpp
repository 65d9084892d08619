#include "report/page.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>

#include "core/error.hpp"
#include "report/figures.hpp"
#include "report/page_texts.hpp"

namespace layerstream::report {
namespace {

using Json = nlohmann::ordered_json;

Json rounded(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) {
    if (!std::isfinite(value)) {
      list.push_back(nullptr);
    } else if (value == std::trunc(value) && std::abs(value) < 0x1p53) {
      list.push_back(static_cast<std::int64_t>(value));
    } else {
      list.push_back(std::strtod(fmt::format("{:.7g}", value).c_str(), nullptr));
    }
  }
  return list;
}

Json series_json(const Series& series) {
  Json json{{"step", series.steps}};
  for (const auto& [name, values] : series.columns) json[name] = rounded(values);
  return json;
}

Json run_json(const RunDirectory& run, const std::string& name) {
  return {{"name", name},
          {"path", std::filesystem::absolute(run.path).lexically_normal().string()},
          {"training", series_json(run.training)},
          {"evaluation", series_json(run.evaluation)},
          {"record", run.record}};
}

Json rows_json(const std::vector<Difference>& rows) {
  Json json = Json::array();
  for (const Difference& row : rows) json.push_back({{"name", row.name}, {"values", row.values}});
  return json;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

/// JSON in which no tag or comment of HTML can begin or end.
std::string for_script(const Json& data) {
  const std::string text = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return replaced(text, "<", "\\u003c");
}

std::string for_html(const std::string& text) {
  return replaced(replaced(text, "&", "&amp;"), "<", "&lt;");
}

/// The template's text with each @name@ replaced, once over: what is put in is left alone.
std::string filled(std::string_view page,
                   const std::vector<std::pair<std::string_view, std::string>>& parts) {
  std::string text;
  for (const auto& [name, part] : parts) {
    const std::size_t at = page.find(name);
    LAYERSTREAM_EXPECT(at != std::string_view::npos, "page.html lacks {}, or has it out of order", name);
    text += page.substr(0, at);
    text += part;
    page.remove_prefix(at + name.size());
  }
  return text.append(page);
}

}  // namespace

Json report_data(const RunDirectory& run) {
  const std::string name = compare({&run, 1}).names.front();
  Json figures = Json::array();
  for (const auto& [figure, value] : figures_of(run)) figures.push_back(Json::array({figure, value}));
  Json one = run_json(run, name);
  one["timeline"] = run.timeline;
  return {{"title", name},
          {"figures", std::move(figures)},
          {"comparison", nullptr},
          {"runs", Json::array({std::move(one)})}};
}

Json compare_data(std::span<const RunDirectory> runs, const Comparison& comparison) {
  Json all = Json::array();
  for (std::size_t i = 0; i < runs.size(); ++i) all.push_back(run_json(runs[i], comparison.names[i]));
  return {
      {"title", fmt::format("{} runs", runs.size())},
      {"figures", Json::array()},
      {"comparison",
       {{"figures", rows_json(comparison.figures)}, {"configuration", rows_json(comparison.configuration)}}},
      {"runs", std::move(all)}};
}

std::string html_page(const Json& data) {
  using namespace page_texts;
  return filled(page_html,
                {{"@title@", for_html(data.at("title").get<std::string>())},
                 {"@style@", std::string(page_css)},
                 {"@data@", for_script(data)},
                 {"@script@", fmt::format("{}\n{}\n{}\n{}", elements_js, chart_js, timeline_js, page_js)}});
}

}  // namespace layerstream::report
