#pragma once

#include <string_view>

/// The page's parts, as they stand in this folder.
namespace layerstream::report::page_texts {

extern const std::string_view page_html, page_css, elements_js, chart_js, timeline_js, page_js;

}  // namespace layerstream::report::page_texts
