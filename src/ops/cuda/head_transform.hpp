#pragma once

#include "ops/cuda/head_backward.hpp"
#include "ops/cuda/head_forward.hpp"
