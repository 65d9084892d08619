#pragma once

#include "ops/cuda/head_backward_launch.hpp"
#include "ops/cuda/head_forward.hpp"
