#pragma once

#include "core/cuda/cuda_driver.h"
