#pragma once

#include "core/problem/check.h"
