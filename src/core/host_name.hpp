#pragma once

#include <string>

namespace layerstream {

/// Of this machine; "localhost" if the system does not tell.
std::string host_name();

}  // namespace layerstream
