#pragma once

#include "core/cuda/graph_lifetime.h"
